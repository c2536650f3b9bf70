"""The largest magnitude of gradients: exact, of what they are once divided."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import compiled

from lossscale.gradients.arithmetic import largest_if_finite, largest_magnitude

MODES = ["eager", "graph", "xla"]


def seen(function, *args, mode="eager"):
    return float(compiled(function, mode)(*args))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_greatest_of_both_signs(dtype, mode):
    for grads in ([[1.0, -3.0], [2.0]], [[0.5], [3.0, -1.0]], [[-3.0], [-1.0]]):
        tensors = [tf.cast(grad, dtype) for grad in grads]
        assert seen(lambda *g: largest_magnitude(list(g)), *tensors, mode=mode) == 3.0


def test_of_no_gradients_it_is_zero():
    for grads in ([], [None], [tf.zeros([0])], [tf.constant([3])], [tf.zeros([2, 0])]):
        found = largest_magnitude(grads)
        assert (found.dtype, found.shape, float(found)) == (tf.float32, (), 0.0)


def test_each_is_divided_by_its_own():
    grads = [tf.constant([8.0, -64.0]), tf.constant([48.0]), None, tf.constant([5.0])]
    divisors = [tf.constant(16.0), tf.constant(4.0), tf.constant(4.0), None]
    assert float(largest_magnitude(grads, divisors)) == 12.0
    assert float(largest_magnitude(grads[:1], divisors[:1])) == 4.0


def test_of_quotients_that_float16_does_not_hold():
    grad = tf.constant([2.0**-20], tf.float16)
    found = largest_magnitude([grad], [tf.constant(2.0**15)])
    assert float(found) == 2.0**-35


def test_kinds_of_gradients(rng):
    values = rng.normal(size=[3, 2]).astype(np.float32)
    sparse = tf.IndexedSlices(values, [0, 2, 2], [4, 2])
    complexes = tf.complex([1.0, 2.0], [0.5, -7.0])
    many = [tf.constant(rng.normal(size=[4]), tf.float32) for _ in range(50)]
    for grads in ([sparse], [complexes], many, [*many, sparse, complexes]):
        leaves = [values if g is sparse else g.numpy() for g in grads]
        parts = [part for leaf in leaves for part in (np.real(leaf), np.imag(leaf))]
        expected = max(np.abs(part).max() for part in parts)
        assert float(largest_magnitude(grads)) == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_infinite_where_one_is_not_finite(dtype, bad, mode):
    for place in range(3):
        grads = np.array([1.0, -2.0, 0.5])
        grads[place] = bad
        grad = tf.cast(grads, dtype)
        assert seen(lambda g: largest_if_finite({"a": g}), grad, mode=mode) == np.inf


@pytest.mark.parametrize("mode", MODES)
def test_what_float32_does_not_hold_is_its_largest(mode):
    grad = tf.constant([1.0, -1e300], tf.float64)
    found = seen(lambda g: largest_if_finite([g]), grad, mode=mode)
    assert found == tf.float32.max
