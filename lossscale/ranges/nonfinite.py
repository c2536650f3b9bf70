"""find_nonfinite: the first value in one training step that is not finite."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, List, Optional, Tuple, cast

import tensorflow as tf

from lossscale.plotting import power_text, scale_text
from lossscale.ranges import causes, inputs, step
from lossscale.ranges.advice import Advice, Attempt, Fault
from lossscale.ranges.magnitudes import WORDS, is_bad, look
from lossscale.ranges.remedy import Remedy, first_fault
from lossscale.ranges.step import Step
from lossscale.runtime import float16_weights, keras_versions

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
    says so: docs/trouble.md. The model stays as it was, except that missing weights are
    created.

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
    data = list(filter(tf.is_tensor, tf.nest.flatten(x)))

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
    kind = next(iter(fault.kinds), None)
    layer = None if call is None else call.path
    layer_class = None if call is None else type(call.layer).__name__
    return NonfiniteReport(
        where,
        layer=None if where == "data" else layer,
        layer_class=layer_class,
        kind=kind,
        operation=fault.operation,
        dtype=fault.dtype,
        largest=fault.largest,
        variables=variables,
        seen=causes.PLACES[place].format(
            layer=layer,
            layer_class=layer_class,
            kind=" and ".join(WORDS[each] for each in fault.kinds),
            operation=f" in {fault.operation}" if fault.operation else "",
            dtype=fault.dtype,
            largest=power_text(fault.largest),
            variables=", ".join(variables),
        ),
    )
