"""Multiplies a loss by a number and divides gradients by it, in float32 or wider."""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf

from lossscale.runtime import mode
from lossscale.runtime.aliases import Grad, Scalar, Tensor


def multiply(loss: Tensor, loss_scale: Any) -> Any:
    """Returns `loss * loss_scale` in float32, or in `loss`'s dtype if that is wider.

    float16 ends at 65504: a loss of 2 times 2**15 would be infinite there.
    """
    loss = widened(loss)
    return loss * tf.cast(loss_scale, loss.dtype)


def widened(tensor: Tensor) -> Any:
    """Returns a tensor in `float32`, or unchanged if its dtype is wider."""
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype in (tf.float64, tf.complex64, tf.complex128):
        return tensor
    return tf.cast(tensor, tf.float32)


def divide(grads: Any, divisor: Scalar) -> Any:
    """Returns the nest `grads` divided by a `float32` scalar.

    Each gradient keeps its dtype and sparsity, and None stays None. Tensors that are
    not floating are returned unchanged. float16 gradients are divided in float32, where
    a divisor of 2**16 is finite; in float16 it is not.

    Under XLA they are multiplied by its reciprocal. At powers of two that is as exact;
    otherwise the last bit may differ. XLA fuses a multiplication into the operations
    that use the result, but would store a quotient in memory.
    """
    fused = mode.current().divides_by_reciprocal
    quotient = _by_reciprocal(divisor) if fused else lambda value: value / divisor
    return tf.nest.map_structure(lambda grad: _divide(grad, divisor, quotient), grads)


def opaque_divisor(loss_scale: Any, count: Any) -> Any:
    """Returns a loss scale as a divisor whose value compilers cannot know.

    A compiler turns x / constant into x * (1 / constant), and 1 / 2**127 is subnormal
    and flushes to zero (TensorFlow 2.4 to 2.21). It cannot know a variable's value.

    Args:
      loss_scale: A `float32` tensor of shape `[]`.
      count: A variable that is never negative. Compilers do not know this.
    """
    if not mode.current().knows_constants:  # each operation runs as it stands
        return loss_scale
    operation = getattr(loss_scale, "op", None)
    if operation is not None and operation.type == "ReadVariableOp":
        return loss_scale
    return loss_scale * tf.cast(count >= 0, tf.float32)


def _divide(grad: Grad, divisor: Scalar, quotient: Callable[[Any], Any]) -> Any:
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        values = _divide(grad.values, divisor, quotient)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    grad = tf.convert_to_tensor(grad)
    dtype = grad.dtype
    if dtype.is_complex:
        # Complex division squares the divisor, which overflows at 2**64.
        real = _divide(tf.math.real(grad), divisor, quotient)
        return tf.complex(real, _divide(tf.math.imag(grad), divisor, quotient))
    if not dtype.is_floating:
        return grad
    if dtype == tf.float64:
        return grad / tf.cast(divisor, tf.float64)
    return tf.cast(quotient(tf.cast(grad, tf.float32)), dtype)


def _by_reciprocal(divisor: Scalar) -> Callable[[Any], Any]:
    # 1 / 2**127 is subnormal and flushes to zero, so there are two factors. A caller
    # must hide a constant divisor (`opaque_divisor`), or XLA joins the factors again.
    first = tf.where(divisor > 2.0**126, 2.0**-64, 1.0)
    second = 1.0 / (divisor * first)
    return lambda value: value * first * second
