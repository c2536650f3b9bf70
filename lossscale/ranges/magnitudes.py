"""How large a tensor's values are, and whether they hold inf or NaN.

On the device, in any mode, `magnitude` says both in one number. On the host, for
tensors of eager mode, `look` says more.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional

import numpy as np
import tensorflow as tf

from lossscale.runtime import mode

#: These stand for -inf alone, inf and NaN in the result of `magnitude`. In this order
#: each is larger than the one before, and all are larger than any other number, so a
#: maximum keeps the worst.
MASK, INF, NAN = 2.0**126, 2.0**127, float("inf")
#: A float32 above this counts as infinite.
_LARGEST = 2.0**125
#: How reports write the kinds of values that are not finite.
WORDS = {"inf": "inf", "-inf": "-inf", "nan": "NaN"}


def magnitude(tensor: Any) -> Any:
    """Returns a tensor's largest magnitude, a `float32` tensor of shape `[]`.

    It is `NAN` if the tensor holds NaN, else `INF` if inf, else `MASK` if -inf.
    """
    tensor = tf.stop_gradient(tensor)
    # Two reads, and no write. In most modes a maximum with NaN is NaN.
    high, low = (
        tf.cast(end, tf.float32)
        for end in (tf.reduce_max(tensor), -tf.reduce_min(tensor))
    )
    is_nan = tf.math.is_nan(high)
    if mode.max_drops_nan():
        # A sum of numbers that are not negative is NaN only if one of them is.
        is_nan = tf.math.is_nan(tf.reduce_sum(tf.abs(tensor)))
    limit = _LARGEST
    if mode.current().by_xla and tensor.dtype == tf.float16:
        limit = float(tf.float16.max)
    found = tf.where(low > limit, MASK, tf.maximum(high, low))
    found = tf.where(high > limit, INF, found)
    return tf.where(is_nan, NAN, found)


def kind_of(found: float) -> Optional[str]:
    """Returns what a result of `magnitude` stands for: a key of `WORDS`, or None."""
    if found < MASK:
        return None
    return "nan" if found == NAN else "inf" if found == INF else "-inf"


class Look(NamedTuple):
    """What a tensor of eager mode holds."""

    #: The largest finite magnitude, 0 if there is none.
    largest: float
    #: Which of "inf", "-inf" and "nan" it holds.
    kinds: List[str]
    #: How many values are not finite.
    bad: int


def look(tensor: Any) -> Look:
    """Looks at all values of a float tensor of eager mode.

    It uses NumPy, since no tape must record this, and no listener must hear of it.
    """
    values = tensor.numpy()
    if tensor.dtype == tf.bfloat16:  # older versions of NumPy cannot check it
        values = values.astype(np.float32)
    finite = np.isfinite(values)
    largest = float(np.max(np.abs(values), initial=0, where=finite))
    tests = (("inf", np.isposinf), ("-inf", np.isneginf), ("nan", np.isnan))
    bad = int(values.size - np.count_nonzero(finite))
    kinds = [name for name, test in tests if test(values).any()] if bad else []
    return Look(largest, kinds, bad)


def is_float(value: Any) -> bool:
    """Tells whether a value is a dense float tensor."""
    return isinstance(value, tf.Tensor) and bool(value.dtype.is_floating)


def is_bad(value: Any) -> bool:
    """Tells whether a value of eager mode is a float tensor that holds inf or NaN."""
    return is_float(value) and bool(look(value).bad)


def floats_in(nest: Any) -> List[Any]:
    """Returns the dense float tensors in any nest."""
    return list(filter(is_float, tf.nest.flatten(nest)))
