"""Counts numbers by their exponent, and says what float16 would do to them.

A float32's bits are sign, exponent, digits. A loss scale that is a power of two only
adds to the exponent, so the counts say exactly what float16 would do at every such
scale. Two limits lie within an exponent, so each exponent has three bins:

* 0: the power of two itself. float16 rounds 2**-25 to zero, but nothing above it.
* 1: all numbers between.
* 2: numbers that float16 rounds up to the next power of two, 65520 and up to infinity.
"""

from __future__ import annotations

from typing import Any, Dict, Tuple

import numpy as np
import tensorflow as tf

#: float16's largest number, and the smallest number that it rounds to infinity.
LARGEST, INFINITE_FROM = 65504.0, 65520.0
#: Exponents: of the largest number rounded to zero, the smallest normal, the largest.
ZERO, NORMAL, TOP = -25, -14, 15
KINDS = 3
BINS = 256 * KINDS
#: 65520 is 2**15 with these digits.
_ROUNDED_UP = 0x7FF000
_FIELD = np.repeat(np.arange(256), KINDS)
_KIND = np.tile(np.arange(KINDS), 256)
#: The exponent of each bin. float32's subnormals, field 0, are all below 2**-126.
_EXPONENT = _FIELD - 127

_IS_ZERO = (_FIELD == 0) & (_KIND == 0)
_IS_INF = (_FIELD == 255) & (_KIND == 0)
_IS_NAN = (_FIELD == 255) & (_KIND > 0)
#: What is neither zero nor infinity nor NaN.
_IS_NUMBER = ~(_IS_ZERO | _IS_INF | _IS_NAN)


def count(values: Any, significand: float = 1.0) -> Tuple[Any, Any]:
    """Counts how many of a tensor's values, times `significand`, fall into each bin.

    `significand` is that of the loss scale, from 1 to below 2. Returns an `int32`
    tensor of shape `[BINS]`, and the largest finite magnitude in `values`, a `float32`
    tensor of shape `[]`.
    """
    values = tf.cast(tf.reshape(values, [-1]), tf.float32)
    bits = _magnitude(values)
    finite = tf.where(bits < 255 << 23, bits, tf.zeros_like(bits))
    # Integers, since processors flush float32's subnormals to zero.
    largest = tf.bitcast(tf.reduce_max(tf.concat([finite, [0]], 0)), tf.float32)
    if significand != 1.0:
        # The clip keeps finite numbers finite, and other than zero.
        scaled = tf.clip_by_value(_magnitude(values * significand), 1, (255 << 23) - 1)
        bits = tf.where(finite > 0, scaled, bits)
    digits = tf.bitwise.bitwise_and(bits, 0x7FFFFF)
    kind = tf.cast(digits > 0, tf.int32) + tf.cast(digits >= _ROUNDED_UP, tf.int32)
    bins = tf.bitwise.right_shift(bits, 23) * KINDS + kind
    return tf.math.bincount(bins, minlength=BINS, maxlength=BINS), largest


def _magnitude(values: Any) -> Any:
    return tf.bitwise.bitwise_and(tf.bitcast(values, tf.int32), 0x7FFFFFFF)


def tally(counts: Any, power: int = 0) -> Dict[str, Any]:
    """Returns how many values there are of each kind.

    `counts` has shape `[..., BINS]`, the returned arrays have `[...]`. `zeros`,
    `infinities` and `nans` are so in float32 already. `numbers` are the others: times
    2**power, some are `flushed`, `subnormal` or `overflowing`, as in `report.Ranges`.
    """
    scaled = _EXPONENT + power
    flushed = _IS_NUMBER & ((scaled < ZERO) | ((scaled == ZERO) & (_KIND == 0)))
    is_large = (scaled > TOP) | ((scaled == TOP) & (_KIND == KINDS - 1))
    bins = {
        "values": np.ones(BINS, bool),
        "zeros": _IS_ZERO,
        "infinities": _IS_INF,
        "nans": _IS_NAN,
        "numbers": _IS_NUMBER,
        "flushed": flushed,
        "subnormal": _IS_NUMBER & (scaled < NORMAL) & ~flushed,
        "overflowing": _IS_NUMBER & is_large,
    }
    return {name: counts[..., which].sum(-1) for name, which in bins.items()}


def by_exponent(counts: Any) -> Tuple[Any, Any]:
    """Returns the exponents from -127 to 127, and how many values have each."""
    numbered = np.where(_IS_NUMBER, counts, 0)
    summed = numbered.reshape(*counts.shape[:-1], 256, KINDS).sum(-1)
    return np.arange(-127, 128), summed[..., :255]


def largest_safe_power(largest: float) -> int:
    """Returns the greatest k for which `largest` * 2**k is finite in float16."""
    significand, exponent = np.frexp(np.float64(largest))
    fits = significand * 2.0 ** (TOP + 1) < INFINITE_FROM
    return int(TOP + 1 - exponent if fits else TOP - exponent)
