"""What optimizers that share a loss scale know of it: one ledger, on one clock.

Written down are where the loss scale was read, what was unscaled, and when a step was
applied, which may have moved the loss scale. No graph is kept alive, and no gradient.
"""

from __future__ import annotations

import uuid
import weakref
from typing import (
    Any,
    Dict,
    Iterable,
    List,
    Optional,
    Tuple,
)

import tensorflow as tf

from lossscale.gradients.check import CLEAN, Check
from lossscale.gradients.packing import as_they_are
from lossscale.optimizer.provenance.timeline import Timeline
from lossscale.optimizer.provenance.unscalings import Unscaling
from lossscale.runtime.aliases import Grad, Grads, Graph, Scalar, Tensor, Variable
from lossscale.runtime.autograph import do_not_convert
from lossscale.runtime.bodies import put_mark
from lossscale.runtime.callbacks import number_of
from lossscale.runtime.graphs import (
    BODIES,
    current_graph,
    graph_of,
    is_building,
    is_eager,
)
from lossscale.runtime.kerases import tensor_of
from lossscale.units.eager import Tracker
from lossscale.units.sweep import STEP, Sweep, Swept, values_of
from lossscale.units.unit import TRAINED, UNKNOWN, Unit


class _UnnotedStep:
    """A step that is built in a graph. Later sweeps leave it out."""

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


