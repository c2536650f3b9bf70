"""Sharpness-aware minimization: the recipe of docs/recipes.md restores exactly."""

import numpy as np
import pages
import pytest
import tensorflow as tf
from exact import heard
from models import assert_same

from lossscale import LossScaleMonitor, LossScaleOptimizer

PROGRAM = pages.block_of("recipes", "rho =")
RHO, RATE = 0.5, 1e-2


def test_a_step_is_that_of_the_paper_and_an_overflow_leaves_the_weights(run):
    found = run(PROGRAM.replace("rho = 0.05", f"rho = {RHO}"))
    model, optimizer, step = (found[n] for n in ("model", "optimizer", "train_step"))
    start, x, y = model.get_weights(), found["x"], found["y"]

    def gradients_at(weights):
        model.set_weights(weights)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        return [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]

    grads = gradients_at(start)
    reach = RHO / np.sqrt(sum(np.sum(grad**2) for grad in grads))
    uphill = gradients_at([w + reach * grad for w, grad in zip(start, grads)])
    model.set_weights(start)
    step(x, y)
    for weight, before, grad in zip(model.get_weights(), start, uphill):
        np.testing.assert_allclose(before - weight, RATE * grad, rtol=2e-2, atol=1e-5)
    before, applied = model.get_weights(), int(optimizer.iterations.numpy())
    optimizer.loss_scale.current_loss_scale.assign(2.0**24)
    step(x, y)  # float16 ends at 65504
    assert_same(model.get_weights(), before)
    assert int(optimizer.iterations.numpy()) == applied
    assert optimizer.loss_scale < 2.0**24


def test_kerass_own_is_told_of(family):
    keras = family.keras
    if not hasattr(keras.models, "experimental"):
        pytest.skip("this Keras has none")
    inner = keras.Sequential([keras.layers.Dense(1)])
    model = keras.models.experimental.SharpnessAwareMinimization(inner)
    model.compile(LossScaleOptimizer(family.optimizers.SGD(0.1)), "mse")
    data = {"x": np.ones([8, 2], np.float32), "y": np.ones([8, 1], np.float32)}
    with heard() as told:
        model.fit(**data, verbose=0, callbacks=[LossScaleMonitor(verbose=0)])
    assert told[0].startswith("SharpnessAwareMinimization of Keras computes")
    assert "recipes" in told[0]
    assert any(": The loss was never scaled" in message for message in told)
