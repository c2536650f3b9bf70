"""LossScaleOptimizer in `compile` and `fit`, on every Keras."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import (
    assert_same,
    data,
    differ,
    regression,
    training_state,
    with_infinity,
)

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer

QUIET = {"batch_size": 16, "verbose": 0, "shuffle": False}


@pytest.mark.peer_defect(27)
@pytest.mark.each_version
def test_it_converges_under_mixed_float16_and_an_infinite_batch_changes_nothing(
    family, rng
):
    x, y = data(rng)
    scale = DynamicLossScale(2.0**10, 20)
    optimizer = LossScaleOptimizer(family.optimizers.Adam(0.05), scale)
    model = regression(family, optimizer, "mixed_float16")
    assert model.optimizer is optimizer  # not wrapped once more
    assert model.layers[0].compute_dtype == "float16"
    losses = model.fit(x, y, epochs=30, **QUIET).history["loss"]
    assert losses[-1] < losses[0] / 20
    steps = int(optimizer.iterations.numpy())
    assert steps + scale.skipped_steps.numpy() == 120
    assert float(scale) > 2.0**10  # it grew on the way
    before, last = training_state(model), float(scale)
    model.fit(with_infinity(x[:16]), y[:16], **QUIET)
    assert_same(training_state(model), before)
    assert float(scale) == last / 2
    model.fit(x[:16], y[:16], **QUIET)
    assert differ(training_state(model), before)
    assert int(optimizer.iterations.numpy()) == steps + 1


@pytest.mark.peer_defect(3)
@pytest.mark.peer_defect(4)
@pytest.mark.parametrize(
    ("scale", "is_bad"), [(2.0**15, True), (2.0**100, False)], ids=["bad", "good"]
)
def test_after_any_number_of_steps_the_scale_is_finite_and_a_clean_batch_trains(
    family, rng, scale, is_bad
):
    x, y = data(rng, 16)
    loss_scale = DynamicLossScale(scale, 1)
    model = regression(
        family, LossScaleOptimizer(family.optimizers.SGD(1e-3), loss_scale)
    )
    model.fit(
        np.tile(with_infinity(x) if is_bad else x, [60, 1]),
        np.tile(y, [60, 1]),
        **QUIET,
    )
    if is_bad:
        assert (float(loss_scale), int(loss_scale.skipped_steps.numpy())) == (1.0, 60)
    else:  # it overflows now and then
        assert 2.0**100 < float(loss_scale) < np.inf
    before = training_state(model)
    for _ in range(3):
        model.fit(x, y, **QUIET)
    after = training_state(model)
    assert differ(after, before)
    assert all(np.isfinite(value).all() for value in after)


@pytest.mark.peer_defect(20)
def test_a_fixed_scale_applies_an_infinity(family, rng):
    x, y = data(rng, 16)
    model = regression(family, LossScaleOptimizer(family.optimizers.SGD(0.1), 8))
    model.train_on_batch(with_infinity(x), y)
    assert not all(np.isfinite(value).all() for value in training_state(model))


def test_learning_rate_callbacks_reach_the_inner_optimizer(family, rng):
    x, y = data(rng, 16)
    inner = family.optimizers.SGD(0.5)
    model = regression(family, LossScaleOptimizer(inner))
    schedule = family.keras.callbacks.LearningRateScheduler(
        lambda epoch: 0.25 / 2**epoch
    )
    model.fit(x, y, epochs=2, callbacks=[schedule], **QUIET)
    assert float(np.array(inner.learning_rate)) == 0.125


@pytest.mark.peer_defect(31)
@pytest.mark.parametrize("checks", [True, False])
def test_the_end_of_data_of_unknown_size_is_no_step(family, checks):
    """`fit` begins a step without data there, of which a bare optimizer runs a part."""
    decay = {} if family.name == "keras2-legacy" else {"weight_decay": 0.5}
    try:
        inner = family.optimizers.SGD(0.5, **decay)
    except TypeError:  # TensorFlow 2.10's has no weight decay
        decay, inner = {}, family.optimizers.SGD(0.5)
    scale = FixedLossScale(8.0, skip_nonfinite=checks)
    model = family.keras.Sequential(
        [family.keras.Input((2,)), family.keras.layers.Dense(1)]
    )
    model.set_weights([np.ones([2, 1]), np.zeros([1])])
    model.compile(LossScaleOptimizer(inner, scale), "mse")

    def batches():  # all gradients of the kernel are 0: weight decay alone changes it
        for _ in range(3):
            yield np.zeros([4, 2], np.float32), np.zeros([4, 1], np.float32)

    types, shapes = (tf.float32, tf.float32), ([None, 2], [None, 1])
    found = tf.data.Dataset.from_generator(batches, types, shapes)
    model.fit(found, epochs=2, verbose=0)
    steps = int(model.optimizer.iterations.numpy())
    kernel = model.get_weights()[0]
    factor = 0.75 if decay else 1.0
    np.testing.assert_allclose(kernel, np.full([2, 1], factor**steps), rtol=1e-5)
    if checks:
        assert steps == 6
        assert int(scale.skipped_steps.numpy()) == 0
    else:
        assert steps >= 6  # 8 on Keras 3.15, 7 on Keras 2, as a bare optimizer's
