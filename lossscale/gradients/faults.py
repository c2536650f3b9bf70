"""Which of one replica's gradients are not finite, and whether they are inf or NaN.

Each gradient has a *worst* number. It is NaN if an element is NaN, else infinite if an
element is infinite, else finite. The sum of a gradient's worst numbers, of several
replicas or times, is the worst of them. A good step does not compute them.
"""

from __future__ import annotations

from typing import Any, List

import tensorflow as tf

from lossscale.gradients.finite import as_stored, floating_values
from lossscale.runtime import mode
from lossscale.runtime.aliases import Flag, Grad, Grads, Tensor

#: dtype -> a factor. 2**60 squares of its largest number times that have a finite sum.
_SMALL = {tf.float32: 2.0**-95, tf.float64: 2.0**-991}


def clean(count: int) -> Tensor:
    """Returns the worst numbers of gradients that are all finite."""
    return tf.zeros([count])


def are_clean(worst: Tensor) -> Flag:
    """Tells whether all worst numbers belong to finite gradients."""
    return tf.math.is_finite(tf.reduce_sum(worst))


def worst_of_each(packed: Grads, groups: List[List[int]]) -> Tensor:
    """Returns the worst number of each gradient, in their order.

    Args:
      packed: A list of gradients, as `packing.pack` returns it.
      groups: For each of them, the positions of the gradients packed into it.

    Returns:
      A `float32` tensor of shape `[gradients]`. No number is negative.
    """
    pairs = list(zip(packed, groups))
    # For a gradient that is not packed, the sum of squares is one operation less.
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

    It is a sum of squares. The elements are made so small that no finite sum overflows.
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

    An XLA that joins two factors would join this one with the division before it, and
    hide an overflow of that division. Where XLA does not, the sum is better: with it
    1,000 gradients compile in a third of the time.
    """
    worst: Any = tf.zeros([size])
    for value in values:
        at_fault = tf.where(tf.math.is_nan(value), 2.0, 1.0)
        kinds = tf.where(tf.math.is_finite(value), 0.0, at_fault)
        worst = tf.maximum(worst, tf.reduce_max(kinds, axis=1))  # -inf if it is empty
    return tf.where(worst > 1.0, float("nan"), tf.where(worst > 0.0, float("inf"), 0.0))
