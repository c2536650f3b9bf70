"""Losses are scaled, gradients unscaled, and the greatest magnitude is found."""

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


#: Dtype, loss scale, a gradient times that, the true one, and the dtype of a loss of
#: this one that is scaled.
DTYPES = [
    # Infinite in float16, and the true one is small there.
    ("float16", 2.0**26, [2.0**15, 2.0**10], [2.0**-11, 2.0**-16], "float32"),
    ("bfloat16", 8.0, [2.0, 4.0], [0.25, 0.5], "float32"),
    ("float32", 8.0, [2.0, 4.0], [0.25, 0.5], "float32"),
    ("float64", 2.0, [1 / 3], [1 / 6], "float64"),
    (
        "complex64",
        2.0**127,
        [complex(2.0**100, -(2.0**110))],
        [complex(2.0**-27, -(2.0**-17))],
        "complex64",
    ),
    ("complex128", 8.0, [2.0, 4.0], [0.25, 0.5], "complex128"),
]


@pytest.mark.smoke
@pytest.mark.peer_defect(17)
@pytest.mark.parametrize(("dtype", "scale", "scaled", "true", "of_loss"), DTYPES)
def test_no_dtype_loses_digits_by_scaling(dtype, scale, scaled, true, of_loss, mode):
    loss_scale = FixedLossScale(scale)
    loss = compiled(loss_scale.scale, mode)(tf.cast(1.0, dtype))
    assert loss.dtype == tf.as_dtype(of_loss)
    assert complex(loss) == scale
    unscale = compiled(lambda grad: loss_scale.unscale([grad])[0], mode)
    grad = unscale(tf.constant(scaled, dtype))
    assert grad.dtype == tf.as_dtype(dtype)
    np.testing.assert_array_equal(
        grad.numpy(), np.array(true, grad.dtype.as_numpy_dtype)
    )


def test_nones_integers_nests_and_sparsity_are_kept(mode):
    values = tf.constant([[4.0], [8.0]])
    sparse = tf.IndexedSlices(values, tf.constant([3, 7]), tf.constant([10**9, 1]))
    nest = {"a": [None, tf.constant([4.0])], "b": (tf.constant([4, 6]),), "c": sparse}
    loss_scale = FixedLossScale(4)
    unscaled = compiled(lambda: loss_scale.unscale(nest), mode)()
    assert unscaled["a"][0] is None
    assert isinstance(unscaled["c"], tf.IndexedSlices)
    (_, one), (whole,), slices = unscaled.values()
    found = [each.numpy().tolist() for each in (one, whole, slices.values)]
    assert found == [[1.0], [4, 6], [[1.0], [2.0]]]
    assert slices.indices.numpy().tolist() == [3, 7]


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
