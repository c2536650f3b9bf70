"""find_nonfinite: the first value in one training step that is not finite."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Optional, Tuple

import tensorflow as tf

from lossscale import arguments
from lossscale.plotting import power_text, scale_text
from lossscale.ranges import inputs
from lossscale.ranges.advice import Advice, Fault, Trial
from lossscale.ranges.cure import Cure, TrainingStep
from lossscale.ranges.magnitudes import WORDS, floats_in, is_bad, look
from lossscale.ranges.model_state import unchanged
from lossscale.runtime import float16_weights, keras_versions

#: What to say, by where the value is. A cast, and a gradient of the loss, are apart.
_TEXTS = {
    None: """\
All outputs of layers are finite, and so are the loss and the gradients at the loss \
scale {scale}. Nothing is at fault.""",
    "scale": """\
All outputs of layers are finite, and so are the loss and the gradients at the loss \
scale 1. At {scale} gradients overflow: no layer is at fault, the loss scale is too \
high. A DynamicLossScale falls until the gradients fit. If it is a FixedLossScale, use \
a smaller one.""",
    "data": """\
The data are finite, but not in {dtype}: the largest value that is finite there is \
{largest}, and float16 ends at 65504. Divide the data by a number, as in x / 255, \
before the model gets them.""",
    "loss": """\
The loss itself is {kind}{operation}, but all outputs of layers that it depends on are \
finite.""",
    "weights": """\
{layer} ({layer_class}): its weights hold {kind}: {variables}. Training cannot repair \
them. Go back to a checkpoint, and lower the learning rate.""",
    "forward": """\
{layer} ({layer_class}, {dtype}): {kind}{operation}, beside finite values up to \
{largest}; its inputs were finite.""",
    "gradient": """\
{layer} ({layer_class}, {dtype}): its gradient is {kind}{operation}, beside finite \
values up to {largest}; the gradient that it received was finite, and so is the \
forward pass.""",
}
_CAST = """\
{layer} ({layer_class}, {dtype}): its inputs are {kind}, beside finite values up to \
{largest}; they were finite before they were cast to {dtype}."""
_SEAM = """\
{layer} ({layer_class}, {dtype}): the gradient at its output is {kind}: it is finite \
up to {largest} in float32, but not where it is cast to {dtype}."""
_LOSS_GRADIENT = """\
The loss is finite, but its gradient at the model's outputs is {kind}{operation}."""
_AT_FAULT = " Nothing is at fault."
_HIDDEN = """ Later layers hide it: the loss is finite, but wrong."""


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
      to_write: A string, what to do, and what trials of that have shown.
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
    to_write: str = dataclasses.field(default="", repr=False)
    float16_variables: str = dataclasses.field(default="", repr=False)

    def __bool__(self) -> bool:
        return self.where not in {None, "scale"}

    def __str__(self) -> str:
        text = _TEXTS[self.where]
        if self.operation == "Cast" and self.layer is not None:
            text = {"forward": _CAST, "gradient": _SEAM}.get(str(self.where), text)
        elif self.where == "gradient" and self.layer is None:
            text = _LOSS_GRADIENT
        text = text.format(
            scale=scale_text(self.loss_scale),
            kind=WORDS.get(self.kind or ""),
            largest=power_text(self.largest),
            operation=f" in {self.operation}" if self.operation else "",
            layer=self.layer,
            layer_class=self.layer_class,
            dtype=self.dtype,
            variables=", ".join(self.variables),
        )
        hidden = _HIDDEN if self.is_hidden else ""
        text = " ".join(filter(None, [text + hidden, self.to_write]))
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

    Computes one step on the first batch in eager mode, with the model's own policy and
    loss scale and `training=True`, and finds the first operation that turned finite
    inputs into inf or NaN, in the forward pass or on the way back, even if a later one
    hid it. It tries what it advises: docs/trouble.md.

    The step is not applied, and the model stays as it was, except that missing weights
    are created. A custom `train_step` is not run.

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
      TypeError: An argument has the wrong type, or `model` does not return tensors.
      ValueError: The model has no layers or no loss, cannot be built, or belongs to a
        strategy with several replicas; targets are missing; or the batch is empty or
        not finite.
      RuntimeError: Called in a graph or under a `tf.distribute` strategy.
    """
    keras = inputs.keras_of(model, "find_nonfinite")
    batch, _, _ = inputs.first_batches((x, y, sample_weight), batch_size, 1)
    inputs.check_finite(*batch)
    compute = inputs.loss_function(keras, model, loss, batch[1])
    inputs.build(model, batch[0])
    scale = inputs.scale_of(model)

    def loss_in(step: Trial) -> Any:
        x, y, sample_weight = batch
        with step.noted(model):
            outputs = model(x, training=True)
            if not all(map(tf.is_tensor, tf.nest.flatten(outputs))):
                raise TypeError(
                    "`model` must return tensors, in any nest, got "
                    f"{arguments.shown(outputs):.80}."
                )
            return tf.cast(compute(x, y, outputs, sample_weight), tf.float32)

    def step_of(trial: Trial) -> TrainingStep:
        return TrainingStep(model, data, loss_in, trial, scale)

    with unchanged(model):
        data = floats_in(batch[0])
        step = step_of(Trial(Advice(keras)))
        fault = step.first_fault()
        if fault is None:
            report = NonfiniteReport("scale" if step.kind_at(scale) else None)
        else:
            report = _report_of(fault, data)
        if fault is not None and report.where in {"forward", "loss", "gradient"}:

            def describe(other: Fault) -> str:
                return str(_report_of(other, data))

            to_write = str(Cure(keras, step, fault, step_of, describe))
            hidden = not fault.is_backward and not is_bad(step.loss)
            report = dataclasses.replace(report, to_write=to_write, is_hidden=hidden)
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    names = float16_weights.float16_names(optimizer, model.trainable_variables)
    return dataclasses.replace(report, loss_scale=scale, float16_variables=names)


def _report_of(fault: Fault, data: List[Any]) -> NonfiniteReport:
    kind, operation, call = next(iter(fault.kinds), None), fault.operation, fault.call
    if fault.is_backward and call is None:
        return NonfiniteReport("gradient", kind=kind, operation=operation)
    if call is None:
        return NonfiniteReport("loss", kind=kind, operation=operation)
    report = NonfiniteReport(
        "gradient" if fault.is_backward else "forward",
        layer=call.path,
        layer_class=type(call.layer).__name__,
        kind=kind,
        operation=operation,
        dtype=fault.dtype,
        largest=fault.largest,
    )
    if fault.is_backward:
        return report
    # The model casts its data, or in Keras 3 its first layer does.
    if fault.is_cast and fault.largest in [look(tensor).largest for tensor in data]:
        return dataclasses.replace(report, where="data", layer=None)
    if operation in {"ReadVariableOp", "ResourceGather", "given"}:
        weights = getattr(call.layer, "weights", ())
        bad = [weight for weight in weights if is_bad(tf.convert_to_tensor(weight))]
        if bad:
            names = tuple(map(keras_versions.variable_name, bad))
            return dataclasses.replace(report, where="weights", variables=names)
    return report
