"""What happened to one loss scale: a list of events for each graph, on one clock.

A step finds what it needs in the list of its graph, or of eager mode:

```
the loss scale's value now       the tensor of the last Read, if no Apply came after it
its value at a Read              the tensor of the first Apply after that Read
the losses of this step          the last Losses, back to an Apply
which call returned a gradient   the Unscale that has the gradient
```

A tensor that was read in a loop, a branch or a function cannot be used outside of it,
where the gradients are applied. Another tensor of the loss scale serves as well, unless
a step was decided on in between: only a step moves the loss scale. The history keeps no
graph alive, and no gradient.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import (
    Callable,
    Deque,
    Iterable,
    Iterator,
    List,
    Optional,
    Type,
    TypeVar,
    cast,
)

import tensorflow as tf

from lossscale.gradients.check import CLEAN, Check
from lossscale.gradients.packing import as_they_are
from lossscale.optimizer.provenance.events import (
    Apply,
    Event,
    Loss,
    Optimizer,
    Read,
    Unscale,
)
from lossscale.optimizer.provenance.values import Values
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Grad, Grads, Graph, Pair, Scalar, Tensor
from lossscale.runtime.autograph import do_not_convert
from lossscale.runtime.graphs import (
    current_graph,
    graph_of,
    graphs_around_branches,
    is_eager,
    is_other_branch,
    is_traced_in_place,
    is_visible,
    notes_of,
    visible_graphs,
)
from lossscale.scales.base import LossScale, unguarded
from lossscale.units.sweep import values_of
from lossscale.units.unit import Unit

#: So many events of eager mode are remembered.
_EVENTS = 256
#: So many losses are looked at to tell whether the loss was finite.
_LOSSES = 8
AnEvent = TypeVar("AnEvent", bound=Event)


class History:
    """What is known of one loss scale.

    Attributes:
      optimizers: The `Provenance` of each optimizer that shares the loss scale.
      has_unscaled: Whether gradients were ever unscaled by it.
      read_as_float_at: When it was last read as a Python number.
      values: The unit of each value.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.has_unscaled = False
        self.read_as_float_at = 0
        self._clock = itertools.count(1)
        self._of_eager_mode: Deque[Event] = deque(maxlen=_EVENTS)
        self._loss_scale = weakref.ref(loss_scale)
        #: By their times.
        self._unscalings: weakref.WeakValueDictionary[int, Unscale] = (
            weakref.WeakValueDictionary()
        )
        self.values = Values(self._read_now, self._unscalings.get)
        scale = Unit(1.0, 1.0, is_scale=True)
        variable = getattr(unguarded(loss_scale), "current_loss_scale", None)
        self.values.note_variable(variable, scale)

    def __deepcopy__(self, memo: object) -> None:
        return None  # the copy of a loss scale has other optimizers

    def is_shared(self) -> bool:
        """Tells whether several optimizers of Keras share the loss scale."""
        of_keras = [each for each in self.optimizers if each.is_keras]
        return len(of_keras) > 1

    def now(self) -> int:
        """Returns a time that is later than every earlier event."""
        return next(self._clock)

    def events(self, graph: Optional[Graph]) -> Deque[Event]:
        """Returns the events in a graph, or in eager mode (None), in order."""
        return self._of_eager_mode if graph is None else notes_of(graph, self, deque)

    # Events are noted here.

    def note_loss(self, loss: Tensor, tensor: Scalar) -> None:
        """Remembers a loss that is multiplied with a tensor of the loss scale."""
        graph = current_graph()
        losses = self._of_here(graph, Loss)
        for older in itertools.islice(losses, _LOSSES - 1, _LOSSES):
            older.loss = None  # a loss for each example takes memory
        self.events(graph).append(Loss(self.now(), tensor, loss))

    @do_not_convert
    def note_read(self, tensor: Scalar) -> None:
        """Remembers a tensor of the loss scale, which may multiply a loss."""
        if self.values.are_ignored():
            return  # a step is being applied, which itself moves the loss scale
        if is_eager(tensor):
            (unit,) = self.values.units([tensor])
            if unit.is_scale and unit.reads:
                return  # it was noted before
        self.values.note_read(tensor, self._add_read(tensor))

    def _add_read(self, tensor: Scalar, is_from_then_on: bool = False) -> Read:
        read = Read(self.now(), tensor, is_from_then_on)
        self.events(graph_of(tensor)).append(read)
        return read

    def _read_now(self, is_from_then_on: bool = False) -> Read:
        """Reads the loss scale for values of eager mode that it may have scaled."""
        # It is alive: an optimizer holds it and this history.
        loss_scale = cast(LossScale, self._loss_scale())
        return self._add_read(tf.identity(loss_scale._value()), is_from_then_on)

    def note_float(self) -> None:
        """Remembers that the loss scale was read as a Python number."""
        self.read_as_float_at = self.now()

    @do_not_convert
    def note_unscaled(
        self,
        grads: Grads,
        check: Check,
        pairs: List[Pair],
        units: Iterable[Unit],
    ) -> None:
        """Remembers gradients that are returned to the user.

        Args:
          grads: The gradients.
          check: Their check.
          pairs: Each gradient before its division, and its divisor.
          units: The units of the gradients before their division.
        """
        self.has_unscaled = True
        event = Unscale(self.now(), grads, check, pairs, self.optimizers)
        self._unscalings[event.time] = event
        values = values_of(grads)
        for graph in {graph_of(each) for each in values if each is not None}:
            self.events(graph).append(event)
        self.values.note_unscaled(values, event, units)

    def note_unscaled_by(self, grads: Grads, scaled: Grads, divisor: Scalar) -> None:
        """Remembers gradients that `LossScale.unscale` returned, unchecked."""
        scaled = as_they_are(scaled)
        pairs: List[Pair] = [(each, divisor) for each in scaled]
        self.note_unscaled(grads, CLEAN, pairs, self.values.units(scaled))

    def note_apply(self, read: Optional[Callable[[], Scalar]] = None) -> None:
        """Remembers that the loss scale may move now.

        Args:
          read: Returns the loss scale as a tensor. Called if no other tensor in this
            graph holds its value. None: nothing is read.
        """
        time, function = self.now(), next(graphs_around_branches())
        for graph in visible_graphs():
            before = None if graph is None else self._last_read(graph)
            is_first = before is None and not any(self._of_here(graph, Apply))
            if read and is_first and graph is function and graph is not None:
                with graph.as_default():  # outside of a branch, which may not run
                    before = read()
            self.events(graph).append(Apply(time, before))

    # A step's questions are answered here.

    def is_read_here(self) -> bool:
        """Tells whether the loss scale was read where gradients are being applied."""
        lists = map(self.events, visible_graphs())
        return any(each.is_read for events in lists for each in events)

    def losses(self) -> List[Optional[Tensor]]:
        """Returns the last losses that were scaled here, all of one step."""
        return [each.loss for each in self._losses()][::-1]

    def last_that_scaled(self) -> Optional[Scalar]:
        """Returns the tensor that multiplied the last loss here, None if none did."""
        last = next(iter(self._losses()), None)
        return last.tensor if last is not None and is_visible(last.tensor) else None

    def _losses(self) -> List[Loss]:
        """Returns the events of the last losses, the last one first."""
        for graph in visible_graphs():
            found: List[Loss] = []
            for each in self._of_here(graph, Loss, Apply):
                if isinstance(each, Loss):
                    found.append(each)
                elif found:
                    break  # any other loss is of an earlier step
                if len(found) == _LOSSES:
                    break
            if found:
                return found
        return []

    def latest(self) -> Optional[Scalar]:
        """Returns a tensor of the loss scale's value now, None if there is none.

        In eager mode: the tensor that was read last on this replica.
        """
        return self._last_read(next(graphs_around_branches()))

    def is_current(self, read: Read) -> bool:
        """Tells whether the loss scale still has the value of a read."""
        return self._next_apply(read) is None

    def at(self, read: Read) -> Optional[Scalar]:
        """Returns a tensor of the loss scale's value at a read, before an apply.

        None: the value is not known, as a function that was traced earlier may have
        been called before the apply or after it.
        """
        if not is_traced_in_place(graph_of(read.tensor)):
            return None
        apply = self._next_apply(read)
        tensor = None if apply is None else apply.tensor
        return tensor if tensor is not None and is_visible(tensor) else None

    def _next_apply(self, read: Read) -> Optional[Apply]:
        """Returns the first apply after a read, None if none may have come after it."""
        graph = next(graphs_around_branches())
        later = None
        for each in self._of_here(graph, Apply):
            # Only one of two branches runs: an apply in the other moves nothing here.
            if each.time > read.time and not is_other_branch(each.graph):
                later = each
        return later

    def _last_read(self, graph: Optional[Graph]) -> Optional[Scalar]:
        """Returns the last tensor of the loss scale in a graph since its last apply."""
        for each in self._of_here(graph, Read, Apply):
            if isinstance(each, Apply):
                if graph is not None:
                    return None
            elif isinstance(each, Read) and each.is_visible():
                return each.tensor
        return None

    def _of_here(
        self, graph: Optional[Graph], *kinds: Type[AnEvent]
    ) -> Iterator[AnEvent]:
        """Yields the events of these kinds on this replica in a graph, last first."""
        replica = replicas.this_one()
        for each in reversed(self.events(graph)):
            if isinstance(each, kinds) and each.replica == replica:
                yield each

    def unscaling_of(self, grad: Grad) -> Optional[Unscale]:
        """Returns the unscaling that returned exactly this gradient, or None."""
        (value,) = values_of([grad])
        if value is None:
            return None
        events = reversed(self.events(graph_of(value)))
        unscalings = (each for each in events if isinstance(each, Unscale))
        return next((each for each in unscalings if each.has_returned(value)), None)


_histories: weakref.WeakKeyDictionary[LossScale, History] = weakref.WeakKeyDictionary()


def history_of(loss_scale: LossScale) -> History:
    """Returns the history of a loss scale, which all of its optimizers share."""
    history = _histories.get(loss_scale)
    if history is None:
        history = _histories[loss_scale] = History(loss_scale)
        loss_scale._noted_by = history
    return history