class Ledger:
    """What is known of one loss scale.

    Attributes:
      timeline: When it was read, scaled with and applied.
      has_unscaled: Whether gradients were ever unscaled by it.
      number_read: When it was last read as a Python number.
      optimizers: The `Provenance` of each optimizer that it scales the losses of.
    """

    def __init__(self, loss_scale: Any) -> None:
        self.has_unscaled = False
        self.number_read = 0
        self.optimizers: Any = weakref.WeakSet()
        self._key = uuid.uuid4().hex
        self.timeline = Timeline()
        self._loss_scale = weakref.ref(loss_scale)
        self._tracker = Tracker(self._marked, self._read_now)
        self._unscalings: Any = weakref.WeakValueDictionary()
        scale = Unit(1.0, 1.0, is_scale=True)
        self.note_variable(getattr(loss_scale, "current_loss_scale", None), scale)

    def __deepcopy__(self, memo: Dict[int, Any]) -> None:
        return None  # a copied loss scale has other optimizers

    def note_trained(self, variables: Iterable[Variable]) -> None:
        """Notes that variables are trained: they hold weights, and no gradients."""
        for each in variables:
            self.note_variable(tensor_of(each), TRAINED)

    def note_variable(self, variable: Variable, unit: Unit) -> None:
        """Notes the unit of what a variable holds."""
        for each in getattr(variable, "values", [variable]):
            handle = getattr(each, "handle", None)
            if handle is not None and is_eager(handle):
                self._tracker.note_handle(handle, unit)

    # What happens.

    def note_loss(self, loss: Tensor, loss_scale: Any) -> None:
        """Remembers a loss that is multiplied with a tensor of the loss scale."""
        self.timeline.note_loss(loss, loss_scale)

    @do_not_convert
    def note_reading(self, tensor: Tensor) -> None:
        """Remembers a tensor of the loss scale, which may multiply a loss."""
        if self._tracker.is_silent():
            return  # a step is applied, and with it the loss scale is moved
        (unit,) = self.units([tensor]) if is_eager(tensor) else [UNKNOWN]
        if unit.is_scale and unit.readings:
            return  # it was noted before
        reading = self.timeline.note_reading(tensor)
        unit = Unit(1.0, 1.0, frozenset([reading]), is_scale=True)
        self._note(tensor, unit, "reading")

    def note_number(self) -> None:
        """Remembers that the loss scale was read as a Python number."""
        self.number_read = self.timeline.now()

    @do_not_convert
    def note_unscaled(
        self,
        grads: Grads,
        check: Check,
        pairs: List[Tuple[Any, Any]],
        units: Iterable[Unit],
    ) -> None:
        """Remembers gradients that are returned to the user.

        Args:
          grads: Tensors, `tf.IndexedSlices` or None.
          check: Their check.
          pairs: What each was, and what it was divided by.
          units: The units that they had.
        """
        self.has_unscaled = True
        now = self.timeline.now()
        unscaling = Unscaling(now, grads, check, pairs, self.optimizers)
        self._unscalings[unscaling.number] = unscaling
        own = frozenset([unscaling])
        for value, unit in zip(values_of(grads), units):
            if value is not None:
                checks = own | unit.checks
                mark = f"unscaled:{unscaling.number}"
                self._note(value, Unit(0.0, 0.0, checks=checks), mark)
                self.timeline.of(graph_of(value)).returned[_name(value)] = unscaling

    def note_unscaled_by(self, grads: Grads, scaled: Grads, divisor: Scalar) -> None:
        """Remembers what `LossScale.unscale` returned, which checks nothing."""
        scaled = as_they_are(scaled)
        pairs = [(each, divisor) for each in scaled]
        self.note_unscaled(grads, CLEAN, pairs, self.units(scaled))

    def step(self) -> Any:
        """Returns a context in which a step is applied: nothing in it is noted."""
        if not is_building():
            return self._tracker
        graph = current_graph()
        self._sweep().visible(graph)
        return _UnnotedStep(graph, self._swept(graph), self._tracker)

    # What is known.

    @do_not_convert
    def units(self, grads: Iterable[Grad]) -> List[Unit]:
        """Returns the unit of each gradient."""
        sweep = self._sweep()
        return [sweep.known(value) for value in values_of(grads)]

    def _sweep(self) -> Sweep:
        return Sweep(self._tracker.unit, self._swept, self._marked)

    def may_have_missed(self) -> bool:
        """Tells whether something may have become of gradients that nobody noted."""
        return not is_building() and self._tracker.is_deaf()

    def unscaling_of(self, grad: Grad) -> Optional[Unscaling]:
        """Returns the unscaling that returned this very gradient, None without one."""
        (value,) = values_of([grad])
        if value is None:
            return None
        return self.timeline.of(graph_of(value)).returned.get(_name(value))

    # Where it is kept.

    def _note(self, tensor: Tensor, unit: Unit, mark: str) -> None:
        if is_eager(tensor):
            self._tracker.note(tensor, unit)
            return
        swept = self._swept(graph_of(tensor))
        swept.marks[id(tensor)] = swept.table[id(tensor)] = unit
        put_mark(tensor.op, f"{self._key}:{mark}")
        self._tracker.listen()  # what eager mode does with what a function returns

    def _marked(self, mark: str) -> Optional[Unit]:
        """Returns the unit that a mark on an operation of a function means."""
        key, _, what = mark.partition(":")
        if key != self._key:
            return None
        if what == "reading":
            return Unit(1.0, 1.0, is_scale=True)
        unscaling = self._unscalings.get(int(what.partition(":")[2]))
        checks = frozenset() if unscaling is None else frozenset([unscaling])
        return Unit(0.0, 0.0, checks=checks)

    def _read_now(self, is_from_then_on: bool = False) -> Unit:
        loss_scale: Any = self._loss_scale()  # alive: an optimizer has its tracker
        tensor = tf.identity(loss_scale._value())
        reading = self.timeline.note_reading(tensor, is_from_then_on)
        return Unit(1.0, 1.0, frozenset([reading]))

    def _swept(self, graph: Graph) -> Swept:
        return self.timeline.of(graph).swept


def _name(tensor: Tensor) -> int:
    """Returns the number of a tensor: TensorFlow's own in eager mode."""
    return number_of(tensor) if is_eager(tensor) else id(tensor)


_ledgers: Any = weakref.WeakKeyDictionary()  # LossScale -> Ledger


def ledger_of(loss_scale: Any) -> Ledger:
    """Returns the ledger of the optimizers that share a loss scale."""
    ledger: Optional[Ledger] = _ledgers.get(loss_scale)
    if ledger is None:
        ledger = _ledgers[loss_scale] = Ledger(loss_scale)
        loss_scale._noted_by = ledger
    return ledger
