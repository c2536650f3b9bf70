"""TensorFlow's own loss scales are taken, and go on where they are."""

import pytest
import tensorflow as tf

import lossscale
from lossscale import DynamicLossScale, FixedLossScale

theirs = tf.compat.v1.mixed_precision.experimental


def test_a_dynamic_one_goes_on_in_the_middle_of_a_run():
    original = theirs.DynamicLossScale(64.0, increment_period=3, multiplier=4.0)
    for value in (1.0, float("inf"), 1.0, 1.0):
        original.update([tf.constant(value)])
    ours = lossscale.get(original)
    assert type(ours) is DynamicLossScale
    assert (float(ours), int(ours.good_steps.numpy())) == (16.0, 2)
    assert (ours.initial_loss_scale, ours.increment_period) == (64.0, 3)
    for is_finite in (1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0):
        grads = [tf.constant(1.0 if is_finite else float("inf"))]
        original.update(grads)
        ours.update(grads)
        assert float(original()) == float(ours)


def test_others_that_are_taken():
    ours = lossscale.get(theirs.DynamicLossScale(0.25))
    assert float(ours) == ours.min_loss_scale == 0.25
    ours = lossscale.get(theirs.FixedLossScale(64.0))
    assert type(ours) is FixedLossScale
    assert float(ours) == 64.0
    with tf.Graph().as_default():
        ours = lossscale.get(theirs.DynamicLossScale(64.0, 3))
    assert (ours.initial_loss_scale, ours.increment_period) == (64.0, 3)


def test_one_with_a_rule_of_its_own_is_refused():
    class Mine(theirs.DynamicLossScale):
        pass

    with pytest.raises(TypeError, match=r"`loss_scale` must be a number, a preset's"):
        lossscale.get(Mine())


def test_the_error_of_an_unknown_class_says_what_to_write():
    with pytest.raises(ValueError, match=r"Pass custom_objects=\{\.\.\.\}, or"):
        lossscale.deserialize({"class_name": "Nobodys", "config": {}})
