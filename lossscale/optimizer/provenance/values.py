"""The unit of each value: its exponent of the loss scale, in graphs and in eager mode.

Tensors of the loss scale and unscaled gradients get their units here; the rules compute
the units of all other values (`units`). In a graph the operations of these tensors are
marked, too. If a function is made of the graph, its definition keeps the marks.
"""

from __future__ import annotations

import uuid
from typing import Callable, ContextManager, Iterable, List, Optional

from lossscale.optimizer.provenance.events import Unscale
from lossscale.runtime.aliases import Grad, Graph, Tensor, Variable
from lossscale.runtime.autograph import do_not_convert
from lossscale.runtime.bodies import put_mark
from lossscale.runtime.graphs import (
    BODIES,
    current_graph,
    graph_of,
    is_building,
    is_eager,
    notes_of,
)
from lossscale.runtime.kerases import tensor_of
from lossscale.units.eager import Tracker
from lossscale.units.sources import NONE, ReadNow, Source
from lossscale.units.sweep import STEP, Sweep, Swept, values_of
from lossscale.units.unit import TRAINED, Unit

_READ = "read"


class Values:
    """The units of all values, as far as they are known.

    Args:
      read_now: Reads the loss scale as it is now, for values of eager mode that it may
        have multiplied.
      unscaling_at: Takes a time, and returns the unscaling of that time. None: it is no
        longer kept.
    """

    def __init__(
        self,
        read_now: ReadNow,
        unscaling_at: Callable[[int], Optional[Unscale]],
    ) -> None:
        self._unscaling_at = unscaling_at
        self._key = uuid.uuid4().hex
        self._tracker = Tracker(self._unit_of_mark, read_now)

    def note_read(self, tensor: Tensor, read: Source) -> None:
        """Notes a tensor of the loss scale, and the event of reading it."""
        self._note(tensor, Unit(1.0, 1.0, frozenset([read]), is_scale=True), _READ)

    def note_unscaled(
        self,
        values: List[Optional[Tensor]],
        unscaling: Unscale,
        units: Iterable[Unit],
    ) -> None:
        """Notes tensors that were unscaled.

        Args:
          values: The tensors; some may be None.
          unscaling: The event of unscaling them.
          units: Their units before.
        """
        for value, unit in zip(values, units):
            if value is not None:
                sources = frozenset([unscaling]) | unit.unscalings
                self._note(value, Unit(0.0, 0.0, sources), str(unscaling.time))

    def note_trained(self, variables: Iterable[Variable]) -> None:
        """Notes that variables are trained: they hold weights and no gradients."""
        for each in variables:
            self.note_variable(tensor_of(each), TRAINED)

    def note_variable(self, variable: Variable, unit: Unit) -> None:
        """Notes the unit of what a variable holds."""
        for each in getattr(variable, "values", [variable]):
            handle = getattr(each, "handle", None)
            if handle is not None and is_eager(handle):
                self._tracker.note_handle(handle, unit)

    @do_not_convert
    def units(self, grads: Iterable[Grad]) -> List[Unit]:
        """Returns the unit of each gradient."""
        sweep = self._sweep()
        return [sweep.known(value) for value in values_of(grads)]

    def may_have_missed(self) -> bool:
        """Tells whether gradients may have been changed while nobody tracked them."""
        return not is_building() and self._tracker.is_deaf()

    def are_ignored(self) -> bool:
        """Tells whether a step is being applied, whose operations are not tracked."""
        return self._tracker.is_silent()

    def ignoring(self) -> ContextManager[None]:
        """Returns a context for applying a step: operations in it are not tracked."""
        graph = current_graph()
        if graph is None:
            return self._tracker
        self._sweep().units_in(graph)
        return _IgnoredStep(graph, self._swept(graph), self._tracker)

    def _sweep(self) -> Sweep:
        return Sweep(self._tracker.unit, self._swept, self._unit_of_mark)

    def _swept(self, graph: Graph) -> Swept:
        return notes_of(graph, self, Swept)

    def _note(self, tensor: Tensor, unit: Unit, mark: str) -> None:
        graph = graph_of(tensor)
        if graph is None:
            self._tracker.note(tensor, unit)
            return
        swept = self._swept(graph)
        swept.marks[id(tensor)] = swept.table[id(tensor)] = unit
        put_mark(tensor.op, f"{self._key}:{mark}")
        self._tracker.listen()  # eager mode may go on with the function's results

    def _unit_of_mark(self, mark: str) -> Optional[Unit]:
        """Returns the unit that a mark on an operation of a function means."""
        key, _, what = mark.partition(":")
        if key != self._key:
            return None
        if what == _READ:
            return Unit(1.0, 1.0, is_scale=True)
        unscaling = self._unscaling_at(int(what))
        return Unit(0.0, 0.0, NONE if unscaling is None else frozenset([unscaling]))


class _IgnoredStep:
    """A step that is being built in a graph. Later sweeps leave its operations out."""

    def __init__(self, graph: Graph, swept: Swept, tracker: Tracker) -> None:
        self._graph, self._swept, self._tracker = graph, swept, tracker
        self._start = len(graph.get_operations())

    def __enter__(self) -> None:
        self._tracker.__enter__()

    def __exit__(self, *_: object) -> None:
        self._tracker.__exit__()
        operations = self._graph.get_operations()
        for each in operations[self._start :]:
            if each.type in BODIES:
                put_mark(each, STEP)
        self._swept.done = len(operations)
