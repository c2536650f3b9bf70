"""Measures the largest magnitude of each layer's outputs in training, on the device.

```
in a training step, for each call of a layer, in the order in which calls end:
  output[layer] = max(output[layer], largest magnitude of its outputs)
  given[layer] = max(given[layer], largest magnitude of its inputs)
at the end of the step:
  last = [output, given]
  if output is finite: recent = [output, recent without its oldest]
  else if the step was applied: meant = True
```

`NAN`, `INF` and `MASK` stand for NaN, inf, and -inf alone, which may be a mask. In this
order each is larger than the next, and all are larger than any other number.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import tensorflow as tf

from lossscale.ranges.model_state import changed
from lossscale.ranges.calls import things_of
from lossscale.ranges.magnitudes import floats_in
from lossscale.runtime import mode
from lossscale.runtime.autograph import do_not_convert
from lossscale.runtime.graphs import current_graph

#: These stand for -inf alone, inf and NaN, so that a maximum keeps the worst.
MASK, INF, NAN = 2.0**126, 2.0**127, float("inf")
#: A float32 above this counts as infinite.
_LARGEST = 2.0**125
#: How many steps with finite outputs `recent` keeps.
STEPS = 8


class Step:
    """The measurements of one replica's training step so far.

    Attributes:
      graph: The graph in which the step is traced, None in eager mode.
      names: The names of the layers whose calls run now.
      magnitudes: The measurements in that graph, `float32` of shape `[]`.
      places: Pairs of a row and an index in `magnitudes`.
    """

    def __init__(self) -> None:
        self.graph = current_graph()
        self.names: List[str] = []
        self.magnitudes: List[Any] = []
        self.places: List[Tuple[int, int]] = []
        # The tensor is kept, too, since Python reuses the ids of deleted objects.
        self._known: Dict[int, Tuple[Any, int]] = {}

    def add(self, row: int, tensors: Sequence[Any]) -> None:
        """Measures tensors for a row. It measures each tensor only once."""
        for tensor in tensors:
            if id(tensor) not in self._known:
                self._known[id(tensor)] = (tensor, len(self.magnitudes))
                self.magnitudes.append(magnitude(tensor))
            self.places.append((row, self._known[id(tensor)][1]))

    def rows(self, count: int) -> Any:
        """Returns the largest of each row, 0 if it is empty: `float32`, `[count]`."""
        if not self.places:
            return tf.zeros([count])
        rows, numbers = zip(*self.places)
        values = tf.gather(tf.stack(self.magnitudes), numbers)
        return tf.maximum(tf.math.unsorted_segment_max(values, rows, count), 0.0)


class LayerOutputs:
    """Measures the outputs of a model's layers. Create it in the strategy's scope.

    Attributes:
      paths: The layer's number -> its path: the names of the layers whose calls ran
        then, without the model. In the order in which the first calls ended.
      count: The number of layers.
      last, recent, meant: `float32` variables of shapes `[2 * count]`, `[STEPS, count]`
        and `[count]`, one per replica: see the module.
    """

    def __init__(self, model: Any, loss_scales: Sequence[Any]) -> None:
        self.paths: Dict[int, str] = {}
        self._model, self._loss_scales = model, loss_scales
        self._things = things_of(model)
        self.count = len(self._things)
        self.last, self._inside = (_zeros([2 * self.count]) for _ in range(2))
        self.recent, self.meant = _zeros([STEPS, self.count]), _zeros([self.count])
        self._here = threading.local()  # a replica is a thread
        self._lock, self._steps = threading.Lock(), 0
        self._changes = contextlib.ExitStack()

    @do_not_convert
    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measures all calls within as one step, and keeps the result at its end."""
        self._here.step = step = Step()
        self._enter()
        try:
            yield
        finally:
            self._leave()
            self._here.step = None
        self._keep(step)

    def _enter(self) -> None:
        with self._lock:  # replicas take turns, and a step may be interrupted
            self._steps += 1
            if self._steps == 1:
                calls = [
                    (thing, "call", self._measured(number, thing))
                    for number, thing in enumerate(self._things)
                ]
                self._changes.enter_context(changed(calls))

    def _leave(self) -> None:
        with self._lock:
            self._steps -= 1
            if self._steps == 0:
                self._changes.close()

    def _measured(self, number: int, thing: Any) -> Callable[..., Any]:
        original = thing.call

        # AutoGraph converts this and all that it calls, as it would the layer's `call`.
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._open(thing):
                outputs = original(*args, **kwargs)
                self._note(number, (args, kwargs), outputs)
            return outputs

        return call

    @do_not_convert
    @contextlib.contextmanager
    def _open(self, thing: Any) -> Iterator[None]:
        step = getattr(self._here, "step", None)
        names = [] if step is None else step.names
        # The model's name is left out: Keras makes it up.
        names.append("" if thing is self._model else str(thing.name))
        try:
            yield
        finally:
            names.pop()

    @do_not_convert
    def _note(self, number: int, inputs: Any, outputs: Any) -> None:
        step = getattr(self._here, "step", None)
        if step is None:  # this is another thread, as in a dataset's function
            return
        path = "/".join(filter(None, step.names))
        self.paths.setdefault(number, path or str(self._model.name))
        given, returned = floats_in(inputs), floats_in(outputs)
        if current_graph() is step.graph:
            step.add(number, returned)
            step.add(self.count + number, given)
            return
        # This is a loop's body or a branch. Its tensors cannot be used outside.
        inside = Step()
        inside.add(number, returned)
        inside.add(self.count + number, given)
        found = inside.rows(2 * self.count)
        self._inside.assign(tf.maximum(tf.convert_to_tensor(self._inside), found))

    def _keep(self, step: Step) -> None:
        inside = tf.convert_to_tensor(self._inside)
        last = tf.maximum(step.rows(2 * self.count), inside)
        output = last[: self.count]
        is_finite = output < MASK
        meant = tf.logical_and(self._was_applied(), tf.logical_not(is_finite))
        recent = tf.convert_to_tensor(self.recent)
        later = tf.concat([output[None], recent[:-1]], axis=0)
        is_new = tf.logical_and(is_finite, output > 0.0)  # 0 if it was not called
        is_new = tf.broadcast_to(is_new, [STEPS, self.count])
        self.recent.assign(tf.where(is_new, later, recent))
        before = tf.convert_to_tensor(self.meant)
        self.meant.assign(tf.maximum(before, tf.cast(meant, tf.float32)))
        self.last.assign(last)
        self._inside.assign(tf.zeros_like(inside))

    def _was_applied(self) -> Any:
        """Returns whether this step was good for every loss scale."""
        if not all(scale.checks_gradients for scale in self._loss_scales):
            return tf.constant(False)
        flags = [tf.convert_to_tensor(s.last_step_finite) for s in self._loss_scales]
        return tf.reduce_all(tf.stack(flags))


def magnitude(tensor: Any) -> Any:
    """Returns a tensor's largest magnitude, a `float32` tensor of shape `[]`.

    It is `NAN` if the tensor holds NaN, else `INF` if inf, else `MASK` if -inf.
    """
    tensor = tf.stop_gradient(tensor)
    # Two reads, and no write. In most modes a maximum with NaN is NaN.
    high, low = (
        tf.cast(end, tf.float32)
        for end in (tf.reduce_max(tensor), -tf.reduce_min(tensor))
    )
    is_nan = tf.math.is_nan(high)
    if mode.max_drops_nan():
        # A sum of numbers that are not negative is NaN only if one of them is.
        is_nan = tf.math.is_nan(tf.reduce_sum(tf.abs(tensor)))
    limit = _LARGEST
    if mode.current().may_not_round and tensor.dtype == tf.float16:
        limit = float(tf.float16.max)
    found = tf.where(low > limit, MASK, tf.maximum(high, low))
    found = tf.where(high > limit, INF, found)
    return tf.where(is_nan, NAN, found)


def _zeros(shape: List[int]) -> Any:
    return tf.Variable(
        tf.zeros(shape),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,  # unused: each copy is read by itself
    )
