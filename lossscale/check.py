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
    """Checks gradients by looking at each element."""
    if not groups:
        return clean(0)
    found = tf.concat([_faults(g, len(group)) for g, group in zip(packed, groups)], 0)
    return Check(tf.reduce_max(found) == FINITE, in_order(found, groups))


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


def _faults(grad: Any, rows: int) -> Any:
    """Returns the code of each of the rows that a packed gradient is made of."""
    values = floating_values([grad])
    if not values:
        return tf.fill([rows], FINITE)
    found = [_worst(value, rows) for value in values]
    return found[0] if len(found) == 1 else tf.maximum(*found)


def _worst(value: Any, rows: int) -> Any:
    codes = tf.where(
        tf.math.is_nan(value),
        NAN,
        tf.where(tf.math.is_finite(value), FINITE, INF),
    )
    worst = tf.reduce_max(tf.reshape(codes, [rows, -1]), axis=1)
    return tf.maximum(worst, FINITE)  # of no elements, the largest is -inf
