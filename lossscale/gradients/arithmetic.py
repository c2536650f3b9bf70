"""Products, quotients and greatest magnitudes, computed in float32 or wider."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients.check import all_finite, floating_values, in_order, pack
from lossscale.runtime import mode
from lossscale.runtime.aliases import Divisors, Flag, Grad, Grads, Scalar, Tensor

_DIVIDED_IN_FLOAT32 = (tf.float16, tf.bfloat16, tf.float32)


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
    """Returns the nest `grads` divided by a `float32` scalar, in float32 or wider.

    Each gradient keeps its dtype and sparsity. What is not floating is unchanged.
    """
    by_product = mode.current().by_xla and not mode.current().joins_factors
    first, second = _reciprocals(divisor) if by_product else (None, None)

    def divided(grad: Grad) -> Any:
        if not isinstance(grad, tf.Tensor) or grad.dtype not in _DIVIDED_IN_FLOAT32:
            return divided_otherwise(grad)
        wide = tf.cast(grad, tf.float32)
        quotient = wide * first * second if by_product else wide / divisor
        return tf.cast(quotient, grad.dtype)

    def divided_otherwise(grad: Grad) -> Any:
        if grad is None:
            return None
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(
                divided(grad.values), grad.indices, grad.dense_shape
            )
        grad = tf.convert_to_tensor(grad)
        if grad.dtype.is_complex:
            # Complex division squares the divisor, which overflows at 2**64.
            return tf.complex(divided(tf.math.real(grad)), divided(tf.math.imag(grad)))
        if grad.dtype == tf.float64:
            return grad / tf.cast(divisor, tf.float64)
        if not grad.dtype.is_floating:
            return grad
        return tf.cast(divided(tf.cast(grad, tf.float32)), grad.dtype)  # as float8

    return tf.nest.map_structure(divided, grads)


def opaque_divisor(loss_scale: Any, count: Any) -> Any:
    """Returns a loss scale as a divisor whose value compilers cannot know.

    They turn x / constant into x * (1 / constant), and 1 / 2**127 flushes to zero. They
    know no variable's value, nor that the variable `count` is never negative.
    """
    if mode.current().knows_values:  # each operation runs as it stands
        return loss_scale
    if getattr(getattr(loss_scale, "op", None), "type", "") == "ReadVariableOp":
        return loss_scale
    return loss_scale * tf.cast(count >= 0, tf.float32)


def _reciprocals(divisor: Scalar) -> Tuple[Scalar, Scalar]:
    """Returns two factors whose product divides by `divisor`.

    XLA fuses a product into the operation that uses it, but would store a quotient in
    memory. At powers of two a product is as exact; otherwise the last bit may differ.
    """
    # 1 / 2**127 is subnormal and flushes to zero, so there are two factors. A caller
    # must hide a constant divisor (`opaque_divisor`), or XLA joins the factors again.
    first = tf.where(divisor > 2.0**126, 2.0**-64, 1.0)
    return first, 1.0 / (divisor * first)


def largest_magnitude(grads: Grads, divisors: Optional[Divisors] = None) -> Scalar:
    """Returns the greatest magnitude of gradients after their division.

    It divides only the greatest: rounding keeps the order of the quotients. It is any
    number if a gradient is not finite. Without `divisors` all are unscaled.
    """
    of_divisor: Dict[int, Tuple[Any, List[Any]]] = {}
    for grad, divisor in zip(grads, divisors or [None] * len(grads)):
        _, values = of_divisor.setdefault(id(divisor), (divisor, []))
        values.extend(floating_values([grad]))
    quotients = [tf.constant(0.0)]
    for divisor, values in of_divisor.values():
        magnitudes = [_magnitude(value) for value in pack(values)[0]]
        if magnitudes:
            greatest = tf.reduce_max(tf.stack(magnitudes))
            quotients.append(greatest if divisor is None else greatest / divisor)
    return tf.reduce_max(tf.stack(quotients))


def largest_of_each(packed: Grads, groups: List[List[int]]) -> Tensor:
    """Returns the greatest magnitude of each finite gradient, packed or not."""
    of_groups = []
    for grad, group in zip(packed, groups):
        magnitudes = tf.zeros([len(group)])
        for value in floating_values([grad]):
            rows = tf.reshape(tf.abs(value), [len(group), -1])
            greatest = tf.cast(tf.reduce_max(rows, axis=1), tf.float32)
            magnitudes = tf.maximum(magnitudes, greatest)  # `greatest` may be -inf
        of_groups.append(magnitudes)
    return tf.minimum(in_order(of_groups, groups), tf.float32.max)


def largest_if_finite(grads: Any) -> Scalar:
    """Returns the greatest magnitude in a nest, inf if a gradient is not finite."""
    return bounded(all_finite(grads), largest_magnitude(floating_values(grads)))


def bounded(is_finite: Flag, largest: Scalar) -> Scalar:
    """Returns `largest` if the step was finite, at most float32's maximum, else inf."""
    largest = tf.minimum(largest, tf.float32.max)
    return tf.where(is_finite, largest, infinite_unless(is_finite))


def infinite_unless(flag: Flag) -> Scalar:
    """Returns 0 if `flag` is True, else infinity.

    Infinity as a constant of a graph would stop each run of that graph under
    `tf.debugging.enable_check_numerics()`.
    """
    return tf.where(flag, 0.0, tf.float32.max) * 2.0


def _magnitude(value: Any) -> Any:
    # Two reads, and no write: tf.abs would write as much as it reads, which takes a
    # fourth longer on a CPU, and twice as long under XLA.
    either_end = tf.maximum(tf.reduce_max(value), -tf.reduce_min(value))
    return tf.cast(either_end, tf.float32)
