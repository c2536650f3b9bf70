"""Which of one replica's gradients are not finite, and whether by infinity or NaN.

Each gradient has a *worst* number: finite if all its elements are, infinite if one of
them is, and NaN if one is that. Worst numbers of one gradient, of several replicas or
at several times, add up to the worst of them. A good step pays nothing for them.
"""

from __future__ import annotations

from typing import Any, List

import tensorflow as tf

from lossscale.gradients.finite import as_stored, floating_values
from lossscale.runtime import mode
from lossscale.runtime.aliases import Flag, Grad, Grads, Tensor

#: Of a dtype's largest numbers times this, 2**60 squares add up to a finite float32.
_SMALL = {tf.float32: 2.0**-95, tf.float64: 2.0**-991}


def clean(count: int) -> Tensor:
    """Returns the worst numbers of gradients that are all finite."""
    return tf.zeros([count])


def are_clean(worst: Tensor) -> Flag:
    """Tells whether worst numbers are all of finite gradients."""
    return tf.math.is_finite(tf.reduce_sum(worst))


def worst_of_each(packed: Grads, groups: List[List[int]]) -> Tensor:
    """Returns the worst number of each gradient, in their order.

    Args:
      packed: A list of gradients, as `packing.pack` returns it.
      groups: The positions of the gradients that each of them is made of.

    Returns:
      A `float32` tensor of shape `[gradients]`. No number is negative.
    """
    pairs = list(zip(packed, groups))
    # A square is one operation less, for the many gradients that are not packed.
    can_square = not mode.current().squares_factors
    single = [pair for pair in pairs if can_square and len(pair[1]) == 1]
    others = [pair for pair in pairs if not (can_square and len(pair[1]) == 1)]
    worst = [_worst_of_rows(grad, len(group)) for grad, group in others]
    if single:
        worst = [tf.stack([_worst(grad) for grad, _ in single]), *worst]
    if not worst:
        return clean(0)
    found = worst[0] if len(worst) == 1 else tf.concat(worst, 0)
    return in_order(found, [group for _, group in [*single, *others]])


def in_order(numbers: Tensor, groups: List[List[int]]) -> Tensor:
    """Returns the numbers of groups in the order of the gradients."""
    listed = [position for group in groups for position in group]
    if listed == sorted(listed):
        return numbers
    return tf.gather(numbers, sorted(range(len(listed)), key=listed.__getitem__))


def _worst(grad: Grad) -> Tensor:
    """Returns the worst number of one gradient, with few operations.

    It is the sum of the squares of what is made so small that no finite sum overflows.
    """
    squares = [
        tf.cast(tf.nn.l2_loss(value * _SMALL[value.dtype]), tf.float32)
        for value in _wide(grad)
    ]
    return tf.add_n(squares) if squares else tf.constant(0.0)


def _worst_of_rows(grad: Grad, size: int) -> Tensor:
    """Returns the worst number of each of the gradients that were packed into one."""
    values = [tf.reshape(value, [size, -1]) for value in _wide(grad)]
    if mode.current().joins_factors:
        return _worst_of_elements(values, size)
    sums = [
        tf.cast(tf.reduce_sum(tf.abs(value * _SMALL[value.dtype]), 1), tf.float32)
        for value in values
    ]
    return tf.add_n(sums) if sums else tf.zeros([size])


def _wide(grad: Grad) -> List[Any]:
    """Returns the floating-point tensors of a gradient, in float32 or wider."""
    values = [as_stored(value) for value in floating_values([grad])]
    return [tf.cast(v, tf.float32) if v.dtype.size < 4 else v for v in values]


def _worst_of_elements(values: List[Tensor], size: int) -> Tensor:
    """Returns the worst number of each row, without arithmetic on the elements.

    An XLA that makes one factor of two makes one of the division that they come from,
    too, and what overflows there is not seen. Else the sum is better: with it 1,000
    gradients are compiled in a third of the time.
    """
    worst: Any = tf.zeros([size])
    for value in values:
        at_fault = tf.where(tf.math.is_nan(value), 2.0, 1.0)
        kinds = tf.where(tf.math.is_finite(value), 0.0, at_fault)
        worst = tf.maximum(worst, tf.reduce_max(kinds, axis=1))  # of no element, -inf
    return tf.where(worst > 1.0, float("nan"), tf.where(worst > 0.0, float("inf"), 0.0))
