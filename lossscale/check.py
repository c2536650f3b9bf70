"""Which of one replica's gradients are not finite, and whether by infinity or NaN.

It costs a step nothing to know: only where the sum of all gradients is not finite, so
that every element must be looked at anyway, is it told which are at fault.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional

import tensorflow as tf

from lossscale.finite import floating_values, sum_is_finite

#: The codes of faults. A gradient with both infinities and NaNs has the larger one.
FINITE, INF, NAN = 0.0, 1.0, 2.0
#: Of a dtype's largest numbers times this, 2**60 add up to a finite number in float32.
_SMALL = {tf.float32: 2.0**-64, tf.float64: 2.0**-960}


class Check(NamedTuple):
    """What is known of one replica's gradients.

    Attributes:
      is_finite: A `bool` tensor of shape `[]`, whether all are finite.
      faults: A `float32` tensor of shape `[gradients]`: the code of each.
    """

    is_finite: Any
    faults: Any


def clean(count: int) -> Check:
    """Returns the check of gradients that are all finite."""
    return Check(tf.constant(True), tf.zeros([count]))


def check(packed: List[Any], groups: List[List[int]]) -> Check:
    """Checks gradients, exactly, with one read of them if they are finite.

    Args:
      packed: A list of gradients, as `packing.pack` returns it.
      groups: The positions of the gradients that each of them is made of.

    Returns:
      A `Check` with the faults in the order of the gradients.
    """
    return Check(
        *tf.cond(
            sum_is_finite(floating_values(packed)),
            lambda: tuple(clean(sum(map(len, groups)))),
            lambda: tuple(check_each(packed, groups)),
        )
    )


def check_each(packed: List[Any], groups: List[List[int]]) -> Check:
    """Checks gradients by looking at each element.

    The sum of the magnitudes tells all, if they are made so small that finite ones
    cannot overflow it: it is infinite if one of them is, and NaN if one is that.
    """
    if not groups:
        return clean(0)
    rows = [_sums(grad, len(group)) for grad, group in zip(packed, groups)]
    sums = tf.concat(rows, 0)
    is_finite = tf.math.is_finite(sums)
    codes = tf.where(is_finite, FINITE, tf.where(tf.math.is_nan(sums), NAN, INF))
    return Check(tf.reduce_all(is_finite), in_order(codes, groups))


def in_order(faults: Any, groups: List[List[int]]) -> Any:
    """Returns the faults of groups in the order of the gradients."""
    listed = [position for group in groups for position in group]
    if listed == sorted(listed):
        return faults
    return tf.gather(faults, sorted(range(len(listed)), key=listed.__getitem__))


def both(known: Optional[Check], now: Optional[Check]) -> Any:
    """Returns what two checks of the same gradients say together.

    If the first found faults, they are the cause of what the second sees: clipping by
    an infinite norm makes a NaN of every gradient.
    """
    if known is None:
        return now
    if now is None:
        return known
    is_finite = tf.logical_and(known.is_finite, now.is_finite)
    return Check(is_finite, tf.where(known.is_finite, now.faults, known.faults))


def _sums(grad: Any, rows: int) -> Any:
    """Returns the small sum of each of the rows that a packed gradient is made of."""
    values = floating_values([grad])
    if not values:
        return tf.zeros([rows])
    sums = [_sum_of_magnitudes(value, rows) for value in values]
    return sums[0] if len(sums) == 1 else tf.add_n(sums)


def _sum_of_magnitudes(value: Any, rows: int) -> Any:
    if value.dtype.size < 4:
        value = tf.cast(value, tf.float32)
    small = tf.abs(tf.reshape(value, [rows, -1]) * _SMALL[value.dtype])
    return tf.cast(tf.reduce_sum(small, axis=1), tf.float32)
