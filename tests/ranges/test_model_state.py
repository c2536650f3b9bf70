"""All three tools leave the model, its metrics and the random streams as they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tensorflow as tf
from limits import is_older
from models import FEATURES, assert_same, has_ops, seed_all, training_state

from lossscale import find_nonfinite, forward_ranges, gradient_ranges
from lossscale.runtime.kerases import layers_of

pytestmark = pytest.mark.slow_on_the_newest

TOOLS = {
    "find_nonfinite": find_nonfinite,
    "gradient_ranges": lambda *batch: gradient_ranges(*batch, verbose=0),
    "forward_ranges": lambda model, x, _: forward_ranges(model, x, verbose=0),
}
X, Y = np.ones([16, FEATURES], np.float32), np.full([16, 1], 7.0, np.float32)


def drawing(family):
    """Returns a layer that draws from every global stream."""
    keras = family.keras
    # Older Kerases do not seed their global generator.
    is_seeded = has_ops(keras) and not is_older(family, (3, 15))

    class Draws(keras.layers.Layer):
        def call(self, x):
            generator = tf.random.get_global_generator()
            x *= tf.cast(tf.random.uniform([], 0.5, 1.5), x.dtype)
            x *= tf.cast(generator.uniform([], 0.5, 1.5), x.dtype)
            if is_seeded:  # from Keras 3's own global generator
                x *= tf.cast(keras.random.uniform([], 0.5, 1.5), x.dtype)
            drawn = random.random() + np.random.uniform()  # noqa: S311, NPY002
            return x * (1 + drawn)

    return Draws()


def seeded(family, is_built=True, **compiled_by):
    """Returns a new seeded model that draws in many ways."""
    keras = family.keras
    seed_all(keras)
    dense = keras.layers.Dense
    parts = [dense(8), keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.1)]
    parts += [keras.layers.BatchNormalization(), dense(1)]
    # What a layer draws in Python while `fit` builds it, it does not draw again.
    given = [keras.Input((FEATURES,)), drawing(family)] if is_built else []
    model = keras.Sequential([*given, *parts])
    model.compile(
        family.optimizers.SGD(0.01), loss="mse", metrics=["mae"], **compiled_by
    )
    return model


WAYS = {
    "built": {},
    "eager": {"run_eagerly": True},
    "unbuilt": {"is_built": False},
}


@pytest.mark.every_combination
@pytest.mark.parametrize("way", WAYS)
def test_a_seeded_fit_gives_the_same_weights(family, way):
    weights = []
    for tools in ({}, TOOLS):
        model = seeded(family, **WAYS[way])
        seed_all(family.keras)
        for tool in tools.values():
            tool(model, X, Y)
        model.fit(X, Y, epochs=2, verbose=0)
        weights.append(model.get_weights())
    assert_same(*weights)


def test_between_two_fits_nothing_moves(family):
    weights = []
    for tools in ({}, TOOLS):
        model = seeded(family)
        model.fit(X, Y, verbose=0)
        before, metrics = training_state(model), list(model.metrics)
        policies = [layer.compute_dtype for layer in layers_of(model)]
        for name, tool in tools.items():
            tool(model, X, Y)
            assert_same(before, training_state(model))
            assert model.metrics == metrics, name
            assert [layer.compute_dtype for layer in layers_of(model)] == policies
            assert not any("call" in vars(layer) for layer in layers_of(model)), name
            assert not tf.config.functions_run_eagerly()
        model.fit(X, Y, verbose=0)
        weights.append(model.get_weights())
    assert_same(*weights)


def test_metrics_of_a_model_that_never_trained_stay_empty(family):
    losses = []
    for tools in ({}, TOOLS):
        layer = family.keras.layers.Dense(1, kernel_initializer="zeros")
        model = family.keras.Sequential([family.keras.Input((FEATURES,)), layer])
        model.compile(family.optimizers.SGD(0.0), loss="mse", metrics=["mae"])
        for tool in tools.values():
            tool(model, X, Y * 10)
        kept = {"reset_metrics": False} if family.name != "keras3" else {}
        losses.append(np.array(model.train_on_batch(X, Y, **kept)))
    assert_same(*losses)
    assert losses[0][0] == 49.0
