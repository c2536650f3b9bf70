"""The power of two that fits gradients into float16, from their exponent bits."""

from __future__ import annotations

from typing import Any, List

import tensorflow as tf

from lossscale.gradients.arithmetic import largest_magnitude
from lossscale.runtime.op_types import as_number

#: The bits of a float32's exponent.
_EXPONENT = 0x7F800000
#: float16's largest number, and its exponent.
_LARGEST, _TOP = 65504.0, 15
#: The bounds of the scale. Their reciprocals are normal numbers, too.
_LEAST, _MOST = 2.0**-126, 2.0**126
#: How much smaller the scale is after an overflow: 8 doublings.
_BACKOFF = 2.0**-8


def of(grads: List[Any], headroom: int) -> Any:
    """Returns the number that multiplies gradients before they enter a block.

    It is the greatest power of two at which the largest entry is `headroom` doublings
    or more below float16's largest number. It is computed from bits only, so it is
    exact, and on a GPU nothing goes to the host. It has no derivative.

    Args:
      grads: A list of dense gradients.
      headroom: How many doublings are left free.

    Returns:
      A `float32` tensor of shape `[]`, from 2**-126 to 2**126. 1 if an entry is not
      finite, so that it stays infinite or NaN.
    """
    largest = largest_magnitude(grads)
    # With all bits of the exponent flipped, 2**e becomes 2**(1 - e).
    exponent = tf.bitwise.bitwise_and(tf.bitcast(largest, tf.int32), _EXPONENT)
    inverse = tf.bitcast(tf.bitwise.bitwise_xor(exponent, _EXPONENT), tf.float32)
    scale = _bounded(inverse * 2.0 ** (_TOP - 1 - headroom))
    is_above = largest * scale > _LARGEST * 2.0**-headroom
    scale = tf.where(is_above, _bounded(scale / 2.0), scale)
    scale = tf.where(tf.math.is_finite(largest), scale, tf.ones_like(scale))
    return as_number(scale)


def lower(scale: Any) -> Any:
    """Returns the scale to try after an overflow."""
    return tf.maximum(scale * _BACKOFF, _LEAST)


def multiply(grads: List[Any], scale: Any) -> List[Any]:
    """Returns gradients, of `float32` or wider, times a scale."""
    return [grad * tf.cast(scale, grad.dtype) for grad in grads]


def _bounded(scale: Any) -> Any:
    return tf.clip_by_value(scale, _LEAST, _MOST)
