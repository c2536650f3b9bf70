"""find_nonfinite: what makes one training step infinite or NaN, and what helps.

Against a fault one thing is tried, in eager mode: float32 in the layer at fault, or in
the loss, and in what must be float32 with it.

```
the alarm is gone, and gradients reach the layers before:  this is written
the alarm is gone, and they do not:      this is written, and that it is undecided
the same fault is left:                  what its operation needs (causes.py)
another fault is left:                   both are written
the model does not run with it:          this is written, and that it is undecided
```
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Callable, Dict, List, Optional, Tuple, cast

import tensorflow as tf

from lossscale.plotting import power_text, scale_text
from lossscale.ranges import causes, inputs, step
from lossscale.ranges.advice import Advice, Attempt, Fault
from lossscale.ranges.magnitudes import WORDS, is_bad, look
from lossscale.ranges.model_state import SIXTEEN_BITS
from lossscale.ranges.step import Step
from lossscale.runtime import float16_weights, keras_versions

#: Runs a training step as if some advice had been followed, up to a loss scale.
Run = Callable[[Attempt, float], Step]
#: A loss scale at which gradients are finite that are only too large for float16.
_LOW = 2.0**-24

_TRIED = "float32 was tried in {place}, and does not help."
_WIDE = "It computes in float32 already."
_CASTS_ITSELF = """\
float32 was tried in {place}, which computes in {dtype} nevertheless: look there for \
casts to {dtype}."""
_ANOTHER = "This alone is not enough. With it, another fault is left: {seen}"
_NO_RUN = """\
Whether this is enough could not be tried, since the model does not run with it as it \
is now: {error}"""
_NO_GRADIENT = """\
With it all values are finite, but the layers before get no gradient, or only zeros. \
Whether it is enough is undecided."""
_NO_SCALE = "No loss scale helps."
_AT_FAULT = " Nothing is at fault."
_HIDDEN = "Later layers hide it: the loss is finite, but wrong."
_UNDECIDED = """\
Loss and gradients are finite. Whether they are wrong is undecided: two runs of this \
step differ, since it draws random numbers, or it does not run in float32."""


@dataclasses.dataclass(frozen=True)
class NonfiniteReport:
    """The first value in a training step that is not finite. Print the report.

    As a condition, it is true if something besides the loss scale is at fault.

    Attributes:
      where: A string or None: where that value is. `"forward"`: in a layer's output.
        `"gradient"`: in the gradient that a layer hands back. `"weights"`: in a layer's
        weights. `"data"`: the model's dtype cannot hold the data. `"loss"`: in the
        loss. `"scale"`: the loss scale is too high, and nothing else is wrong. None:
        all is finite.
      layer: A string, the layer's path, such as `"encoder/ffn_3"`, or the model's name
        if the model itself computes the value. None if no layer is at fault.
      layer_class: A string, the name of the layer's class.
      kind: `"inf"`, `"-inf"` or `"nan"`.
      operation: A string, the type of TensorFlow's operation that made the value, such
        as `"MatMul"` or, on the way back, `"SqrtGrad"`.
      dtype: A string, the dtype that the value was computed in.
      largest: A float, the largest finite magnitude beside it: in the operation's
        inputs and result, or in the gradient that the layer received.
      loss_scale: A float, which multiplied the loss.
      variables: A tuple of the names of weights that are not finite.
      is_hidden: A boolean: the loss is finite, but wrong, because a later layer hid the
        bad value.
      float16_variables: A string, the names of the first trainable variables that are
        float16. They lose updates though all is finite.
      seen: A string, what was seen.
      to_write: A string, what is usually behind it, what to write, and what trying that
        has shown.
    """

    where: Optional[str] = None
    layer: Optional[str] = None
    layer_class: Optional[str] = None
    kind: Optional[str] = None
    operation: Optional[str] = dataclasses.field(default=None, repr=False)
    dtype: Optional[str] = None
    largest: float = dataclasses.field(default=0.0, repr=False)
    loss_scale: float = dataclasses.field(default=1.0, repr=False)
    variables: Tuple[str, ...] = dataclasses.field(default=(), repr=False)
    is_hidden: bool = dataclasses.field(default=False, repr=False)
    seen: str = dataclasses.field(default="", repr=False)
    to_write: str = dataclasses.field(default="", repr=False)
    float16_variables: str = dataclasses.field(default="", repr=False)

    def __bool__(self) -> bool:
        return self.where not in {None, "scale"}

    def __str__(self) -> str:
        hidden = _HIDDEN if self.is_hidden else ""
        text = " ".join(filter(None, [self.seen, hidden, self.to_write]))
        if self.float16_variables:
            said = float16_weights.IN_FLOAT16.format(names=self.float16_variables)
            text = f"{text.replace(_AT_FAULT, '')}\n\n{said}"
        return text


def find_nonfinite(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    loss: Any = None,
    batch_size: Optional[int] = None,
) -> NonfiniteReport:
    """Finds the layer that makes a training step infinite or NaN.

    Runs the step that `fit` runs, on the first batch and in eager mode: the model's own
    `train_step`, whose optimizers get their gradients and do nothing with them. Of a
    loss or a gradient that is not finite it finds the first operation that turned
    finite numbers into inf or NaN, in the forward pass or on the way back. It says what
    was seen, what is usual, and what to write, and tries `dtype="float32"` before it
    says so: https://github.com/lossscale/lossscale/blob/main/docs/trouble.md. The model
    stays as it was, except that missing weights are created.

    >>> import lossscale
    >>> import numpy as np
    >>> dense = tf.keras.layers.Dense
    >>> names = ("small", "large")
    >>> model = tf.keras.Sequential([dense(1, use_bias=False, name=n) for n in names])
    >>> x = np.full([2, 1], 1e30, "float32")
    >>> _ = model(x)
    >>> model.set_weights([np.ones([1, 1]), np.full([1, 1], 1e30)])
    >>> found = lossscale.find_nonfinite(model, x, np.ones([2, 1]), loss="mse")
    >>> found.where, found.layer, found.kind, found.operation
    ('forward', 'large', 'inf', 'MatMul')

    Args:
      model: A Keras model, compiled unless you pass `loss`.
      x: Arrays, a `tf.data.Dataset`, or a `PyDataset` or `Sequence` of Keras.
      y: Targets, or None if `x` yields them.
      sample_weight: Weights as in `fit`, or None.
      loss: A loss as in `compile`, or None: the compiled one.
      batch_size: An integer, the rows of the batch if `x` holds arrays, or None: 32.

    Returns:
      A `NonfiniteReport`: print it.

    Raises:
      TypeError: An argument has the wrong type.
      ValueError: The model has no layers or no loss, cannot be built, or belongs to a
        strategy with several replicas; targets are missing; or the batch is empty or
        not finite.
      RuntimeError: Called in a graph or under a `tf.distribute` strategy.
    """
    keras = inputs.keras_of(model, "find_nonfinite")
    batch, _, _ = inputs.first_batches((x, y, sample_weight), batch_size, 1)
    x, y, sample_weight = inputs.triple(batch)
    inputs.check_finite(x, y, sample_weight)
    of_fit = step.of_fit(keras, model, loss, batch)
    step.build(model, x, of_fit)
    dense = [each for each in tf.nest.flatten(x) if isinstance(each, tf.Tensor)]
    data = [each for each in dense if each.dtype.is_floating or each.dtype.is_integer]

    def run(attempt: Attempt, most: float = float("inf")) -> Step:
        def scale_of(optimizer: Any) -> float:
            return min(inputs.scale_of(optimizer), most)

        return Step(model, of_fit, attempt, scale_of)

    def run_as_it_is(most: float = float("inf")) -> Step:
        return run(Attempt(Advice(keras)), most)

    def describe(fault: Fault) -> str:
        return _report_of(fault, data).seen

    first = run_as_it_is()
    scale, fault, place = first.scale, first_fault(first), "none"
    if fault is not None and fault.is_backward and scale > 1:
        first, place = run_as_it_is(1.0), "scale"
        fault = first_fault(first)
    is_harmless: Optional[bool] = False
    if fault is not None and not first.bad:
        overflows = Attempt(Advice(keras, cast("Any", first.watcher).overflows))
        is_harmless = _is_harmless(first, lambda: run(overflows), run_as_it_is)
    if fault is None or is_harmless:
        where = None if place == "none" else place
        seen = causes.PLACES[place].format(scale=scale_text(scale))
        report = NonfiniteReport(where, seen=seen)
    else:
        report = _report_of(fault, data)
        if report.where in {"forward", "loss", "gradient"}:
            to_write = str(Remedy(keras, fault, run, describe))
            hidden = not fault.is_backward and not any(map(is_bad, first.losses))
            if is_harmless is None:
                hidden, to_write = False, f"{_UNDECIDED} {to_write}"
            report = dataclasses.replace(report, to_write=to_write, is_hidden=hidden)
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return dataclasses.replace(
        report,
        loss_scale=scale,
        float16_variables=float16_weights.float16_names(
            optimizer, model.trainable_variables
        ),
    )


def _is_harmless(
    first: Step, run_in_float32: Callable[[], Step], run_again: Callable[[], Step]
) -> Optional[bool]:
    """Whether losses and gradients are right, though values within overflow, or None.

    None: it is undecided, since two runs of the step differ anyway, or it does not run
    in float32.
    """
    try:
        if run_in_float32().equals(first):
            return True
    except (tf.errors.OpError, TypeError, ValueError):
        return None
    return False if run_again().equals(first) else None


def _report_of(fault: Fault, data: List[Any]) -> NonfiniteReport:
    call, is_cast = fault.call, fault.operation == "Cast"
    variables: Tuple[str, ...] = ()
    where = place = "gradient" if fault.is_backward else "forward"
    if call is None:
        where = "gradient" if fault.is_backward else "loss"
        place = "gradient of the loss" if fault.is_backward else "loss"
    elif fault.is_backward and is_cast:
        place = "gradient, cast"
    # The model casts its data, or in Keras 3 its first layer does.
    elif is_cast and fault.largest in [look(tensor).largest for tensor in data]:
        where = place = "data"
    elif is_cast and not fault.is_backward:
        place = "forward, inputs" if fault.is_cast else "forward, cast"
    elif fault.operation in {"ReadVariableOp", "ResourceGather", "given"}:
        weights = getattr(call.layer, "weights", ())
        bad = [weight for weight in weights if is_bad(tf.convert_to_tensor(weight))]
        if bad:
            where = place = "weights"
            variables = tuple(map(keras_versions.variable_name, bad))
    same: Dict[str, Any] = {
        "layer": call and call.path,
        "layer_class": call and type(call.layer).__name__,
        "dtype": fault.dtype,
    }
    seen = causes.PLACES[place].format(
        **same,
        kind=" and ".join(WORDS[each] for each in fault.kinds),
        operation=f" in {fault.operation}" if fault.operation else "",
        largest=power_text(fault.largest),
        variables=", ".join(variables),
    )
    return NonfiniteReport(
        where,
        **{**same, "layer": None if where == "data" else same["layer"]},
        kind=next(iter(fault.kinds), None),
        operation=fault.operation,
        largest=fault.largest,
        variables=variables,
        seen=seen,
    )


class Remedy:
    """What to write against a fault, and what was found out about that."""

    def __init__(
        self, keras: Any, fault: Fault, run: Run, describe: Callable[[Fault], str]
    ) -> None:
        self._keras, self._fault, self._run = keras, fault, run
        self._describe, self._is_confirmed = describe, False
        said, rest = self._said()
        if fault.is_backward:
            lowest = self._run(Attempt(Advice(self._keras)), _LOW)
            may_help = self._is_confirmed or fault.operation == "Cast"
            if lowest.bad:
                rest = rest if self._is_confirmed else [_NO_SCALE, *rest]
            elif may_help and reaches(lowest, fault):
                rest.append(causes.LOWER_SCALE)
        self._text = "\n".join(filter(None, [said, " ".join(filter(None, rest))]))

    def __str__(self) -> str:
        return self._text

    def _said(self) -> Tuple[str, List[str]]:
        """Returns the advice, and sentences, without what a loss scale can do."""
        fault = self._fault
        if fault.dtype not in SIXTEEN_BITS:
            return "", [_WIDE, *said_of_cause(fault)]
        advice = Advice(self._keras, [fault])
        steps: List[Step] = []

        def faults_in(attempt: Attempt) -> List[Fault]:
            steps.append(self._run(attempt, 1.0))
            left = first_fault(steps[-1])
            return [left] if left and left.dtype in SIXTEEN_BITS else []

        error = advice.complete(Attempt, faults_in)
        if error:
            return str(advice), [_NO_RUN.format(error=error)]
        left, after = first_fault(steps[-1]), steps[-1]
        if left is None:
            self._is_confirmed = reaches(after, fault)
            return str(advice), [] if self._is_confirmed else [_NO_GRADIENT]
        if _is_same(left, fault):
            text = _CASTS_ITSELF if left.dtype in SIXTEEN_BITS else _TRIED
            place = "this layer" if fault.call else "the loss"
            tried = text.format(place=place, dtype=left.dtype)
            return "", [tried, *said_of_cause(fault)]
        # What was added for the fault that is left is not advised.
        kept = [other for other in advice.faults if not _is_same(other, left)]
        other = _ANOTHER.format(seen=self._describe(left))
        wide = "" if left.dtype in SIXTEEN_BITS else _WIDE
        return str(Advice(self._keras, kept)), [other, wide, *said_of_cause(left)]


def said_of_cause(fault: Fault) -> List[str]:
    """Returns what the table says: what was seen, what is usual, what to write."""
    if fault.operation == "Cast" and fault.call is not None:
        return []
    cause = causes.cause_of(fault.of, fault.kinds, fault.is_backward, fault.held)
    if fault.call is None and fault.dtype in SIXTEEN_BITS and not cause.operations:
        return [causes.LOSS_IN_FLOAT16]
    # 1e-6 is lost beside larger numbers in float16, and its inverse overflows.
    small = "1e-3" if fault.meets_16_bits else "1e-6"
    return [cause.seen, cause.usual, cause.to_write.format(small=small)]


def first_fault(step: Step) -> Optional[Fault]:
    """Returns what made a loss or gradient bad, else an overflow, else None."""
    attempt: Any = step.watcher
    bad = step.bad
    if not bad:
        return next(iter(attempt.overflows), None)
    roots = {key for tensor in bad for key in attempt.origins(tensor)}
    unknown = Fault(
        None, kinds=look(bad[0]).kinds, dtype=bad[0].dtype.name, is_backward=True
    )
    faults = (fault for key, fault in attempt.faults.items() if key in roots)
    return next(faults, unknown)


def reaches(step: Step, fault: Fault) -> bool:
    """Whether finite gradients, not all zero, reach the layers before a fault."""
    path = fault.call and fault.call.path
    before = itertools.takewhile(
        lambda call: path not in [c.path for c in (call, *call.around)],
        step.watcher.calls,
    )
    weights = [getattr(call.layer, "trainable_variables", ()) for call in before]
    ids = map(id, itertools.chain(*weights))
    grads = [step.gradients[i] for i in ids if i in step.gradients]
    arrive = not grads or any(look(grad).largest > 0 for grad in grads)
    return arrive and not step.bad


def _path_of(fault: Fault) -> Optional[str]:
    call = fault.call
    return None if call is None or call.parent is None else call.path


def _is_same(one: Fault, other: Fault) -> bool:
    if _path_of(one) != _path_of(other) or one.is_backward != other.is_backward:
        return False
    return one.is_backward or one.operation == other.operation
