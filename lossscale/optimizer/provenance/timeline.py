"""What happened to one loss scale, on one clock: read, scaled with, and applied.

Gradients are divided by the tensor that their loss was multiplied with. If that was
read within a loop, a branch or a function, it cannot be used outside of it, where the
gradients are applied. Any other reading of the loss scale will do if no step was
applied in between: only an apply can change the loss scale. No graph is kept alive.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, Deque, Dict, Hashable, List, NamedTuple

from lossscale.optimizer.provenance.unscalings import Unscaling
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Graph, Tensor
from lossscale.runtime.graphs import (
    current_graph,
    graph_of,
    graphs_around_branches,
    is_building,
    is_other_branch,
    is_traced_in_place,
    is_visible,
    notes_of,
    visible_graphs,
)
from lossscale.units.eager import Bounded
from lossscale.units.sweep import Swept

#: How many losses are kept on each replica, to tell whether they were finite.
_LOSSES = 8
#: How many readings are kept of eager mode.
_READINGS = 64
#: How many gradients that were returned in eager mode are recognized.
_RETURNED = 1 << 14


class Reading:
    """A tensor of the loss scale.

    Attributes:
      number: When it was read.
      tensor: The tensor.
      replica: Where it was read.
      is_from_then_on: Whether what is multiplied with it is so at any time since.
    """

    def __init__(self, number: int, tensor: Tensor, is_from_then_on: bool) -> None:
        self.number, self.tensor = number, tensor
        self.replica, self.is_from_then_on = replicas.this_one(), is_from_then_on

    def is_visible(self) -> bool:
        """Tells whether the tensor can be used where a graph is built now."""
        return is_visible(self.tensor)


class _Apply(NamedTuple):
    """An apply in a graph.

    Attributes:
      number: When it was traced: what is read later has a larger one.
      graph: Where it was traced, perhaps a branch.
      reading: A tensor of the loss scale as it was before. None: there is none.
    """

    number: int
    graph: Graph
    reading: Any


class _Losses:
    """The last losses that were scaled on one replica, before they were.

    Attributes:
      recent: The losses.
      loss_scale: The tensor that the last one was multiplied with.
      are_applied: Whether gradients were applied since.
    """

    def __init__(self) -> None:
        self.recent: Deque[Any] = deque(maxlen=_LOSSES)
        self.loss_scale: Any = None
        self.are_applied = False


class Notes:
    """What is noted of one graph, or of eager mode.

    Attributes:
      readings: The tensors of the loss scale, in their order.
      losses: The last losses of each replica.
      applies: The applies of each replica, in their order.
      returned: The unscaling that returned a gradient, by what names that.
      swept: The units in the graph.
    """

    def __init__(self) -> None:
        self.readings: Deque[Reading] = deque()
        self.losses: Dict[Hashable, _Losses] = {}
        self.applies: Dict[Hashable, List[_Apply]] = {}
        self.returned: Dict[int, Unscaling] = {}
        self.swept = Swept()


class _NotesOfEagerMode(Notes):
    """It never ends, so that the oldest are forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.readings = deque(maxlen=_READINGS)
        self.returned = Bounded(_RETURNED)


class Timeline:
    """What happened to one loss scale, in each graph and on each replica."""

    def __init__(self) -> None:
        self._clock = itertools.count(1)
        self._of_eager_mode = _NotesOfEagerMode()

    def now(self) -> int:
        """Returns a number that is larger than those of what happened before."""
        return next(self._clock)

    def of(self, graph: Graph) -> Notes:
        """Returns what is noted of a graph, or of eager mode."""
        return self._of_eager_mode if graph is None else notes_of(graph, self, Notes)

    def note_reading(self, tensor: Tensor, is_from_then_on: bool = False) -> Reading:
        """Remembers a tensor of the loss scale."""
        reading = Reading(self.now(), tensor, is_from_then_on)
        self.of(graph_of(tensor)).readings.append(reading)
        return reading

    def note_loss(self, loss: Tensor, loss_scale: Any) -> None:
        """Remembers a loss that is multiplied with a tensor of the loss scale."""
        replica = replicas.this_one()
        of_replicas = self.of(current_graph()).losses
        losses = of_replicas.get(replica)
        if losses is None or losses.are_applied:
            losses = of_replicas[replica] = _Losses()
        losses.recent.append(loss)
        losses.loss_scale = loss_scale

    def note_apply(self, read: Any = None) -> None:
        """Remembers that the loss scale may move now.

        Args:
          read: Called if nothing else holds its value in this graph. Returns it as a
            tensor. None: nothing is read.
        """
        for losses in self._losses_here():
            losses.are_applied = True
        if not is_building():
            return
        number = self.now()
        for depth, graph in enumerate(graphs_around_branches()):
            reading = self._last(graph)
            if read and reading is None and depth == 0 and not self._applies(graph):
                with graph.as_default():  # outside of a branch, which may not run
                    reading = read()
            self._applies(graph).append(_Apply(number, current_graph(), reading))

    def is_read_here(self) -> bool:
        """Tells whether the loss scale was read where gradients are applied now."""
        return any(self.of(graph).readings for graph in visible_graphs())

    def losses(self) -> List[Any]:
        """Returns the last losses that were scaled here."""
        return [loss for losses in self._losses_here() for loss in losses.recent]

    def last_that_scaled(self) -> Any:
        """Returns the tensor that multiplied the last loss here, None without one."""
        found = [losses.loss_scale for losses in self._losses_here()]
        return found[0] if found and is_visible(found[0]) else None

    def _losses_here(self) -> List[_Losses]:
        """Returns those of the innermost graph in sight in which there are some."""
        replica = replicas.this_one()
        for graph in visible_graphs():
            found = self.of(graph).losses.get(replica)
            if found is not None:
                return [found]
        return []

    def latest(self) -> Any:
        """Returns a tensor of the loss scale as it is now, None if there is none.

        In eager mode, as it was read last on this replica.
        """
        return self._last(next(graphs_around_branches()))

    def is_current(self, reading: Reading) -> bool:
        """Tells whether the loss scale is what it was at a reading."""
        return not self._later(reading)

    def at(self, reading: Reading) -> Any:
        """Returns a tensor of the loss scale as it was at a reading.

        None: it is not known. A function that has been traced before may have been
        called before an apply or after it.
        """
        if not is_traced_in_place(graph_of(reading.tensor)):
            return None
        tensor = self._later(reading)[0].reading
        return tensor if tensor is not None and is_visible(tensor) else None

    def _later(self, reading: Reading) -> List[_Apply]:
        applies = self._applies(next(graphs_around_branches()))
        later = [each for each in applies if each.number > reading.number]
        # Of two branches one runs: what the other applies moves nothing here.
        return [each for each in later if not is_other_branch(each.graph)]

    def _last(self, graph: Graph) -> Any:
        """Returns the last tensor of the loss scale in a graph since its last apply."""
        replica = replicas.this_one()
        applies = [] if graph is None else self._applies(graph)
        after = applies[-1].number if applies else -1
        for each in reversed(self.of(graph).readings):
            if each.replica == replica and each.is_visible():
                return each.tensor if each.number > after else None
        return None

    def _applies(self, graph: Graph) -> List[_Apply]:
        return self.of(graph).applies.setdefault(replicas.this_one(), [])
