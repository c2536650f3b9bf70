"""Gradients at a scale of their own, and again at a smaller one."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import compiled

from lossscale.blocks.attempts import unscaled_gradients

MODES = ["eager", "graph", "xla"]
GRADS = np.array([1.0, -0.75], np.float32)


def tried(mode, gain, grads=GRADS, sparse=False):
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("doublings", "calls"), [(0, 1), (6, 1), (7, 2), (14, 2), (15, 3)]
)
def test_an_overflow_is_tried_again_and_only_that(mode, doublings, calls):
    # The largest is 1: times the scale it is 2**9, which 2**6 takes to float16's top.
    found, seen = tried(mode, 2.0**doublings)
    np.testing.assert_array_equal(found, GRADS * 2.0**doublings)
    assert seen == calls


@pytest.mark.parametrize("mode", MODES)
def test_what_overflows_four_times_is_what_it_is(mode):
    found, seen = tried(mode, np.inf)
    np.testing.assert_array_equal(found, [np.inf, -np.inf])
    assert seen == 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_was_not_finite_before_is_not_tried_again(mode, value):
    found, seen = tried(mode, 1.0, np.array([1.0, value], np.float32))
    np.testing.assert_array_equal(found, [1.0, value])
    assert seen == 1


@pytest.mark.parametrize("mode", MODES)
def test_zeros_stay_zeros(mode):
    found, seen = tried(mode, 1.0, np.zeros([2], np.float32))
    np.testing.assert_array_equal(found, [0.0, 0.0])
    assert seen == 1


@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradients_stay_sparse_when_they_are_tried_again(mode):
    found, seen = tried(mode, 2.0**10, sparse=True)
    assert isinstance(found, tf.IndexedSlices)
    np.testing.assert_array_equal(found.values, GRADS * 2.0**10)
    np.testing.assert_array_equal(found.indices, [0, 2])
    assert seen == 2


def test_nothing_to_give_is_nothing():
    assert unscaled_gradients(lambda _: [None], [tf.constant(1.0)], 6) == [None]
