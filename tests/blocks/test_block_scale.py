"""The power of two that fits a gradient into float16."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import compiled

from lossscale.blocks import block_scale

LARGEST = 65504.0
#: At, just above and just below powers of two and float16's largest number.
MAGNITUDES = [
    number * 2.0**power
    for power in (-126, -60, -1, 0, 15, 16, 100, 126)
    for number in (1.0, 1.5, LARGEST / 2**15, 65505 / 2**15, 2 - 2.0**-23)
]


def expected(largest, headroom):
    """Returns the rule in plain Python."""
    scale = 2.0**126
    while scale > 2.0**-126 and largest * scale > LARGEST / 2.0**headroom:
        scale /= 2
    return scale


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("headroom", [0, 6])
def test_it_is_the_greatest_power_of_two_that_leaves_the_headroom(mode, headroom):
    function = compiled(lambda grads: block_scale.of([grads], headroom), mode)
    for number, magnitude in enumerate(MAGNITUDES):
        sign = -1 if number % 2 else 1
        scale = float(function(tf.constant([sign * magnitude, 0.0])))
        assert scale == expected(magnitude, headroom), magnitude


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_what_is_not_finite_is_left_alone(value):
    assert float(block_scale.of([tf.constant([value, 1.0])], 6)) == 1.0


@pytest.mark.parametrize("value", [0.0, 1e-40])
def test_zero_and_what_float32_hardly_holds_have_the_greatest_scale(value):
    assert float(block_scale.of([tf.constant([value])], 6)) == 2.0**126


def test_one_scale_serves_all_gradients_of_a_block():
    grads = [tf.constant([1.0]), tf.constant([2.0**10], tf.float64), tf.zeros([0])]
    assert float(block_scale.of(grads, 0)) == 2.0**5


def test_after_an_overflow_it_is_eight_doublings_less_and_its_reciprocal_normal():
    assert float(block_scale.lower(tf.constant(2.0**20))) == 2.0**12
    assert float(block_scale.lower(tf.constant(2.0**-120))) == 2.0**-126
