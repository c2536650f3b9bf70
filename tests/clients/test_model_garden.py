"""Model Garden's `configure_optimizer`, and a loop that Orbit's controller drives."""

import numpy as np
import pytest
import tensorflow as tf
from clients import TOO_LARGE, keras2, wrapped

from lossscale import LossScaleOptimizer

STEPS = 8

pytestmark = pytest.mark.slow


def make_trainer(orbit, keras, optimizer):
    """Returns Orbit's trainer of one layer in float16."""
    layer = keras.layers.Dense(1, dtype="mixed_float16")
    layer.build([None, 3])

    class Trainer(orbit.StandardTrainer):
        def __init__(self):
            batch = (tf.ones([4, 3]), tf.ones([4, 1]))
            super().__init__(tf.data.Dataset.from_tensors(batch).repeat())

        def train_step(self, iterator):
            x, y = next(iterator)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.cast(layer(x), tf.float32) - y) ** 2)
                scaled_loss = optimizer.get_scaled_loss(loss)
            grads = tape.gradient(scaled_loss, layer.trainable_variables)
            grads = optimizer.get_unscaled_gradients(grads)
            optimizer.apply_gradients(zip(grads, layer.trainable_variables))

    return Trainer(), layer


@pytest.mark.parametrize("is_wrapped_by_them", [False, True])
def test_a_controller_trains_so_many_applied_steps(is_wrapped_by_them):
    orbit = pytest.importorskip("orbit", reason="it comes with tf-models-official")
    performance = pytest.importorskip("official.modeling.performance")
    keras = keras2()
    inner = keras.optimizers.SGD(2.0**-4)
    if is_wrapped_by_them:
        theirs = performance.configure_optimizer(inner, use_float16=True)
        config = {**theirs.get_config(), "initial_scale": TOO_LARGE}
        optimizer = LossScaleOptimizer.from_config(config)
    else:
        optimizer = wrapped(performance.configure_optimizer(inner))
    trainer, layer = make_trainer(orbit, keras, optimizer)
    optimizer.build(layer.trainable_variables)
    before = [weight.numpy() for weight in layer.weights]
    controller = orbit.Controller(
        global_step=optimizer.iterations, trainer=trainer, steps_per_loop=4
    )
    controller.train(steps=STEPS)
    # Skipped steps are not counted: the controller goes on until so many were applied.
    assert int(optimizer.iterations.numpy()) == STEPS
    assert int(optimizer.loss_scale.skipped_steps.numpy()) > 0
    for old, new in zip(before, layer.weights):
        assert np.isfinite(new.numpy()).all()
        assert (old != new.numpy()).any()
