"""The steps of one optimizer, as far as the order of calls tells."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, Deque, Dict, List, Optional

from lossscale.optimizer.unscaled import Unscaled
from lossscale.runtime import replicas
from lossscale.runtime.graphs import current_graph, visible_graphs

_numbers = itertools.count(1)
#: So many losses of a step are kept, to tell whether they were finite: the last ones. A
#: loop that scales losses and never applies must not keep them all.
_LOSSES = 8
#: So many graphs' steps are remembered, of all replicas. Eager steps are apart.
_GRAPHS = 64
#: So many lists of unscaled gradients that have not been applied are remembered.
_LISTS = 8


class Step:
    """One step of one optimizer on one replica, as far as the order of calls tells.

    Attributes:
      loss_scale: The `float32` tensor that multiplied the loss. The gradients are
        divided by it even if a shared loss scale has moved since.
      number: When the loss was scaled: later steps have larger numbers. 0 if it was not
        scaled by an optimizer.
      losses: The last losses, before they were multiplied.
      pending: What has been unscaled since, and not been applied yet.
      older: What had been unscaled before, and not been applied.
      applied: Whether gradients of this step have been applied.
    """

    def __init__(self, loss_scale: Any) -> None:
        self.loss_scale = loss_scale
        self.number = 0
        self.losses: List[Any] = []
        self.pending: Deque[Unscaled] = deque(maxlen=_LISTS)
        self.older: Deque[Unscaled] = deque(maxlen=_LISTS)
        self.applied = False
        self._graph = current_graph()

    def note_scaled(self, loss: Any) -> None:
        """Remembers that a loss is multiplied with `loss_scale`."""
        self.older.extend(self.pending)
        self.pending.clear()
        self.losses = [*self.losses, loss][-_LOSSES:]
        self.number = next(_numbers)

    def forget_applied(self) -> None:
        """Forgets unscaled gradients that have been applied."""
        for each in list(self.pending):
            if not each.awaited:
                self.pending.remove(each)

    def is_of(self, graph: Any) -> bool:
        """Tells whether this step belongs to a graph; None is eager mode."""
        return self._graph is graph


class Steps:
    """The step that one optimizer is at, on each replica and in each graph."""

    def __init__(self) -> None:
        self._steps: Dict[Any, Step] = {}

    def current(self) -> Optional[Step]:
        """Returns the step that this replica is at in this graph, None without one.

        An applied step stays, since a loss may have two lists of gradients that are
        applied one after the other, until a loss is scaled again. One whose loss the
        user scaled by other means ends when it is applied.
        """
        replica = replicas.this_one()
        for graph in visible_graphs():
            step = self._steps.get((replica, id(graph)))
            if step is not None and step.is_of(graph):
                return None if step.applied and not step.number else step
        return None

    def open(self, loss_scale: Any) -> Step:
        """Returns the open step, or a new one once the last one has been applied.

        A loop or a branch begins one of its own: what the step around it holds is used
        after the loop, where tensors of the loop cannot be.
        """
        step = self.current()
        if step is None or step.applied or not step.is_of(current_graph()):
            older = [] if step is None else step.pending
            step = self._keep(Step(loss_scale))
            step.older.extend(older)
        step.loss_scale = loss_scale
        return step

    def _keep(self, step: Step) -> Step:
        """Keeps a step, and forgets the oldest one of a graph if there are many."""
        graph = current_graph()
        key = (replicas.this_one(), id(graph))
        self._steps.pop(key, None)
        of_graphs = [each for each in self._steps if each[1] != id(None)]
        if graph is not None and len(of_graphs) >= _GRAPHS:
            del self._steps[of_graphs[0]]
        self._steps[key] = step
        return step
