"""What happened to one loss scale: a list of events for each graph, on one clock.

What a step asks is found in the list of its graph, or of eager mode:

```
the loss scale as it is now   the tensor of the last Read, if no Apply came after it
as it was at a Read           the tensor of the first Apply after it
the losses of this step       the last Losses, back to an Apply
who returned this gradient    the Unscale that has it
```

A tensor that was read in a loop, a branch or a function cannot be used outside of it,
where the gradients are applied. Any other one serves if no step was decided on in
between: only a step moves the loss scale. No graph is kept alive, and no gradient.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import Any, Deque, Iterable, Iterator, List, Optional, Tuple, Type

import tensorflow as tf

from lossscale.gradients.check import CLEAN, Check
from lossscale.gradients.packing import as_they_are
from lossscale.optimizer.provenance.events import (
    Apply,
    Event,
    Loss,
    Read,
    Unscale,
)
from lossscale.optimizer.provenance.values import Values
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Grad, Grads, Graph, Scalar, Tensor
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
from lossscale.scales.adjusting import unguarded
from lossscale.units.sweep import values_of
from lossscale.units.unit import Unit

#: How many events of eager mode are remembered.
_EVENTS = 256
#: How many losses tell whether the loss was finite.
_LOSSES = 8


class History:
    """What is known of one loss scale.

    Attributes:
      optimizers: The `Provenance` of each optimizer that it scales the losses of.
      has_unscaled: Whether gradients were ever unscaled by it.
      read_as_float_at: When it was last read as a Python number.
      values: What each value has of it.
    """

    def __init__(self, loss_scale: Any) -> None:
        self.optimizers: Any = weakref.WeakSet()
        self.has_unscaled = False
        self.read_as_float_at = 0
        self._clock = itertools.count(1)
        self._of_eager_mode: Deque[Event] = deque(maxlen=_EVENTS)
        self._loss_scale = weakref.ref(loss_scale)
        self._unscalings: Any = weakref.WeakValueDictionary()  # by their times
        self.values = Values(self._read_now, self._unscalings.get)
        scale = Unit(1.0, 1.0, is_scale=True)
        variable = getattr(unguarded(loss_scale), "current_loss_scale", None)
        self.values.note_variable(variable, scale)

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a copied loss scale has other optimizers

    def is_shared(self) -> bool:
        """Tells whether several optimizers of Keras scale their losses by it."""
        of_keras = [each for each in self.optimizers if each.is_keras]
        return len(of_keras) > 1

    def now(self) -> int:
        """Returns a time that is later than what happened before."""
        return next(self._clock)

    def events(self, graph: Graph) -> Deque[Event]:
        """Returns what happened in a graph, or in eager mode, in order."""
        return self._of_eager_mode if graph is None else notes_of(graph, self, deque)

    # What happens.

    def note_loss(self, loss: Tensor, tensor: Any) -> None:
        """Remembers a loss that is multiplied with a tensor of the loss scale."""
        graph = current_graph()
        losses = self._of_here(graph, Loss)
        for older in itertools.islice(losses, _LOSSES - 1, _LOSSES):
            older.loss = None  # a loss of each example takes memory
        self.events(graph).append(Loss(self.now(), tensor, loss))

    @do_not_convert
    def note_read(self, tensor: Tensor) -> None:
        """Remembers a tensor of the loss scale, which may multiply a loss."""
        if self.values.are_ignored():
            return  # a step is applied, and with it the loss scale is moved
        if is_eager(tensor):
            (unit,) = self.values.units([tensor])
            if unit.is_scale and unit.reads:
                return  # it was noted before
        self.values.note_read(tensor, self._add_read(tensor))

    def _add_read(self, tensor: Tensor, is_from_then_on: bool = False) -> Read:
        read = Read(self.now(), tensor, is_from_then_on)
        self.events(graph_of(tensor)).append(read)
        return read

    def _read_now(self, is_from_then_on: bool = False) -> Read:
        """Reads it for the values of eager mode, which may have been scaled by it."""
        loss_scale: Any = self._loss_scale()  # alive: an optimizer has its history
        return self._add_read(tf.identity(loss_scale._value()), is_from_then_on)

    def note_float(self) -> None:
        """Remembers that the loss scale was read as a Python number."""
        self.read_as_float_at = self.now()

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
        event = Unscale(self.now(), grads, check, pairs, self.optimizers)
        self._unscalings[event.time] = event
        values = values_of(grads)
        for graph in {graph_of(each) for each in values if each is not None}:
            self.events(graph).append(event)
        self.values.note_unscaled(values, event, units)

    def note_unscaled_by(self, grads: Grads, scaled: Grads, divisor: Scalar) -> None:
        """Remembers what `LossScale.unscale` returned, which checks nothing."""
        scaled = as_they_are(scaled)
        pairs = [(each, divisor) for each in scaled]
        self.note_unscaled(grads, CLEAN, pairs, self.values.units(scaled))

    def note_apply(self, read: Any = None) -> None:
        """Remembers that the loss scale may move now.

        Args:
          read: Called if nothing else holds its value in this graph. Returns it as a
            tensor. None: nothing is read.
        """
        time, function = self.now(), next(graphs_around_branches())
        for graph in visible_graphs():
            before = None if graph is None else self._last_read(graph)
            is_first = before is None and not any(self._of_here(graph, Apply))
            if read and is_first and graph is function is not None:
                with graph.as_default():  # outside of a branch, which may not run
                    before = read()
            self.events(graph).append(Apply(time, before))

    # What is known.

    def is_read_here(self) -> bool:
        """Tells whether the loss scale was read where gradients are applied now."""
        lists = map(self.events, visible_graphs())
        return any(each.is_read for events in lists for each in events)

    def losses(self) -> List[Any]:
        """Returns the last losses that were scaled here, of one step."""
        return [each.loss for each in self._losses()][::-1]

    def last_that_scaled(self) -> Any:
        """Returns the tensor that multiplied the last loss here, None without one."""
        last = next(iter(self._losses()), None)
        return last.tensor if last is not None and is_visible(last.tensor) else None

    def _losses(self) -> List[Loss]:
        """Returns them, the last one first."""
        for graph in visible_graphs():
            found: List[Loss] = []
            for each in self._of_here(graph, Loss, Apply):
                if isinstance(each, Loss):
                    found.append(each)
                elif found:
                    break  # of an earlier step
                if len(found) == _LOSSES:
                    break
            if found:
                return found
        return []

    def latest(self) -> Any:
        """Returns a tensor of the loss scale as it is now, None if there is none.

        In eager mode, as it was read last on this replica.
        """
        return self._last_read(next(graphs_around_branches()))

    def is_current(self, read: Read) -> bool:
        """Tells whether the loss scale is what it was at a read."""
        return self._next_apply(read) is None

    def at(self, read: Read) -> Any:
        """Returns a tensor of the loss scale as it was at a read, before an apply.

        None: it is not known. A function that has been traced before may have been
        called before the apply or after it.
        """
        if not is_traced_in_place(graph_of(read.tensor)):
            return None
        apply = self._next_apply(read)
        tensor = None if apply is None else apply.tensor
        return tensor if tensor is not None and is_visible(tensor) else None

    def _next_apply(self, read: Read) -> Optional[Apply]:
        graph = next(graphs_around_branches())
        later = None
        for each in self._of_here(graph, Apply):
            # Of two branches one runs: what the other applies moves nothing here.
            if each.time > read.time and not is_other_branch(each.graph):
                later = each
        return later

    def _last_read(self, graph: Graph) -> Any:
        """Returns the last tensor of the loss scale in a graph since its last apply."""
        for each in self._of_here(graph, Read, Apply):
            if isinstance(each, Apply):
                if graph is not None:
                    return None
            elif each.is_visible():
                return each.tensor
        return None

    def _of_here(self, graph: Graph, *kinds: Type[Event]) -> Iterator[Any]:
        """Yields the events of these kinds on this replica in a graph, last first."""
        replica = replicas.this_one()
        for each in reversed(self.events(graph)):
            if isinstance(each, kinds) and each.replica == replica:
                yield each

    def unscaling_of(self, grad: Grad) -> Optional[Unscale]:
        """Returns the unscaling that returned this very gradient, None without one."""
        (value,) = values_of([grad])
        if value is None:
            return None
        events = reversed(self.events(graph_of(value)))
        unscalings = (each for each in events if isinstance(each, Unscale))
        return next((each for each in unscalings if each.has_returned(value)), None)


_histories: Any = weakref.WeakKeyDictionary()  # LossScale -> History


def history_of(loss_scale: Any) -> History:
    """Returns the history of a loss scale, which its optimizers share."""
    history: Optional[History] = _histories.get(loss_scale)
    if history is None:
        history = _histories[loss_scale] = History(loss_scale)
        loss_scale._noted_by = history
    return history
