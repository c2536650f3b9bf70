"""What a wrapper is called, how it is called, and how it shows itself."""

from __future__ import annotations

import copy
import inspect

import numpy as np
import pytest
import tensorflow as tf
from models import assert_same, data, regression, variable_of, whole_state

import lossscale
from lossscale import DynamicLossScale, LossScaleOptimizer


def test_the_signature_of_a_subclass_is_its_own(family):
    class Mine(type(LossScaleOptimizer(family.optimizers.SGD()))):
        def __init__(self, inner_optimizer, clip):
            super().__init__(inner_optimizer, 8.0)
            self._clip = clip

    assert list(inspect.signature(Mine).parameters) == ["inner_optimizer", "clip"]
    assert Mine(family.optimizers.SGD(), 2.0).loss_scale == 8.0


def test_it_shows_what_it_wraps(family):
    optimizer = LossScaleOptimizer(family.optimizers.Adam(), DynamicLossScale(64))
    assert repr(optimizer).startswith("LossScaleOptimizer(Adam, DynamicLossScale(")
    assert "current_loss_scale=64.0" in repr(optimizer)


def test_managers_and_monitors_show_what_they_are():
    manager = lossscale.FixedLossScaleManager(8)
    assert repr(manager).startswith("FixedLossScaleManager(FixedLossScale(")
    monitor = lossscale.LossScaleMonitor(3, every=2)
    assert repr(monitor).startswith("LossScaleMonitor(patience=3, on_stall='warn', ev")


def test_a_second_argument_that_is_no_name(family):
    optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), 8.0)
    variable = variable_of(family, [1.0, 2.0])
    for second in (1.0, "name"):
        grads = [optimizer.scale_loss(tf.constant([0.25, 0.25]))]
        if not family.name.startswith("keras3"):
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(zip(grads, [variable]), second)
    np.testing.assert_array_equal(variable.numpy(), [0.5, 1.5])


def test_private_names_that_programs_read(family):
    scale = DynamicLossScale(64)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(), scale)
    assert float(optimizer._loss_scale().numpy()) == 64
    assert optimizer._loss_scale._current_loss_scale is scale.current_loss_scale
    assert optimizer._loss_scale._num_good_steps is scale.good_steps
    with pytest.raises(AttributeError):
        scale._num_good_steps = 3
    if family.name == "keras2-legacy":
        assert float(optimizer._decayed_lr("float32").numpy()) == float(
            np.float32(0.01)
        )


def test_a_wrapped_optimizer_is_refused_in_a_line(family):
    wrapped = LossScaleOptimizer(family.optimizers.SGD(), DynamicLossScale(64))
    with pytest.raises(
        TypeError, match="got a LossScaleOptimizer around a SGD"
    ) as caught:
        LossScaleOptimizer(wrapped)
    assert "DynamicLossScale(" not in str(caught.value)


FOUR_STEPS = {"batch_size": 16, "shuffle": False, "verbose": 0}


def test_a_copy_of_a_used_optimizer_applies(family, rng):
    if family.name != "keras2-legacy":
        pytest.skip("the other optimizers of Keras are copied without their state")
    x, y = data(rng)
    scale = DynamicLossScale(64, increment_period=3)
    optimizer = LossScaleOptimizer(family.optimizers.Adam(2.0**-4), scale, "mine")
    model = regression(family, optimizer)
    model.fit(x, y, **FOUR_STEPS)
    weights, twin = model.get_weights(), copy.deepcopy(optimizer)
    assert type(twin) is type(optimizer)
    assert twin.name == "mine"
    assert twin.loss_scale is not scale
    before = whole_state(model)
    model.fit(x, y, **FOUR_STEPS)
    expected = whole_state(model)
    model.set_weights(weights)
    model.compile(twin, "mse")
    assert_same(whole_state(model), before)
    model.fit(x, y, **FOUR_STEPS)
    assert_same(whole_state(model), expected)


def test_an_optimizer_that_clips_what_it_computes_is_refused(family):
    # TensorFlow Privacy's clip gradients of each example as they compute them.
    kind = type("Dp", (family.optimizers.SGD,), {"__module__": "tensorflow_privacy.x"})
    for private in (kind, type("Mine", (kind,), {"__module__": "mine"})):
        with pytest.raises(ValueError, match=r"`inner_optimizer` must not clip"):
            LossScaleOptimizer(private(0.1))
    # One that clips when it applies, as all of Keras's can, sees the true gradients.
    LossScaleOptimizer(family.optimizers.SGD(0.1, clipnorm=1.0))
