"""What the loss scale was between one apply and the next, in a graph.

Gradients that leave a loop, a branch or a function are divided by the loss scale that
multiplied their loss, whose tensor cannot be used outside of it. Another tensor holds
the same value if it was read with no apply in between: each apply may move the loss
scale.
"""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional

from lossscale.optimizer.origin import Marks
from lossscale.optimizer.sweep import Mark
from lossscale.runtime import replicas
from lossscale.runtime.graphs import (
    current_graph,
    graphs_around_branches,
    is_other_branch,
    is_traced_in_place,
    notes_of,
)


class _Apply(NamedTuple):
    """An apply in a graph.

    Attributes:
      number: When it was traced: later marks have larger ones.
      graph: Where it was traced, perhaps a branch.
      reading: A tensor of the loss scale as it was before. None: there is none.
    """

    number: int
    graph: Any
    reading: Any


class Readings:
    """What was read between the applies of the optimizers that share a loss scale.

    Of each replica by itself: one is traced after the other, and all apply together.

    Args:
      marks: Where the loss scale was read.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def note_apply(self, read: Optional[Callable[[], Any]] = None) -> None:
        """Remembers that the loss scale may move now.

        Args:
          read: Called if nothing else holds its value. Returns it as a tensor, or None.
            None: nothing is read.
        """
        number = self._marks.next_number()
        for depth, graph in enumerate(graphs_around_branches()):
            reading = self._last(graph)
            if read and reading is None and depth == 0 and not self._applies(graph):
                with graph.as_default():  # outside of a branch, which may not run
                    reading = read()
            self._applies(graph).append(_Apply(number, current_graph(), reading))

    def latest(self) -> Any:
        """Returns a tensor of the loss scale as it is now, None if there is none."""
        return self._last(next(graphs_around_branches()))

    def is_current(self, mark: Mark) -> bool:
        """Tells whether the loss scale is what it was where `mark` is."""
        return not self._later(mark)

    def at(self, mark: Mark) -> Any:
        """Returns a tensor of the loss scale as it was where `mark` is.

        None: it is not known. A function that has been traced before may have been
        called before an apply or after it.
        """
        if not is_traced_in_place(mark.tensor.graph):
            return None
        return self._later(mark)[0].reading

    def _later(self, mark: Mark) -> List[_Apply]:
        applies = self._applies(next(graphs_around_branches()))
        later = [each for each in applies if each.number > mark.number]
        # Of two branches one runs: what the other applies moves nothing here.
        return [each for each in later if not is_other_branch(each.graph)]

    def _last(self, graph: Any) -> Any:
        """Returns the last tensor of the loss scale in a graph since its last apply."""
        applies = self._applies(graph)
        return self._marks.last_scale(graph, applies[-1].number if applies else -1)

    def _applies(self, graph: Any) -> List[_Apply]:
        of_replicas = notes_of(graph, self)
        applies: List[_Apply] = of_replicas.setdefault(replicas.this_one(), [])
        return applies
