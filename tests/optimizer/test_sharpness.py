"""Sharpness-aware minimization: the recipe of docs/recipes.md restores exactly."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from exact import heard
from installed import families
from models import compiled, variable_of

from lossscale import DynamicLossScale, LossScaleMonitor, LossScaleOptimizer

RHO = 0.5


def make_step(optimizer, variable, mode):
    """The page's step, of the loss `sum(v**4)`, in float16 on the way back."""
    weights = [variable]
    tensor = (lambda v: v) if isinstance(variable, tf.Variable) else (lambda v: v.value)

    def gradients():
        with tf.GradientTape() as tape:
            value = tf.cast(tf.convert_to_tensor(tensor(variable)), tf.float16)
            loss = tf.reduce_sum(tf.cast(value, tf.float32) ** 4)
            scaled_loss = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled_loss, [tensor(v) for v in weights])
        return optimizer.get_unscaled_gradients(grads)

    def step():
        kept = [tf.identity(tensor(weight)) for weight in weights]
        grads = gradients()
        norm = tf.linalg.global_norm(grads)
        reach = tf.where(tf.math.is_finite(norm), RHO / (norm + 1e-12), 0.0)
        for weight, grad in zip(weights, grads):
            uphill = tf.where(tf.math.is_finite(grad), grad, 0.0)
            weight.assign_add(uphill * reach)
        grads = gradients()
        for weight, value in zip(weights, kept):
            weight.assign(value)
        optimizer.apply_gradients(zip(grads, weights))

    return compiled(step, mode)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_step_is_that_of_the_paper(family, mode):
    start, rate = np.array([0.75, -0.3], np.float32), 2.0**-4
    optimizer = LossScaleOptimizer(family.optimizers.SGD(rate), 256.0)
    variable = variable_of(family, start)
    make_step(optimizer, variable, mode)()
    grad = 4 * start**3
    there = start + RHO * grad / np.linalg.norm(grad)
    expected = start - rate * 4 * there**3
    np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-2)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_an_overflow_leaves_the_weights_to_the_last_bit(family, mode):
    start = np.array([0.7, -0.3], np.float32)
    optimizer = LossScaleOptimizer(
        family.optimizers.SGD(2.0**-4), DynamicLossScale(2.0**24)
    )
    variable = variable_of(family, start)
    step = make_step(optimizer, variable, mode)
    step()  # float16 ends at 65504
    np.testing.assert_array_equal(variable.numpy(), start)
    assert optimizer.iterations.numpy() == 0
    assert optimizer.loss_scale < 2.0**24
    for _ in range(12):
        step()
    assert optimizer.iterations.numpy() > 0
    assert np.isfinite(variable.numpy()).all()
    assert (np.abs(variable.numpy()) < np.abs(start)).any()


WITH_ITS_OWN = [
    family for family in families() if hasattr(family.keras.models, "experimental")
]


@pytest.mark.parametrize("family", WITH_ITS_OWN, ids=lambda family: family.name)
def test_kerass_own_is_told_of(family):
    keras = family.keras
    inner = keras.Sequential([keras.layers.Dense(1)])
    model = keras.models.experimental.SharpnessAwareMinimization(inner)
    model.compile(LossScaleOptimizer(family.optimizers.SGD(0.1)), "mse")
    data = {"x": np.ones([8, 2], np.float32), "y": np.ones([8, 1], np.float32)}
    with heard() as told:
        model.fit(**data, verbose=0, callbacks=[LossScaleMonitor(verbose=0)])
    assert told[0].startswith("SharpnessAwareMinimization of Keras computes")
    assert "recipes" in told[0]
    assert any(message.startswith("The loss was never scaled") for message in told)
