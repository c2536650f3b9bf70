"""Losses are scaled, gradients unscaled, and the greatest magnitude is found."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import compiled

from lossscale import DynamicLossScale, FixedLossScale
from lossscale.gradients.arithmetic import largest_if_finite, largest_magnitude


@pytest.mark.peer_defect(5)
@pytest.mark.parametrize("is_fixed", [True, False])
@pytest.mark.parametrize("exponent", [-126, -3, 0, 15, 64, 126, 127])
def test_unscaling_is_exact_at_every_power_of_two(is_fixed, mode, exponent):
    loss_scale = DynamicLossScale(2.0**exponent, min_loss_scale=2.0**-126)
    if is_fixed:
        loss_scale = FixedLossScale(2.0**exponent)
    true = np.array([0.0, 1.0, -1.5, 2.0**-100, 1 + 2.0**-23], np.float32)
    with np.errstate(over="ignore", under="ignore"):
        scaled = true * np.float32(2.0**exponent)
    # What scaling itself cannot represent says nothing about unscaling.
    kept = (np.abs(scaled) >= 2.0**-126) & np.isfinite(scaled) | (true == 0)
    unscale = compiled(lambda grad: loss_scale.unscale([grad])[0], mode)
    unscaled = unscale(tf.constant(scaled))
    np.testing.assert_array_equal(unscaled.numpy()[kept], true[kept])


@pytest.mark.smoke
@pytest.mark.peer_defect(17)
def test_a_float16_loss_is_scaled_in_float32(mode):
    loss_scale = DynamicLossScale(2.0**20)
    scaled = compiled(loss_scale.scale, mode)(tf.constant(3.0, tf.float16))
    assert scaled.dtype == tf.float32
    assert float(scaled) == 3 * 2.0**20


@pytest.mark.peer_defect(17)
def test_float16_gradients_are_unscaled_in_float32(mode):
    loss_scale = DynamicLossScale(2.0**26)  # infinite in float16
    grad = tf.constant([2.0**15, 2.0**10], tf.float16)
    unscaled = compiled(lambda grad: loss_scale.unscale([grad])[0], mode)(grad)
    assert unscaled.dtype == tf.float16
    np.testing.assert_array_equal(unscaled.numpy(), np.float16([2.0**-11, 2.0**-16]))


@pytest.mark.parametrize(
    ("dtype", "scaled"),
    [
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
        ("complex64", "complex64"),
        ("complex128", "complex128"),
    ],
)
def test_dtypes_of_losses_and_gradients(dtype, scaled):
    loss_scale = FixedLossScale(8)
    assert loss_scale.scale(tf.cast(2.0, dtype)).dtype == tf.as_dtype(scaled)
    grad = loss_scale.unscale([tf.cast([2.0, 4.0], dtype)])[0]
    assert grad.dtype == tf.as_dtype(dtype)
    np.testing.assert_array_equal(tf.cast(grad, tf.float64).numpy(), [0.25, 0.5])


def test_wide_and_complex_gradients_keep_their_precision():
    third = np.array([1 / 3])
    grad = FixedLossScale(2).unscale([tf.constant(third)])[0]
    np.testing.assert_array_equal(grad.numpy(), third / 2)
    grad = tf.constant([complex(2.0**100, -(2.0**110))], tf.complex64)
    unscaled = FixedLossScale(2.0**127).unscale([grad])[0].numpy()
    np.testing.assert_array_equal(unscaled, [complex(2.0**-27, -(2.0**-17))])


def test_nones_integers_and_nests_are_kept():
    whole = tf.constant([4, 6])
    nest = {"a": [None, tf.constant([4.0])], "b": (whole,)}
    unscaled = FixedLossScale(2).unscale(nest)
    assert unscaled["a"][0] is None
    np.testing.assert_array_equal(unscaled["a"][1].numpy(), [2.0])
    np.testing.assert_array_equal(unscaled["b"][0].numpy(), [4, 6])


def test_sparse_gradients_stay_sparse(mode):
    loss_scale = FixedLossScale(4)

    def unscale(values):
        slices = tf.IndexedSlices(values, tf.constant([3, 7]), tf.constant([10**9, 1]))
        grad = loss_scale.unscale([slices])[0]
        assert isinstance(grad, tf.IndexedSlices)
        return grad.values, grad.indices

    values, indices = compiled(unscale, mode)(tf.constant([[4.0], [8.0]]))
    np.testing.assert_array_equal(values.numpy(), [[1.0], [2.0]])
    np.testing.assert_array_equal(indices.numpy(), [3, 7])


def test_the_value_that_multiplied_the_loss_can_be_given():
    loss_scale = DynamicLossScale(8, increment_period=1)
    before = loss_scale()
    loss_scale.adjust(True)
    assert float(loss_scale.scale_by(tf.constant(1.0), before)) == 8
    assert float(loss_scale.unscale_by([tf.constant(16.0)], before)[0]) == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_greatest_of_both_signs(dtype, mode):
    look = compiled(lambda *grads: largest_magnitude(list(grads)), mode)
    for grads in ([[1.0, -3.0], [2.0]], [[0.5], [3.0, -1.0]], [[-3.0], [-1.0]]):
        assert float(look(*(tf.cast(grad, dtype) for grad in grads))) == 3.0


def test_of_no_gradients_it_is_zero():
    for grads in ([], [None], [tf.zeros([0])], [tf.constant([3])], [tf.zeros([2, 0])]):
        found = largest_magnitude(grads)
        assert (found.dtype, found.shape, float(found)) == (tf.float32, (), 0.0)


def test_each_is_divided_by_its_own():
    grads = [tf.constant([8.0, -64.0]), tf.constant([48.0]), None, tf.constant([5.0])]
    divisors = [tf.constant(16.0), tf.constant(4.0), tf.constant(4.0), None]
    assert float(largest_magnitude(grads, divisors)) == 12.0
    assert float(largest_magnitude(grads[:1], divisors[:1])) == 4.0
    # Of quotients that float16 does not hold.
    small = tf.constant([2.0**-20], tf.float16)
    assert float(largest_magnitude([small], [tf.constant(2.0**15)])) == 2.0**-35


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


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_infinite_where_one_is_not_finite(dtype, bad, mode):
    look = compiled(lambda grad: largest_if_finite({"a": grad}), mode)
    for grad in ([bad, -2.0, 0.5], [1.0, bad, 0.5], [1.0, -2.0, bad]):
        assert float(look(tf.cast(grad, dtype))) == np.inf
    # What float32 does not hold is its largest.
    assert float(look(tf.constant([1.0, -1e300], tf.float64))) == tf.float32.max
