"""Are one replica's gradients finite?"""

from __future__ import annotations

from typing import Any, List

import tensorflow as tf

from lossscale.gradients.check import Check
from lossscale.gradients.packing import add_up, pack
from lossscale.runtime import mode
from lossscale.runtime.aliases import Flag, Grad, Tensor
from lossscale.runtime.autograph import do_not_convert

#: The dtypes that TensorFlow's reductions and `is_finite` take on every device.
_REDUCIBLE = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


@do_not_convert
def all_finite(grads: Any) -> Any:
    """Tells whether all gradients are free of infinity and NaN. The answer is exact.

    If a sum is finite, so is each of its terms, since infinities and NaNs survive
    addition. So one `reduce_sum` per gradient, or one for many small ones of equal
    shape, settles almost every step with one read of memory. The total can be infinite
    also if large finite numbers overflow in the sum. Only if the total is not finite,
    every element is checked. float16 gradients are checked so from the start, and so
    are all gradients under XLA on a GPU, where a branch would have to wait.

    This looks at one replica only. `LossScale.update` looks at all replicas.

    >>> bool(all_finite([tf.constant([1.0, 2.0]), None]))
    True
    >>> bool(all_finite({"kernel": tf.constant([1.0, float("inf")])}))
    False
    >>> bool(all_finite(tf.constant([3e38, 3e38])))  # their sum is not finite
    True

    Args:
      grads: A nest of gradients: tensors, variables, arrays or numbers of any shape.
        `None`s, integers and bools are ignored. Of a `tf.IndexedSlices` or sparse
        tensor only the `values` count.

    Returns:
      A `bool` tensor of shape `[]`. True if there are no gradients.
    """
    return checked(grads).exact()


def checked(grads: Any) -> Check:
    """Returns the check of a nest of gradients, without worst numbers."""
    values = floating_values(grads)
    if mode.current().looks_at_once:
        return Check(each_is_finite(values))
    return Check(sum_is_finite(values), lambda: each_is_finite(values))


def sum_is_finite(values: List[Tensor]) -> Any:
    """Tells whether the sum of all elements is finite, which proves that each is.

    In float16 it checks each element instead: float16 ends at 65504, so a sum of scaled
    gradients is seldom finite. It takes less time, too: 6.9 ms instead of 8.8 for four
    gradients of 10 M elements, TensorFlow 2.21 on two cores.
    """
    looked_at = [value for value in values if _is_looked_at(value.dtype)]
    summed = [value for value in values if not _is_looked_at(value.dtype)]
    if not looked_at:
        return _sum_is_finite(summed)
    if not summed:
        return each_is_finite(looked_at)
    return tf.logical_and(each_is_finite(looked_at), _sum_is_finite(summed))


def _is_looked_at(dtype: Any) -> bool:
    sums_slowly = dtype == tf.bfloat16 and mode.current().sums_bfloat16_slowly
    return dtype == tf.float16 or sums_slowly


def _sum_is_finite(values: List[Tensor]) -> Any:
    if not values:
        return tf.constant(True)
    sums = [tf.cast(tf.reduce_sum(value), tf.float32) for value in add_up(values)]
    return tf.math.is_finite(tf.add_n(sums))


def each_is_finite(values: List[Tensor]) -> Any:
    """Tells whether each element is finite, by a check of each."""
    packed, _ = pack(values)
    checks = [tf.reduce_all(tf.math.is_finite(as_stored(value))) for value in packed]
    return _all(checks)


@do_not_convert
def sum_stays_finite(grads: Any, terms: int) -> Any:
    """Tells whether a sum of `terms` such gradients surely does not overflow.

    If no element of any gradient is larger than the dtype's maximum divided by `terms`,
    no sum overflows. The Euclidean norm bounds the largest element and costs one read
    of memory, as the sum in `all_finite` does. True also proves that the gradients are
    finite; False proves nothing.

    Args:
      grads: A nest of gradients, as for `all_finite`.
      terms: How many gradients of this size will be added.

    Returns:
      A `bool` tensor of shape `[]`.
    """
    checks = []
    for value in floating_values(grads):
        # Half of the range is left for the rounding of the norm and of the sum.
        limit = float(value.dtype.max) / (2 * terms)
        # In float16 squares overflow from 256 on, so they are taken in float32. If a
        # square overflows there, the norm is infinite and the answer False.
        wide = value if value.dtype == tf.float64 else tf.cast(value, tf.float32)
        norm = tf.sqrt(2 * tf.nn.l2_loss(wide))
        checks.append(norm <= tf.constant(limit, norm.dtype))
    return _all(checks)


def _all(flags: List[Flag]) -> Flag:
    """Tells whether all flags are True. True without any."""
    # Without the stack TensorFlow would compute the list's rank with five operations.
    return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)


def floating_values(grads: Any) -> List[Any]:
    """Returns the dense floating-point tensors in the nest `grads`."""
    values: List[Tensor] = []
    for leaf in tf.nest.flatten(grads):
        if leaf is None:
            continue
        value = tf.convert_to_tensor(dense_part(leaf))
        if value.dtype.is_complex:
            values += [tf.math.real(value), tf.math.imag(value)]
        elif value.dtype in _REDUCIBLE:
            values.append(value)
        elif value.dtype.is_floating:  # the float8 family has few kernels
            values.append(tf.cast(value, tf.float32))
    return values


def dense_part(grad: Grad) -> Any:
    """Returns the dense tensor in a sparse or ragged gradient, any other unchanged."""
    if isinstance(grad, (tf.IndexedSlices, tf.SparseTensor)):
        return grad.values
    return grad.flat_values if isinstance(grad, tf.RaggedTensor) else grad


def as_stored(value: Any) -> Any:
    """Returns the magnitudes of `value`, rounded as they will be in memory.

    XLA computes float16 and bfloat16 in float32 and may skip the rounding. A value that
    overflows only when rounded would pass as finite, but be infinite in the weights
    (seen on TensorFlow 2.16). XLA cannot skip rounding before an operation on bits.

    Args:
      value: A tensor of a floating dtype. A wider one is returned unchanged, and so is
        any tensor outside XLA.
    """
    if value.dtype.size != 2 or not mode.current().may_not_round:
        return value
    bits = tf.bitwise.bitwise_and(tf.bitcast(value, tf.int16), tf.int16.max)
    return tf.bitcast(bits, value.dtype)
