"""What the tests of clients have in common: a loss scale that must find its way."""

from __future__ import annotations

import numpy as np
import pytest
from models import differ

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.runtime import keras_versions

#: The steps of a `fit`, each of `BATCH` rows.
STEPS = 40
BATCH = 4
#: So large that the first steps overflow in float16, whatever the model.
TOO_LARGE = 2.0**40


def keras2():
    """Returns the Keras 2 that clients of it train with, or skips the test."""
    keras_versions.imported("tf_keras")
    if not keras_versions.keras2():
        pytest.skip("no Keras 2 is installed")
    return keras_versions.keras2()[-1]


def keras3():
    """Returns Keras 3, or skips the test."""
    if keras_versions.keras3() is None:
        pytest.skip("Keras 3 with TensorFlow is not installed")
    return keras_versions.keras3()


def wrapped(inner):
    return LossScaleOptimizer(inner, DynamicLossScale(TOO_LARGE, 1000))


def tokens(dtype):
    """Returns the numbers of 8 tokens for each row of a `fit`."""
    return np.random.default_rng(1).integers(0, 32, [STEPS * BATCH, 8], dtype)


def assert_trains_with_fit(keras, model, inputs, ids):
    """Asserts that a built classifier learns what the first of `ids` are."""
    optimizer = wrapped(keras.optimizers.Adam(1e-3))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss)
    before = model.get_weights()
    model.fit(inputs, ids[:, 0] % 2, batch_size=BATCH, verbose=0)
    assert model.optimizer is optimizer
    skipped = int(optimizer.loss_scale.skipped_steps.numpy())
    assert 0 < skipped < STEPS
    assert int(optimizer.iterations.numpy()) == STEPS - skipped
    assert float(optimizer.loss_scale.numpy()) == TOO_LARGE / 2**skipped
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert differ(before, model.get_weights())
