"""A run of four epochs that is interrupted after two, and goes on from a file."""

from __future__ import annotations

import numpy as np
from models import data, regression

from lossscale import DynamicLossScale, LossScaleOptimizer

BATCH = 8
EPOCHS, HALF = 4, 2


def adam(family):
    """Returns the inner optimizer."""
    return family.optimizers.Adam(0.05)


def model_of(family, optimizer):
    """Returns the model, compiled."""
    return regression(family, optimizer, run_eagerly=True)


def fresh(family, built=False):
    """Returns a model with a loss scale whose every argument matters.

    If `built`, it has trained on other data.
    """
    scale = DynamicLossScale(
        initial_loss_scale=2.0**12,
        increment_period=3,
        multiplier=4.0,
        backoff_factor=0.5,
        hysteresis=3,
        hysteresis_reset=["backoff"],
    )
    model = model_of(family, LossScaleOptimizer(adam(family), scale))
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
