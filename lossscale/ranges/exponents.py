"""Counts of numbers by their exponent, and what float16 would make of them.

A float32's bits are sign, exponent, digits. Whatever a loss scale that is a power of
two does, it adds to the exponent, so the counts say exactly what float16 would do at
every such scale. Each exponent has three bins, since two limits lie inside one:

* 0: the power of two itself. float16 rounds 2**-25 to zero, and nothing above it.
* 1: all between.
* 2: what float16 rounds up to the next power of two: from 65520 on, that is infinity.
"""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np
import tensorflow as tf

#: float16's largest number, and the smallest that it rounds to infinity.
LARGEST, INFINITE_FROM = 65504.0, 65520.0
#: Exponents of what it rounds to zero, of its smallest normal number, of its largest.
ZERO, NORMAL, TOP = -25, -14, 15
KINDS = 3
BINS = 256 * KINDS
_DIGITS = 0x7FFFFF
#: 65520 is 2**15 with these digits.
_ROUNDED_UP = 0x7FF000
_FIELD = np.repeat(np.arange(256), KINDS)
_KIND = np.tile(np.arange(KINDS), 256)
#: The exponent of each bin. float32's subnormals, field 0, are all below 2**-126.
EXPONENT = _FIELD - 127

_IS_ZERO = (_FIELD == 0) & (_KIND == 0)
_IS_INF = (_FIELD == 255) & (_KIND == 0)
_IS_NAN = (_FIELD == 255) & (_KIND > 0)
IS_NUMBER = ~(_IS_ZERO | _IS_INF | _IS_NAN)


def count(values: Any, significand: float = 1.0) -> Tuple[Any, Any]:
    """Counts the bins of a tensor's values times `significand`. In any graph.

    Args:
      values: A float tensor.
      significand: A float from 1 to below 2, of a loss scale that is no power of two.

    Returns:
      `(counts, largest)`: an `int32` tensor of shape `[BINS]`, and the largest finite
      magnitude in `values`, a `float32` tensor of shape `[]`.
    """
    values = tf.cast(tf.reshape(values, [-1]), tf.float32)
    bits = _magnitude(values)
    finite = tf.where(bits < 255 << 23, bits, tf.zeros_like(bits))
    # Integers, since processors flush float32's subnormals to zero.
    largest = tf.bitcast(tf.reduce_max(tf.concat([finite, [0]], 0)), tf.float32)
    if significand != 1.0:
        # What was zero, finite or infinite stays so.
        scaled = tf.clip_by_value(_magnitude(values * significand), 1, (255 << 23) - 1)
        bits = tf.where(finite > 0, scaled, bits)
    digits = tf.bitwise.bitwise_and(bits, _DIGITS)
    kind = tf.cast(digits > 0, tf.int32) + tf.cast(digits >= _ROUNDED_UP, tf.int32)
    bins = tf.bitwise.right_shift(bits, 23) * KINDS + kind
    return tf.math.bincount(bins, minlength=BINS, maxlength=BINS), largest


def _magnitude(values: Any) -> Any:
    return tf.bitwise.bitwise_and(tf.bitcast(values, tf.int32), 0x7FFFFFFF)


def total(counts: Any) -> Any:
    """Returns how many values there are, of counts of shape `[..., BINS]`."""
    return counts.sum(-1)


def numbers(counts: Any) -> Any:
    """Returns how many values are neither zero nor infinite nor NaN."""
    return counts[..., IS_NUMBER].sum(-1)


def zeros(counts: Any) -> Any:
    """Returns how many values are zero before float16 touches them."""
    return counts[..., _IS_ZERO].sum(-1)


def infinities(counts: Any) -> Any:
    """Returns how many values are infinite before float16 touches them."""
    return counts[..., _IS_INF].sum(-1)


def nans(counts: Any) -> Any:
    """Returns how many values are NaN."""
    return counts[..., _IS_NAN].sum(-1)


def _flushed_bins(power: int) -> Any:
    scaled = EXPONENT + power
    return IS_NUMBER & ((scaled < ZERO) | ((scaled == ZERO) & (_KIND == 0)))


def flushed(counts: Any, power: int) -> Any:
    """Returns how many values float16 makes zero, times 2**power: up to 2**-25."""
    return counts[..., _flushed_bins(power)].sum(-1)


def subnormal(counts: Any, power: int) -> Any:
    """Returns how many lose digits: above 2**-25 and below 2**-14, times 2**power."""
    bins = IS_NUMBER & (EXPONENT + power < NORMAL) & ~_flushed_bins(power)
    return counts[..., bins].sum(-1)


def overflowing(counts: Any, power: int) -> Any:
    """Returns how many float16 makes infinite: from 65520 on, times 2**power."""
    scaled = EXPONENT + power
    bins = IS_NUMBER & ((scaled > TOP) | ((scaled == TOP) & (_KIND == KINDS - 1)))
    return counts[..., bins].sum(-1)


def by_exponent(counts: Any) -> Tuple[Any, Any]:
    """Returns the exponents from -127 to 127, and how many values have each."""
    numbered = np.where(IS_NUMBER, counts, 0)
    summed = numbered.reshape(*counts.shape[:-1], 256, KINDS).sum(-1)
    return np.arange(-127, 128), summed[..., :255]


def largest_safe_power(largest: float) -> int:
    """Returns the greatest k for which `largest` * 2**k is finite in float16."""
    significand, exponent = np.frexp(np.float64(largest))
    fits = significand * 2.0 ** (TOP + 1) < INFINITE_FROM
    return int(TOP + 1 - exponent if fits else TOP - exponent)
