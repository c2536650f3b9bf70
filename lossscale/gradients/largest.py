"""The largest magnitude of one replica's gradients, for loss scales that ask for it."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients.faults import in_order
from lossscale.gradients.finite import all_finite, floating_values
from lossscale.gradients.packing import pack
from lossscale.runtime.aliases import Divisors, Flag, Grads, Scalar


def largest_magnitude(grads: Grads, divisors: Optional[Divisors] = None) -> Any:
    """Returns the greatest magnitude of gradients after their division.

    It divides only the greatest: rounding keeps the order of the quotients.

    Args:
      grads: A list of gradients; some may be None.
      divisors: For each gradient the number that still has to divide it, a `float32`
        tensor of shape `[]`, or None if it is unscaled. None: all are unscaled.

    Returns:
      A `float32` tensor of shape `[]`, 0 without gradients. It can have any value if a
      gradient is not finite.
    """
    divisors = divisors or [None] * len(grads)
    of_divisor: Dict[int, Tuple[Any, List[Any]]] = {}
    for grad, divisor in zip(grads, divisors):
        _, values = of_divisor.setdefault(id(divisor), (divisor, []))
        values.extend(floating_values([grad]))
    quotients = [tf.constant(0.0)]
    for divisor, values in of_divisor.values():
        magnitudes = [_magnitude(value) for value in pack(values)[0]]
        if magnitudes:
            greatest = tf.reduce_max(tf.stack(magnitudes))
            quotients.append(greatest if divisor is None else greatest / divisor)
    return tf.reduce_max(tf.stack(quotients))


def largest_of_each(packed: Grads, groups: List[List[int]]) -> Any:
    """Returns the greatest magnitude of each gradient, in their order.

    Args:
      packed: A list of finite gradients, as `packing.pack` returns it.
      groups: For each of them, the positions of the gradients packed into it.

    Returns:
      A `float32` tensor of shape `[gradients]`, finite, and 0 for None.
    """
    found = [tf.zeros([0])]
    for grad, group in zip(packed, groups):
        magnitudes = tf.zeros([len(group)])
        for value in floating_values([grad]):
            rows = tf.reshape(tf.abs(value), [len(group), -1])
            greatest = tf.cast(tf.reduce_max(rows, axis=1), tf.float32)
            magnitudes = tf.maximum(magnitudes, greatest)  # `greatest` may be -inf
        found.append(magnitudes)
    numbers = in_order(tf.concat(found, 0), groups)
    return tf.minimum(numbers, tf.float32.max)


def largest_if_finite(grads: Any) -> Any:
    """Returns the greatest magnitude in a nest of gradients, inf if one is not finite.

    A finite magnitude beyond float32 counts as float32's largest number.
    """
    found = largest_magnitude(floating_values(grads))
    return bounded(all_finite(grads), found)


def bounded(is_finite: Flag, largest: Scalar) -> Any:
    """Returns `largest` if the step was finite, at most float32's maximum, else inf."""
    return tf.where(is_finite, tf.minimum(largest, tf.float32.max), float("inf"))


def _magnitude(value: Any) -> Any:
    # Two reads, and no write: tf.abs would write as much as it reads, which takes a
    # fourth longer on a CPU, and twice as long under XLA.
    either_end = tf.maximum(tf.reduce_max(value), -tf.reduce_min(value))
    return tf.cast(either_end, tf.float32)
