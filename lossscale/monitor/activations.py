"""Finds the first layer whose output was not finite, during `fit`.

It measures the largest magnitude of each layer's outputs in training, on the device:

```
in a training step, for each call of a layer, in the order in which calls end:
  output[layer] = max(output[layer], largest magnitude of its outputs)
  given[layer] = max(given[layer], largest magnitude of its inputs)
at the end of the step:
  last = [output, given], which begin with zeros again
  if output is finite: recent = [output, recent without its oldest]
  else if the step was applied: meant = True
```

A magnitude is what `magnitudes.magnitude` returns. -inf alone may be a mask.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Dict, Iterator, List, Sequence

import numpy as np
import tensorflow as tf

from lossscale.plotting import power_text
from lossscale.ranges import inputs
from lossscale.ranges.advice import Advice, Fault
from lossscale.ranges.calls import Call, Watcher, things_of
from lossscale.ranges.exponents import LARGEST
from lossscale.ranges.magnitudes import INF, MASK, WORDS, floats_in, kind_of, magnitude
from lossscale.ranges.model_state import changed
from lossscale.runtime import kerases
from lossscale.runtime.graphs import do_not_convert

#: How many steps with finite outputs `recent` keeps.
STEPS = 8

_FIRST = """\
The first layer whose output was not finite at the last step: {path}: {kind}{before}; \
its inputs were {inputs}. """
_MASKED = """\
They held -inf, as a mask does. If that is no mask, look at {path}."""
_DATA = "Look at the data."
_LARGE_DATA = """\
The data are finite, but not in float16: divide them by a number, as in x / 255."""
_FINITE = """\
The outputs of all layers{but} were finite at the last step. The largest was that of \
{path}, {largest}."""
_NONE = "The monitor saw no output of a layer at the last step."


class Activations(Watcher):
    """Watches the outputs of a model's layers during one `fit`.

    It replaces the model's `train_step` meanwhile, which Keras traces again when this
    begins and when it ends. If `fit` ends with an error that the monitor does not see,
    the next `fit` or `train_on_batch` restores the original.

    Attributes:
      first_calls: The layer's number -> its first call, in the order of their ends.
      count: The number of layers.
      now, last, recent, meant: `float32` variables of shapes `[2 * count]` twice,
        `[STEPS, count]` and `[count]`, one per replica: see the module. `now` holds
        `[output, given]` of the step that runs. It is a variable, since what is
        measured in a loop's body or a branch cannot be used outside of it.
    """

    def __init__(self, model: Any, loss_scales: Sequence[Any]) -> None:
        super().__init__()
        self.first_calls: Dict[int, Call] = {}
        self._model, self._loss_scales = model, loss_scales
        self._things = things_of(model)
        self._numbers = {id(each): n for n, each in enumerate(self._things)}
        self._dtypes: Dict[int, str] = {}
        self.count = len(self._things)
        with model.distribute_strategy.scope():
            self.now, self.last = _zeros([2 * self.count]), _zeros([2 * self.count])
            self.recent, self.meant = _zeros([STEPS, self.count]), _zeros([self.count])
        self._lock, self._steps = threading.Lock(), 0
        self._watching, self._fit = contextlib.ExitStack(), contextlib.ExitStack()
        original, step, make = model.train_step, self._step, model.make_train_function

        # AutoGraph converts this and all that it calls, as it would the model's own.
        def train_step(*args: Any, **kwargs: Any) -> Any:
            with step():
                return original(*args, **kwargs)

        def make_train_function(*args: Any, **kwargs: Any) -> Any:
            self.end_fit()
            return make(*args, **kwargs)

        # At the end: the trace of this `fit` would go on measuring.
        self._fit.callback(setattr, model, "train_function", None)
        ours = (train_step, make_train_function)
        changes = [(model, each.__name__, each) for each in ours]
        self._fit.enter_context(changed(changes))
        model.train_function = None  # the old trace measures nothing
        make()

    def end_fit(self) -> None:
        """Restores the original methods. A second call does nothing."""
        self._fit.close()

    @do_not_convert
    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Measures all calls within as one step, and keeps the result at its end."""
        self._here.is_in_step = True  # a replica is a thread
        with self._lock:  # replicas take turns, and a step may be interrupted
            self._steps += 1
            if self._steps == 1:
                self._watching.enter_context(self.watching(self._things))
        try:
            yield
        finally:
            with self._lock:
                self._steps -= 1
                if self._steps == 0:
                    self._watching.close()
            self._here.is_in_step = False
        self._keep()

    def end(self, call: Call, outputs: Any) -> Any:
        given, call.inputs = call.inputs, []  # a call outlives its graph
        # Another thread is outside of the step, as in a dataset's function.
        if not getattr(self._here, "is_in_step", False):
            return outputs
        number, returned = self._number(call), floats_in(outputs)
        self.first_calls.setdefault(number, call)
        if returned:
            self._dtypes[number] = returned[0].dtype.name
        rows = [number] * len(returned) + [self.count + number] * len(given)
        if rows:
            values = tf.stack(list(map(magnitude, [*returned, *given])))
            found = tf.math.unsorted_segment_max(values, rows, 2 * self.count)
            self.now.assign(tf.maximum(tf.convert_to_tensor(self.now), found))
        return outputs

    def _keep(self) -> None:
        last, recent, meant = map(
            tf.convert_to_tensor, (self.now, self.recent, self.meant)
        )
        output = last[: self.count]
        is_finite = output < MASK
        was_applied = tf.constant(False)  # whether the step was good for every scale
        scales = self._loss_scales
        if all(each.checks_gradients for each in scales):
            flags = [tf.convert_to_tensor(each.last_step_finite) for each in scales]
            was_applied = tf.reduce_all(tf.stack(flags))
        is_meant = tf.logical_and(was_applied, tf.logical_not(is_finite))
        later = tf.concat([output[None], recent[:-1]], axis=0)
        is_new = tf.logical_and(is_finite, output > 0.0)  # 0 if it was not called
        is_new = tf.broadcast_to(is_new, [STEPS, self.count])
        self.recent.assign(tf.where(is_new, later, recent))
        self.meant.assign(tf.maximum(meant, tf.cast(is_meant, tf.float32)))
        self.last.assign(last)
        self.now.assign(tf.zeros_like(last))

    def finding(self) -> str:
        """Reads the device. Returns a sentence about the last step's outputs."""
        last, given = np.split(self._read(self.last), 2)
        called = [number for number in self.first_calls if last[number] > 0]
        bad = [number for number in called if last[number] >= MASK]
        finite = [number for number in called if last[number] < MASK]
        # -inf alone may be a mask, but not as the model's output, whose call ends last.
        is_output = bad and bad[-1] == called[-1]
        least = MASK if is_output and max(last[bad]) == MASK else INF
        meant = self._read(self.meant) > 0
        new = [number for number in bad if last[number] >= least and not meant[number]]
        if new:
            return self._of_first(new[0], last, given, bad)
        if not finite:
            return _NONE
        largest = max(finite, key=lambda number: float(last[number]))
        names = ", ".join(self.first_calls[number].path for number in bad)
        return _FINITE.format(
            but=f", but for masks of -inf and the like ({names})," if bad else "",
            path=self.first_calls[largest].path,
            largest=power_text(last[largest]),
        )

    def _of_first(self, first: int, last: Any, given: Any, bad: List[int]) -> str:
        call = self.first_calls[first]
        faults = self._faults(call, last, given)
        if given[first] == MASK and bad[0] != first:
            advice = _MASKED.format(path=self.first_calls[bad[0]].path)
        elif faults:
            advice = Advice(inputs.owner_of(self._model), faults).in_one_line
            made = (faults[0].call or call).owner
            if given[first] >= MASK and made in call.around and made.parent:
                first = self._number(made)  # an operation or a state of it
        else:
            of_model = self._number([call, *call.around][-1])
            advice = _LARGE_DATA if given[of_model] < MASK else _DATA
        recent = self._read(self.recent)[:, first].max()
        said = _FIRST.format(
            path=self.first_calls[first].path,
            kind=WORDS[kind_of(float(last[first])) or "inf"],
            before=f", after {power_text(recent)}" if recent > 0 else "",
            inputs="finite" if given[first] < MASK else "not",
        )
        return said + advice

    def _faults(self, call: Call, last: Any, given: Any) -> List[Fault]:
        """Returns what may have made an output not finite; nothing if the data did.

        If a call's inputs are not finite, but those of the call around it are, then it
        was the cast of large values, or an operation that has no row of its own: in a
        `call` that a user wrote, within a library's layer, or in a loop's state.
        """

        def made_by(*calls: Call, is_cast: bool = False) -> List[Fault]:
            dtype = self._dtypes.get(self._number(calls[0]), "float16")
            if calls[0].is_written_around_layers:  # its layers have other dtypes
                dtype = "float16"
            faults = [Fault(each, dtype=dtype) for each in calls]
            faults[-1].is_cast = is_cast
            return faults

        above = call.parent
        while given[self._number(call)] >= MASK:
            if above is None:
                return []
            if given[self._number(above)] < MASK:
                break
            call, above = above, above.parent
        if above is None or given[self._number(call)] < MASK or above.hides_operations:
            return made_by(call)
        is_large = any(
            LARGEST < last[number] < MASK
            for number, each in self.first_calls.items()
            if each.parent is not None and each.parent.layer is above.layer
        )
        if is_large:
            return made_by(call, is_cast=True)
        if above.parent is None and given[self._number(above)] > LARGEST:
            return []
        if not above.is_written_around_layers:
            return made_by(call, is_cast=True)
        # An operation in `call`, or the cast of what it made in float32.
        if kerases.casts_inputs(call.layer) and call.is_layer:
            return made_by(above, call, is_cast=True)
        return made_by(above)

    def _number(self, call: Call) -> int:
        return self._numbers[id(call.layer)]

    def _read(self, variable: Any) -> Any:
        """Returns the largest value over all replicas."""
        copies = self._model.distribute_strategy.experimental_local_results(variable)
        return np.max([tf.convert_to_tensor(copy).numpy() for copy in copies], axis=0)


def _zeros(shape: List[int]) -> Any:
    return tf.Variable(
        tf.zeros(shape),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,  # unused: each copy is read by itself
    )
