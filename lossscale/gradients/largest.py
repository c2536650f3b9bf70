"""The largest magnitude of one replica's gradients, for loss scales that ask for it."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients.faults import in_order
from lossscale.gradients.finite import all_finite, floating_values
from lossscale.gradients.packing import pack
from lossscale.runtime.aliases import Divisors, Flag, Grads, Scalar


def largest_magnitude(grads: Grads, divisors: Optional[Divisors] = None) -> Any:
    """Returns the greatest magnitude that gradients have once they are divided.

    That of the quotients is the quotient of the greatest: rounding keeps their order.

    Args:
      grads: A list of gradients; some may be None.
      divisors: What each is still to be divided by, a `float32` tensor of shape `[]`.
        None, as a whole or for one of them: it is unscaled.

    Returns:
      A `float32` tensor of shape `[]`, 0 without gradients. It may be anything if a
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
      groups: The positions of the gradients that each of them is made of.

    Returns:
      A `float32` tensor of shape `[gradients]`, finite, and 0 for None.
    """
    found = [tf.zeros([0])]
    for grad, group in zip(packed, groups):
        magnitudes = tf.zeros([len(group)])
        for value in floating_values([grad]):
            rows = tf.reshape(tf.abs(value), [len(group), -1])
            greatest = tf.cast(tf.reduce_max(rows, axis=1), tf.float32)
            magnitudes = tf.maximum(magnitudes, greatest)  # of no element, -inf
        found.append(magnitudes)
    numbers = in_order(tf.concat(found, 0), groups)
    return tf.minimum(numbers, tf.float32.max)


def largest_if_finite(grads: Any) -> Any:
    """Returns the greatest magnitude in a nest of gradients: if one is not finite, inf.

    What float32 does not hold counts as its largest number.
    """
    found = largest_magnitude(floating_values(grads))
    return bounded(all_finite(grads), found)


def bounded(is_finite: Flag, largest: Scalar) -> Any:
    """Returns what is told of a step: infinite if and only if it is bad."""
    return tf.where(is_finite, tf.minimum(largest, tf.float32.max), float("inf"))


def _magnitude(value: Any) -> Any:
    # Two reads, and nothing is written: tf.abs would write as much as it reads, which
    # takes a fourth longer on a CPU, and twice as long under XLA.
    either_end = tf.maximum(tf.reduce_max(value), -tf.reduce_min(value))
    return tf.cast(either_end, tf.float32)
