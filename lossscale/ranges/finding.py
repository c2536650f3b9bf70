"""NonfiniteReport: the first value of a step that is not finite, and what to write."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Optional, Tuple

from lossscale.plotting import scale_text

_WORDS = {"inf": "inf", "-inf": "-inf", "nan": "NaN"}
_NOTHING = """\
All outputs of layers are finite, and so are the loss and the gradients at the loss \
scale {scale}. Nothing is at fault."""
_SCALE = """\
All outputs of layers are finite, and so are the loss and the gradients at the loss \
scale 1. At {scale} gradients overflow: no layer is at fault, the loss scale is too \
high. A DynamicLossScale falls until the gradients fit. If it is a FixedLossScale, use \
a smaller one."""
_DATA = """\
The data are finite, but not in {dtype}: the largest value that is finite there is \
{largest}, and float16 ends at 65504. Divide the data by a number, as in x / 255, \
before the model gets them."""
_LOSS = """\
The loss itself is {kind}{operation}, but all outputs of layers that it depends on are \
finite. Give the last layer dtype="float32". Look in the loss for a logarithm of zero \
or a division by zero, and add a small number to its argument or divisor."""
_LOSS_GRADIENT = """\
The loss is finite, but its gradient at the model's outputs is not, at any loss scale. \
Look in the loss for an infinite derivative, as a square root has at zero, and add a \
small number to its argument. Give the last layer dtype="float32"."""
_WEIGHTS = """\
{layer} ({layer_class}): its weights hold {kind}: {variables}. Training cannot repair \
them. Go back to a checkpoint, and lower the learning rate."""
_FORWARD = """\
{layer} ({layer_class}, {dtype}): {kind}{operation}, after {largest}; its inputs were \
finite."""
_CAST = """\
{layer} ({layer_class}, {dtype}): its inputs are {kind}, after {largest}; they were \
finite before they were cast to {dtype}."""
_HIDDEN = """ Later layers hide it: the loss is finite, but wrong."""
_BACKWARD = """\
{layer} ({layer_class}, {dtype}): its gradient is {kind}, after {largest}; the \
gradient that it received was finite, and so is the forward pass. No loss scale helps.\
"""


@dataclasses.dataclass(frozen=True, repr=False)
class NonfiniteReport:
    """The first value in a training step that is not finite. Print the report.

    As a condition, it is true if something besides the loss scale is at fault.

    Attributes:
      where: Where that value is. `"forward"`: in a layer's output. `"gradient"`: in the
        gradient that a layer hands back. `"weights"`: in a layer's weights. `"data"`:
        the model's dtype cannot hold the data. `"loss"`: in the loss. `"scale"`: the
        loss scale is too high, and nothing else is wrong. None: all is finite.
      layer: The layer's path, as `"encoder/ffn_3"`, or the model's name if the model
        itself computes the value. None if no layer is at fault.
      layer_class: The name of the layer's class, as `"Dense"`.
      kind: `"inf"`, `"-inf"` or `"nan"`.
      operation: The type of TensorFlow's operation that made the value, as `"MatMul"`.
      dtype: The dtype that the value was computed in, as `"float16"`.
      largest: The largest finite magnitude beside it: in the operation's inputs and
        result, or in the gradient that the layer received.
      loss_scale: The number that multiplied the loss.
      variables: The names of weights that are not finite, if `where` is `"weights"`.
      is_hidden: Whether the loss is finite nevertheless.
      to_write: What to do, if a layer is at fault.
    """

    where: Optional[str] = None
    layer: Optional[str] = None
    layer_class: Optional[str] = None
    kind: Optional[str] = None
    operation: Optional[str] = None
    dtype: Optional[str] = None
    largest: float = 0.0
    loss_scale: float = 1.0
    variables: Tuple[str, ...] = ()
    is_hidden: bool = False
    to_write: str = ""

    def __bool__(self) -> bool:
        return self.where not in {None, "scale"}

    def __str__(self) -> str:
        texts = {
            None: _NOTHING,
            "scale": _SCALE,
            "data": _DATA,
            "loss": _LOSS,
            "weights": _WEIGHTS,
            "gradient": _BACKWARD if self.layer else _LOSS_GRADIENT,
            "forward": _CAST if self.operation == "Cast" else _FORWARD,
        }
        operation = f" in {self.operation}" if self.operation else ""
        text = texts[self.where].format(
            scale=scale_text(self.loss_scale),
            kind=_WORDS.get(self.kind or ""),
            largest=power_text(self.largest),
            operation=operation,
            layer=self.layer,
            layer_class=self.layer_class,
            dtype=self.dtype,
            variables=", ".join(self.variables),
        )
        hidden = _HIDDEN if self.is_hidden else ""
        return " ".join(filter(None, [text + hidden, self.to_write]))

    def __repr__(self) -> str:
        fields = ("where", "layer", "layer_class", "kind", "dtype")
        listed = ", ".join(f"{name}={getattr(self, name)!r}" for name in fields)
        return f"NonfiniteReport({listed})"


def power_text(largest: float) -> str:
    """Returns a magnitude as a power of two with one digit.

    >>> power_text(61000.0), power_text(0.0)
    ('2**15.9', '0')
    """
    return f"2**{math.log2(largest):.1f}" if largest > 0 else "0"


def line_for(call: Any) -> str:
    """Returns what the user can write so that a layer does not overflow.

    Args:
      call: The `Call` of the layer.
    """
    if call.dtype not in {"float16", "bfloat16"}:
        return (
            f"It computes in {call.dtype} already: look for a division by zero, a "
            "logarithm of zero, an exponential, and a learning rate that is too high."
        )
    if not call.is_layer:
        return "It is no layer. Cast its inputs: tf.cast(x, tf.float32)."
    made = call.owner
    if made.parent is None:
        return (
            "The model itself computes it, not one of its layers. Cast the inputs of "
            "that operation: tf.cast(x, tf.float32)."
        )
    name = type(made.layer).__name__
    return f'Write\n\n    {name}(..., dtype="float32", name={made.layer.name!r})\n'
