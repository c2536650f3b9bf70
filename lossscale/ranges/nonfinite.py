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
from typing import Any, Callable, List, Optional, Tuple, cast

import tensorflow as tf

from lossscale.plotting import power_text, scale_text
from lossscale.ranges import causes, inputs, step
from lossscale.ranges.advice import Advice, Attempt, Fault
from lossscale.ranges.magnitudes import WORDS, is_bad, look
from lossscale.ranges.model_state import SIXTEEN_BITS
from lossscale.ranges.step import Step
from lossscale.runtime import float16_weights, keras_versions

_Run = Callable[..., Step]

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
            text = text.replace(" Nothing is at fault.", "") + f"\n\n{said}"
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
      batch_size: An integer for arrays, or None: all of up to 1,024 rows, else 32.

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
    batch, _, _ = inputs.first_batches((x, y, sample_weight), batch_size, 1, 1024)
    x, y, sample_weight = inputs.triple(batch)
    inputs.check_finite(x, y, sample_weight)
    of_fit = step.of_fit(keras, model, loss, batch)
    step.build(model, x, of_fit)
    dense = [each for each in tf.nest.flatten(x) if isinstance(each, tf.Tensor)]
    data = [each for each in dense if each.dtype.is_floating or each.dtype.is_integer]

    def run(attempt: Optional[Attempt] = None, most: float = float("inf")) -> Step:
        def scale_of(optimizer: Any) -> float:
            return min(inputs.scale_of(optimizer), most)

        return Step(model, of_fit, attempt or Attempt(Advice(keras)), scale_of)

    first = run()
    scale, fault, place = first.scale, _first_fault(first), "none"
    if fault is not None and fault.is_backward and scale > 1:
        first, place = run(None, 1.0), "scale"
        fault = _first_fault(first)
    is_hidden = fault is not None and not first.bad
    is_harmless = _is_harmless(keras, first, run) if is_hidden else False
    if fault is None or is_harmless:
        shapes = [part.shape for part in tf.nest.flatten(batch) if part is not None]
        rows = max([1, *(shape[0] for shape in shapes if shape.rank)])
        seen = causes.PLACES[place].format(scale=scale_text(scale), rows=rows)
        report = NonfiniteReport(None if place == "none" else place, seen=seen)
    else:
        report = _report_of(fault, data)
        if report.where in {"forward", "loss", "gradient"}:
            to_write = _what_to_write(keras, fault, run, data)
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


def _is_harmless(keras: Any, first: Step, run: _Run) -> Optional[bool]:
    """Whether losses and gradients are right, though values within overflow, or None.

    None: it is undecided, since two runs of the step differ anyway, or it does not run
    in float32.
    """
    overflows = tuple(cast("Any", first.watcher).overflows)
    try:
        if run(Attempt(Advice(keras, overflows))).equals(first):
            return True
    except (tf.errors.OpError, TypeError, ValueError):
        return None
    return False if run().equals(first) else None


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
    report = NonfiniteReport(
        where,
        layer=None if call is None else call.path,
        layer_class=None if call is None else type(call.layer).__name__,
        kind=next(iter(fault.kinds), None),
        operation=fault.operation,
        dtype=fault.dtype,
        largest=fault.largest,
        variables=variables,
    )
    text = {
        "kind": " and ".join(WORDS[each] for each in fault.kinds),
        "operation": f" in {fault.operation}" if fault.operation else "",
        "largest": power_text(fault.largest),
        "variables": ", ".join(variables),
    }
    seen = causes.PLACES[place].format(**{**vars(report), **text})
    layer = None if where == "data" else report.layer
    return dataclasses.replace(report, layer=layer, seen=seen)


def _what_to_write(keras: Any, fault: Fault, run: _Run, data: List[Any]) -> str:
    advice, rest, is_confirmed = _tried(keras, fault, run, data)
    if fault.is_backward:
        # Here gradients are finite that are only too large for float16.
        lowest = run(None, 2.0**-24)
        may_help = is_confirmed or fault.operation == "Cast"
        if lowest.bad:
            rest = rest if is_confirmed else [_NO_SCALE, *rest]
        elif may_help and _reaches(lowest, fault):
            rest.append(causes.LOWER_SCALE)
    return "\n".join(filter(None, [advice, " ".join(filter(None, rest))]))


def _tried(
    keras: Any, fault: Fault, run: _Run, data: List[Any]
) -> Tuple[str, List[str], bool]:
    """Returns the advice, sentences about it, and whether a step has confirmed it."""
    if fault.dtype not in SIXTEEN_BITS:
        return "", [_WIDE, *_said_of_cause(fault)], False
    advice = Advice(keras, (fault,))
    steps: List[Step] = []

    def faults_in(attempt: Attempt) -> List[Fault]:
        steps.append(run(attempt, 1.0))
        left = _first_fault(steps[-1])
        return [left] if left and left.dtype in SIXTEEN_BITS else []

    error = advice.complete(Attempt, faults_in)
    if error:
        return str(advice), [_NO_RUN.format(error=error)], False
    left = _first_fault(steps[-1])
    if left is None:
        is_confirmed = _reaches(steps[-1], fault)
        return str(advice), [] if is_confirmed else [_NO_GRADIENT], is_confirmed
    is_wide = left.dtype not in SIXTEEN_BITS
    if _is_same(left, fault):
        text = _TRIED if is_wide else _CASTS_ITSELF
        place = "this layer" if fault.call else "the loss"
        tried = text.format(place=place, dtype=left.dtype)
        return "", [tried, *_said_of_cause(fault)], False
    # What was added for the fault that is left is not advised.
    kept = tuple(other for other in advice.faults if not _is_same(other, left))
    rest = [_ANOTHER.format(seen=_report_of(left, data).seen), _WIDE * is_wide]
    return str(Advice(keras, kept)), [*rest, *_said_of_cause(left)], False


def _said_of_cause(fault: Fault) -> List[str]:
    """Returns what the table says: what was seen, what is usual, what to write."""
    if fault.operation == "Cast" and fault.call is not None:
        return []
    cause = causes.cause_of(fault.of, fault.kinds, fault.is_backward, fault.held)
    if fault.call is None and fault.dtype in SIXTEEN_BITS and not cause.operations:
        return [causes.LOSS_IN_FLOAT16]
    # 1e-6 is lost beside larger numbers in float16, and its inverse overflows.
    small = "1e-3" if fault.meets_16_bits else "1e-6"
    return [cause.seen, cause.usual, cause.to_write.format(small=small)]


def _first_fault(step: Step) -> Optional[Fault]:
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


def _reaches(step: Step, fault: Fault) -> bool:
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


def _is_same(one: Fault, other: Fault) -> bool:
    # None: outside of all layers.
    calls = [fault.call and fault.call.parent and fault.call for fault in (one, other)]
    if len({call and call.path for call in calls}) > 1:
        return False
    if one.is_backward or other.is_backward:
        return one.is_backward == other.is_backward
    return one.operation == other.operation
