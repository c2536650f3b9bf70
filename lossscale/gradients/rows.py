"""Sparse gradients with duplicate rows: are their sums finite?

An optimizer sums duplicate rows when it applies them. In float16 each value may be
finite where that sum is not. Wider dtypes are not looked at: their sums overflow at
gradients of 1e38 only. Nothing here adds an operation where no gradient is sparse.
"""

from __future__ import annotations

from typing import Any, Iterable, List, Optional, Tuple

import tensorflow as tf

from lossscale.runtime import mode
from lossscale.runtime.aliases import Divisors, Grad, Grads


def may_have_duplicates(grad: Grad) -> bool:
    """Tells whether a gradient may have duplicate rows whose sum its dtype lacks."""
    if not isinstance(grad, tf.IndexedSlices):
        return False
    dtype = grad.values.dtype
    return bool(dtype.is_floating) and dtype.size == 2


def any_may_have_duplicates(grads: Iterable[Any]) -> bool:
    """Tells whether there is such a gradient."""
    return any(may_have_duplicates(grad) for grad in grads)


def sums_stay_finite(
    grads: Grads, divisors: Optional[Divisors] = None, terms: int = 1
) -> Any:
    """Tells whether the sums of duplicate rows are surely finite. Reads the rows once.

    They are if the magnitudes of all rows, duplicate or not, have a finite sum.

    Args:
      grads: The gradients; some may be None.
      divisors: What each is still to be divided by. None: all are unscaled.
      terms: How many gradients of this size will be added.

    Returns:
      A `bool` tensor of shape `[]`. False proves nothing.
    """
    proofs = []
    for grad, divisor in zip(grads, divisors or [None] * len(grads)):
        if may_have_duplicates(grad):
            wide = tf.abs(tf.cast(grad.values, tf.float32))
            # Half of the room is left to rounding. Infinity is less than nothing.
            limit = tf.constant(float(grad.values.dtype.max) / (2 * terms))
            limit = limit if divisor is None else limit * divisor
            proofs.append(tf.reduce_all(tf.reduce_sum(wide, axis=0) < limit))
    return tf.reduce_all(tf.stack(proofs)) if proofs else tf.constant(True)


def added(grads: Iterable[Any]) -> List[Any]:
    """Returns the `sums` of each gradient that may have duplicates, else None."""
    return [sums(grad) if may_have_duplicates(grad) else None for grad in grads]


def sums(grad: Grad) -> Any:
    """Returns what duplicate rows of a gradient add up to, in its dtype.

    Of three or more the order decides whether they overflow, and it is the optimizer's:
    their magnitudes are added up. If those are finite, every order is.
    """
    values, positions, size = _grouped(grad)
    wide = tf.cast(values, tf.float32)
    signed, magnitudes, counts = (
        tf.math.unsorted_segment_sum(each, positions, size)
        for each in (wide, tf.abs(wide), tf.ones_like(wide))
    )
    largest = tf.where(counts > 2.0, magnitudes, signed)
    return tf.cast(largest, grad.values.dtype)


def _grouped(grad: Grad) -> Tuple[Any, Any, Any]:
    """Returns a gradient's rows, the number of each one's group, and how many."""
    if not mode.current().fixes_shapes:
        unique, positions = tf.unique(grad.indices)
        return grad.values, positions, tf.shape(unique)[0]
    # It has no tf.unique, and in a branch of TensorFlow 2.4 only inputs' shapes.
    order = tf.argsort(tf.cast(grad.indices, tf.int32))
    ordered = tf.gather(grad.indices, order)
    is_new = tf.cast(tf.not_equal(ordered[1:], ordered[:-1]), tf.int32)
    positions = tf.concat([tf.zeros_like(order[:1]), tf.cumsum(is_new)], 0)
    return tf.gather(grad.values, order), positions, tf.shape(order)[0]


def magnitudes(grad: Grad) -> Any:
    """Returns the sum of each row's magnitudes as a dense tensor of its dtype.

    Args:
      grad: A gradient that tells how many rows there are: it has a `dense_shape`.
    """
    wide = tf.abs(tf.cast(grad.values, tf.float32))
    total = tf.math.unsorted_segment_sum(wide, grad.indices, grad.dense_shape[0])
    return tf.cast(total, grad.values.dtype)
