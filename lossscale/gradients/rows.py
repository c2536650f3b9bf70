"""Sparse gradients with duplicate rows: are their sums finite?

An optimizer sums duplicate rows when it applies them. In float16 each value may be
finite, but not their sum. Wider dtypes are not checked: their sums overflow only for
gradients of 1e38. Without sparse gradients nothing here adds an operation.
"""

from __future__ import annotations

from typing import Any, Iterable, List, Optional

import tensorflow as tf

from lossscale.runtime.aliases import Divisors, Grad, Grads


def may_have_duplicates(grad: Grad) -> bool:
    """Tells whether a gradient may have duplicate rows with a sum that overflows."""
    if not isinstance(grad, tf.IndexedSlices):
        return False
    dtype = grad.values.dtype
    return bool(dtype.is_floating) and dtype.size == 2


def any_may_have_duplicates(grads: Iterable[Any]) -> bool:
    """Tells whether any gradient may have duplicate rows."""
    return any(may_have_duplicates(grad) for grad in grads)


def sums_stay_finite(
    grads: Grads, divisors: Optional[Divisors] = None, terms: int = 1
) -> Any:
    """Tells whether the sums of duplicate rows are surely finite. Reads the rows once.

    They are finite if the magnitudes of all rows, duplicate or not, have a finite sum.
    False proves nothing. `terms` is how many gradients of this size will be added.
    """
    proofs = []
    for grad, divisor in zip(grads, divisors or [None] * len(grads)):
        if may_have_duplicates(grad):
            wide = tf.abs(tf.cast(grad.values, tf.float32))
            # Half of the range is left for rounding. `inf < limit` is False, as needed.
            limit = tf.constant(float(grad.values.dtype.max) / (2 * terms))
            limit = limit if divisor is None else limit * divisor
            proofs.append(tf.reduce_all(tf.reduce_sum(wide, axis=0) < limit))
    return tf.reduce_all(tf.stack(proofs)) if proofs else tf.constant(True)


def added(grads: Iterable[Any]) -> List[Any]:
    """Returns for each gradient its `sums`, or None if it has no duplicate rows."""
    return [sums(grad) if may_have_duplicates(grad) else None for grad in grads]


def sums(grad: Grad) -> Any:
    """Returns the sums of a gradient's duplicate rows, in its dtype.

    Of three or more rows the magnitudes are summed: if that is finite, so is the sum in
    every order, and the optimizer chooses the order.
    """
    # XLA has no tf.unique, and knows only inputs' shapes in a branch of TensorFlow 2.4,
    # where it sorts no int64. No variable has 2**31 rows.
    order = tf.argsort(tf.cast(grad.indices, tf.int32))
    ordered = tf.gather(grad.indices, order)
    is_new = tf.cast(tf.not_equal(ordered[1:], ordered[:-1]), tf.int32)
    positions = tf.concat([tf.zeros_like(order[:1]), tf.cumsum(is_new)], 0)
    wide = tf.cast(tf.gather(grad.values, order), tf.float32)
    signed, magnitudes, counts = (
        tf.math.unsorted_segment_sum(each, positions, tf.shape(order)[0])
        for each in (wide, tf.abs(wide), tf.ones_like(wide))
    )
    largest = tf.where(counts > 2.0, magnitudes, signed)
    return tf.cast(largest, grad.values.dtype)


def magnitudes(grad: Grad) -> Any:
    """Returns the sums of duplicate rows' magnitudes, as a dense tensor in its dtype.

    The gradient's `dense_shape` must say how many rows there are.
    """
    wide = tf.abs(tf.cast(grad.values, tf.float32))
    total = tf.math.unsorted_segment_sum(wide, grad.indices, grad.dense_shape[0])
    return tf.cast(total, grad.values.dtype)
