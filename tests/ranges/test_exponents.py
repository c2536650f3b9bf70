"""Counts by exponent say what NumPy's float16 does, at every power of two.

What a single tensor holds, `magnitudes.py`, is at the end.
"""

import numpy as np
import pytest
import tensorflow as tf

from lossscale.ranges import exponents, magnitudes

SMALLEST, NORMAL, INFINITE = 2.0**-25, 2.0**-14, 65520.0


def edges(power):
    """Returns float32s around every limit of float16, divided by 2**power."""
    limits = np.float32([SMALLEST, 2.0**-24, NORMAL, 1.0, 32768.0, INFINITE, 65536.0])
    limits /= np.float32(2.0**power)
    around = [np.nextafter(limits, np.float32(end)) for end in (0, np.inf)]
    found = np.concatenate([limits, *around])
    return np.concatenate([found, -found])


def values(power):
    rng = np.random.default_rng(abs(power))
    spread = 2.0 ** rng.uniform(-45, 25, 400) * rng.choice([-1, 1], 400)
    return np.concatenate([edges(power), (spread / 2.0**power).astype(np.float32)])


def counted(found, significand=1.0):
    counts, largest = exponents.count(tf.constant(found), significand)
    return counts.numpy().astype(np.int64), float(largest)


@pytest.mark.parametrize(
    ("power", "significand"), [(0, 1), (15, 1), (-7, 1), (40, 1), (15, 1.5)]
)
def test_they_say_what_float16_does(power, significand):
    found = values(power)
    scaled = found * np.float32(significand * 2.0**power)
    with np.errstate(over="ignore"):
        half = scaled.astype(np.float16)
    counts, largest = counted(found, significand)
    seen = exponents.tally(counts, power)
    assert seen["values"] == seen["numbers"] == len(found)
    assert seen["flushed"] == np.sum(half == 0)
    assert seen["overflowing"] == np.sum(np.isinf(half))
    scaled = np.abs(scaled)
    assert seen["subnormal"] == np.sum((scaled > SMALLEST) & (scaled < NORMAL))
    assert largest == np.max(np.abs(found))  # unscaled


@pytest.mark.parametrize("significand", [1.0, 1.9])
def test_zeros_infinities_and_nans_are_apart(significand):
    tiny, most = np.float32(1e-44), np.finfo(np.float32).max
    inf, nan = np.inf, np.nan
    found = np.float32([0, -0.0, tiny, -tiny, 1, most, inf, -inf, inf, nan, -nan])
    counts, largest = counted(found, significand)
    seen = exponents.tally(counts)
    assert [seen[kind] for kind in ("zeros", "infinities", "nans")] == [2, 3, 2]
    assert seen["numbers"] == 4
    assert seen["flushed"] == 2  # float32's own subnormals
    assert seen["overflowing"] == 1
    assert largest == most


@pytest.mark.parametrize(
    "largest", [1.0, 1.99999, 65504.0, 65519.99, 65520.0, 2.0**-30, 1e-44, 3e38]
)
def test_the_largest_safe_power(largest):
    largest = np.float32(largest)
    power = exponents.largest_safe_power(largest)
    with np.errstate(over="ignore"):
        safe, above = np.float16(
            np.float64(largest) * 2.0 ** np.array([power, power + 1])
        )
    assert np.isfinite(safe)
    assert np.isinf(above)


def test_nothing_and_other_float_dtypes_are_counted():
    counts, largest = counted(np.zeros([0], np.float32))
    assert (counts.any(), largest) == (False, 0)
    for dtype in (tf.float16, tf.bfloat16, tf.float64):
        counts, largest = exponents.count(tf.constant([1.0, 0.0, 4.0], dtype))
        assert exponents.tally(counts.numpy())["zeros"] == 1
        assert float(largest) == 4.0


def test_what_a_tensor_holds_in_bfloat16_too():
    found = tf.constant([np.inf, 1.0, -2.0], tf.bfloat16)
    assert magnitudes.look(found) == magnitudes.Look(2.0, ["inf"], 1)
    assert magnitudes.are_alike(found, tf.cast(found, tf.float32))
    assert not magnitudes.are_alike(found, found[:2])
