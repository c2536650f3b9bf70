"""The rule of a block (backward): the scale that fits, and a smaller one again."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import compiled

from lossscale.blocks.backward import fitting_scale, unscaled_gradients

LARGEST = 65504.0
#: At, just above and just below powers of two and float16's largest number.
MAGNITUDES = [
    number * 2.0**power
    for power in (-126, -60, -1, 0, 15, 16, 100, 126)
    for number in (1.0, 1.5, LARGEST / 2**15, 65505 / 2**15, 2 - 2.0**-23)
]


def greatest_scale(largest, headroom):
    """Returns the rule in plain Python."""
    scale = 2.0**126
    while scale > 2.0**-126 and largest * scale > LARGEST / 2.0**headroom:
        scale /= 2
    return scale


@pytest.mark.parametrize("headroom", [0, 6])
def test_it_is_the_greatest_power_of_two_that_leaves_the_headroom(mode, headroom):
    function = compiled(lambda grads: fitting_scale([grads], headroom), mode)
    for number, magnitude in enumerate(MAGNITUDES):
        sign = -1 if number % 2 else 1
        scale = float(function(tf.constant([sign * magnitude, 0.0])))
        assert scale == greatest_scale(magnitude, headroom), magnitude


@pytest.mark.parametrize(
    ("grads", "scale"),
    [
        ([np.float32([np.inf, 1.0])], 1.0),
        ([np.float32([-np.inf, 1.0])], 1.0),
        ([np.float32([0.0])], 2.0**126),
        ([np.float32([1e-40])], 2.0**126),  # which float32 hardly holds
        # One scale serves all gradients of a block.
        ([np.float32([1.0]), np.float64([2.0**10]), np.float32([])], 2.0**5),
    ],
)
def test_gradients_that_are_not_finite_zero_or_several(grads, scale):
    assert float(fitting_scale([tf.constant(each) for each in grads], 0)) == scale


def tried(mode, gain, grads, sparse=False):
    """Returns the gradients of a block that multiplies by `gain`, and its calls."""
    calls = tf.Variable(0)

    def backward(scaled):
        calls.assign_add(1)
        half = tf.cast(tf.cast(scaled[0], tf.float16) * gain, tf.float32)
        if sparse:
            half = tf.IndexedSlices(half, tf.constant([0, 2]), tf.constant([3]))
        return [half, None]

    function = compiled(lambda g: unscaled_gradients(backward, [g], 6)[0], mode)
    return function(tf.constant(grads)), int(calls.numpy())


@pytest.mark.parametrize(
    ("gain", "last", "calls"),
    [
        # Times the scale the largest is 2**9, which 2**6 takes to float16's top.
        (1.0, -0.75, 1),
        (2.0**6, -0.75, 1),
        (2.0**7, -0.75, 2),
        (2.0**14, -0.75, 2),
        (2.0**15, -0.75, 3),
        (np.inf, -0.75, 4),
        # It was not finite before.
        (1.0, np.inf, 1),
        (1.0, np.nan, 1),
    ],
)
def test_an_overflow_is_tried_again_three_times_and_only_that(mode, gain, last, calls):
    grads = np.float32([1.0, last])
    found, seen = tried(mode, gain, grads)
    np.testing.assert_array_equal(found, grads * np.float32(gain))
    assert seen == calls


def test_sparse_gradients_stay_sparse_when_they_are_tried_again(mode):
    grads = np.float32([1.0, -0.75])
    found, seen = tried(mode, 2.0**10, grads, sparse=True)
    assert isinstance(found, tf.IndexedSlices)
    np.testing.assert_array_equal(found.values, grads * 2.0**10)
    np.testing.assert_array_equal(found.indices, [0, 2])
    assert seen == 2


def test_the_smallest_scale_has_a_normal_reciprocal():
    # At 2**-113 the gradient would be float16's top: each attempt overflows.
    seen = []

    def backward(scaled):
        seen.append(float(scaled[0]) / 2.0**120)
        return [tf.constant(np.inf)]

    unscaled_gradients(backward, [tf.constant(2.0**120)], 0)
    assert seen == [2.0**-105, 2.0**-113, 2.0**-121, 2.0**-126]


def test_nothing_to_give_is_nothing():
    assert unscaled_gradients(lambda _: [None], [tf.constant(1.0)], 6) == [None]
