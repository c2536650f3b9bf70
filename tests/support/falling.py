"""Networks whose gradients fall by a factor from block to block."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from models import policy_of

from lossscale.runtime import kerases

WIDTH = 8
#: What each block takes of the gradient.
FACTOR = 2.0**-4


def falling(family, policy, wrap, blocks=20):
    """Returns a model of `blocks` matrices that each take `FACTOR` of the gradient.

    Forward each doubles what it takes away, so that values stay as large as they are.

    Args:
      family: The Keras.
      policy: The policy of the blocks.
      wrap: What is put around each.
      blocks: How many there are.
    """
    keras = family.keras

    class Kept(keras.layers.Layer):
        """Multiplies by `1 / FACTOR`, and leaves the gradient as it is."""

        def call(self, x):
            return x + tf.stop_gradient(x * (1 / FACTOR - 1))

    rng = np.random.default_rng(0)
    with policy_of(keras, policy):
        dense = [
            keras.layers.Dense(WIDTH, use_bias=False, name=f"dense_{number}")
            for number in range(blocks)
        ]
        layers = [each for d in dense for each in (wrap(d), Kept(dtype="float32"))]
        model = keras.Sequential([keras.Input((WIDTH,), dtype="float32"), *layers])
    turned = [np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0] for _ in dense]
    model.set_weights([(each * FACTOR).astype(np.float32) for each in turned])
    return model


def loss_of(model):
    """Returns a loss of size 1."""
    x = np.random.default_rng(1).normal(size=(16, WIDTH)).astype(np.float32)
    y = tf.cast(model(tf.constant(x), training=True), tf.float32)
    return tf.reduce_mean(y**2)


def gradients(model, scale=1.0):
    """Returns the true gradients of the loss, computed with a loss scale."""
    held = [kerases.tensor_of(variable) for variable in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = loss_of(model) * scale
    return [grad / scale for grad in tape.gradient(loss, held)]


def errors(found, expected):
    """Returns the relative error of each gradient. One that is not finite has 1."""
    pairs = [(np.float64(f), np.float64(e)) for f, e in zip(found, expected)]
    with np.errstate(invalid="ignore"):
        shares = [np.linalg.norm(f - e) / np.linalg.norm(e) for f, e in pairs]
    return [float(share) if np.isfinite(share) else 1.0 for share in shares]
