"""Scaling a loss and unscaling gradients: exact, in float32, shapes and dtypes kept."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import compiled

from lossscale import DynamicLossScale, FixedLossScale

MODES = ["eager", "graph", "xla"]


def run(function, mode, *args):
    return compiled(function, mode)(*args)


def make(kind, value):
    if kind == "fixed":
        return FixedLossScale(value)
    return DynamicLossScale(value, min_loss_scale=min(1.0, value))


@pytest.mark.peer_defect(5)
@pytest.mark.parametrize("kind", ["fixed", "dynamic"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("exponent", [-126, -3, 0, 15, 64, 126, 127])
def test_unscaling_is_exact_at_every_power_of_two(kind, mode, exponent):
    loss_scale = make(kind, 2.0**exponent)
    true = np.array([0.0, 1.0, -1.5, 2.0**-100, 1 + 2.0**-23], np.float32)
    with np.errstate(over="ignore", under="ignore"):
        scaled = true * np.float32(2.0**exponent)
    # What scaling itself cannot represent says nothing about unscaling.
    kept = (np.abs(scaled) >= 2.0**-126) & np.isfinite(scaled) | (true == 0)
    unscaled = run(
        lambda grad: loss_scale.unscale([grad])[0], mode, tf.constant(scaled)
    )
    np.testing.assert_array_equal(unscaled.numpy()[kept], true[kept])


@pytest.mark.peer_defect(17)
@pytest.mark.parametrize("mode", MODES)
def test_a_float16_loss_is_scaled_in_float32(mode):
    loss_scale = DynamicLossScale(2.0**20)
    scaled = run(loss_scale.scale, mode, tf.constant(3.0, tf.float16))
    assert scaled.dtype == tf.float32
    assert float(scaled) == 3 * 2.0**20


@pytest.mark.peer_defect(17)
@pytest.mark.parametrize("mode", MODES)
def test_float16_gradients_are_unscaled_in_float32(mode):
    loss_scale = DynamicLossScale(2.0**26)  # infinite in float16
    grad = tf.constant([2.0**15, 2.0**10], tf.float16)
    unscaled = run(lambda grad: loss_scale.unscale([grad])[0], mode, grad)
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


def test_wide_gradients_keep_their_precision():
    third = np.array([1 / 3])
    grad = FixedLossScale(2).unscale([tf.constant(third)])[0]
    np.testing.assert_array_equal(grad.numpy(), third / 2)


def test_complex_gradients_are_unscaled_at_the_largest_scale():
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


@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradients_stay_sparse(mode):
    loss_scale = FixedLossScale(4)

    def unscale(values):
        slices = tf.IndexedSlices(values, tf.constant([3, 7]), tf.constant([10**9, 1]))
        grad = loss_scale.unscale([slices])[0]
        assert isinstance(grad, tf.IndexedSlices)
        return grad.values, grad.indices

    values, indices = run(unscale, mode, tf.constant([[4.0], [8.0]]))
    np.testing.assert_array_equal(values.numpy(), [[1.0], [2.0]])
    np.testing.assert_array_equal(indices.numpy(), [3, 7])


def test_the_value_that_multiplied_the_loss_can_be_given():
    loss_scale = DynamicLossScale(8, increment_period=1)
    before = loss_scale()
    loss_scale.adjust(True)
    assert float(loss_scale.scale_by(tf.constant(1.0), before)) == 8
    assert float(loss_scale.unscale_by([tf.constant(16.0)], before)[0]) == 2
