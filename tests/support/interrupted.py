"""A run of four epochs that is interrupted after two, and goes on from a file."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from models import data, regression

from lossscale import DynamicLossScale, LossScaleOptimizer

BATCH = 8
EPOCHS, HALF = 4, 2
RULE = {
    "initial_loss_scale": 2.0**12,
    "increment_period": 3,
    "multiplier": 4.0,
    "backoff_factor": 0.5,
    "hysteresis": 3,
    "hysteresis_reset": ["backoff"],
}


def adam(family):
    """Returns the inner optimizer."""
    return family.optimizers.Adam(0.05)


def wrapped(family):
    """Returns it with a loss scale whose every argument matters."""
    return LossScaleOptimizer(adam(family), DynamicLossScale(**RULE))


def model_of(family, optimizer):
    """Returns the model, compiled."""
    return regression(family, optimizer, run_eagerly=True)


def fresh(family, built=False):
    """Returns a new model; if `built`, it has trained on other data."""
    model = model_of(family, wrapped(family))
    if built:
        x, y = data(np.random.default_rng(11), BATCH)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return model


def fit(model, first, last, *callbacks, bad=True):
    """Trains for some epochs of five batches, the fourth of which is not finite."""
    x, y = data(np.random.default_rng(7), 5 * BATCH)
    if bad:
        x[3 * BATCH] = np.inf
    model.run_eagerly = True  # files do not hold it
    model.fit(
        x,
        y,
        batch_size=BATCH,
        initial_epoch=first,
        epochs=last,
        callbacks=list(callbacks),
        shuffle=False,
        verbose=0,
    )


def checkpoint(model):
    """Returns a checkpoint of a model and its optimizer."""
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)
