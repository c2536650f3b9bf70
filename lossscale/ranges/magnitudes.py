"""How large a tensor's values are, and whether they hold inf or NaN, in eager mode."""

from __future__ import annotations

from typing import Any, List, NamedTuple

import numpy as np
import tensorflow as tf

#: How reports write the kinds of values that are not finite.
WORDS = {"inf": "inf", "-inf": "-inf", "nan": "NaN"}


class Look(NamedTuple):
    """What a tensor of eager mode holds."""

    largest: float  # the largest finite magnitude, 0 if there is none
    kinds: List[str]  # which of "inf", "-inf" and "nan" it holds
    bad: int  # how many values are not finite


def look(tensor: Any) -> Look:
    """Looks at all values of a float tensor with NumPy, which no tape records."""
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
    """Whether a value is a dense float tensor."""
    return isinstance(value, tf.Tensor) and bool(value.dtype.is_floating)


def is_bad(value: Any) -> bool:
    """Whether a value of eager mode is a float tensor that holds inf or NaN."""
    return is_float(value) and bool(look(value).bad)


def floats_in(nest: Any) -> List[Any]:
    """Returns the dense float tensors in any nest."""
    return list(filter(is_float, tf.nest.flatten(nest)))


def are_alike(one: Any, other: Any) -> bool:
    """Whether a float tensor holds what another one holds, but for rounding."""
    values = [tensor.numpy().astype(np.float32) for tensor in (one, other)]
    if values[0].shape != values[1].shape:
        return False
    with np.errstate(invalid="ignore", over="ignore"):
        is_same = (values[0] == values[1]) | np.isnan(values).all(0)
        apart = np.where(is_same, 0, values[0] - values[1])
        size = np.where(np.isfinite(values[1]), values[1], 0)
        norms = [np.linalg.norm(v.astype(np.float64).ravel()) for v in (apart, size)]
        return bool(norms[0] <= 0.05 * norms[1])
