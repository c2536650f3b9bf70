"""All three tools leave the model, its metrics and the random streams as they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tensorflow as tf
from installed import families
from models import FEATURES, assert_same, training_state

from lossscale import find_nonfinite, forward_ranges, gradient_ranges

#: One family of each Keras: the optimizers have no part in this.
EACH = {family.keras: family for family in families()}.values()
TOOLS = {
    "find_nonfinite": find_nonfinite,
    "gradient_ranges": lambda *batch: gradient_ranges(*batch, verbose=0),
    "forward_ranges": lambda model, x, _: forward_ranges(model, x, verbose=0),
}
X, Y = np.ones([16, FEATURES], np.float32), np.full([16, 1], 7.0, np.float32)


@pytest.fixture(params=EACH, ids=lambda family: family.name)
def family(request):
    return request.param


def seed_all(keras):
    """Seeds every stream, as `keras.utils.set_random_seed` does where there is one."""
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 - the global stream
    tf.random.set_seed(5)
    tf.random.set_global_generator(tf.random.Generator.from_seed(5))
    if hasattr(keras.utils, "set_random_seed"):
        keras.utils.set_random_seed(5)


class Drawing:
    """Makes a layer that draws from every global stream."""

    def __new__(cls, keras):
        has_ops = hasattr(keras, "ops")

        class Draws(keras.layers.Layer):
            def call(self, x):
                x *= tf.random.uniform([], 0.5, 1.5)
                x *= tf.random.get_global_generator().uniform([], 0.5, 1.5)
                if has_ops:  # from Keras 3's own global generator
                    x *= keras.random.uniform([], 0.5, 1.5)
                drawn = random.random() + np.random.uniform()  # noqa: S311, NPY002
                return x * (1 + drawn)

        return Draws()


def seeded(family, **compiled_by):
    """Returns a new seeded model that draws in many ways."""
    keras = family.keras
    seed_all(keras)
    dense = keras.layers.Dense
    parts = [dense(8), keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.1)]
    parts += [keras.layers.BatchNormalization(), Drawing(keras), dense(1)]
    model = keras.Sequential([keras.Input((FEATURES,)), *parts])
    model.compile(
        family.optimizers.SGD(0.01), loss="mse", metrics=["mae"], **compiled_by
    )
    return model


@pytest.mark.every_combination
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("name", TOOLS)
def test_a_seeded_fit_gives_the_same_weights(family, name, run_eagerly):
    weights = []
    for tool in (None, TOOLS[name]):
        model = seeded(family, run_eagerly=run_eagerly)
        seed_all(family.keras)
        if tool is not None:
            tool(model, X, Y)
        model.fit(X, Y, epochs=2, verbose=0)
        weights.append(model.get_weights())
    assert_same(*weights)


@pytest.mark.every_combination
@pytest.mark.parametrize("name", TOOLS)
def test_between_two_fits_nothing_moves(family, name):
    weights = []
    for tool in (None, TOOLS[name]):
        model = seeded(family)
        model.fit(X, Y, verbose=0)
        before = training_state(model)
        if tool is not None:
            tool(model, X, Y)
        assert_same(before, training_state(model))
        model.fit(X, Y, verbose=0)
        weights.append(model.get_weights())
    assert_same(*weights)


@pytest.mark.every_combination
@pytest.mark.parametrize("name", TOOLS)
def test_metrics_of_a_model_that_never_trained_stay_empty(family, name):
    losses = []
    for tool in (None, TOOLS[name]):
        layer = family.keras.layers.Dense(1, kernel_initializer="zeros")
        model = family.keras.Sequential([family.keras.Input((FEATURES,)), layer])
        model.compile(family.optimizers.SGD(0.0), loss="mse", metrics=["mae"])
        if tool is not None:
            tool(model, X, Y * 10)
        kept = {"reset_metrics": False} if family.name != "keras3" else {}
        losses.append(np.array(model.train_on_batch(X, Y, **kept)))
    assert_same(*losses)
    assert losses[0][0] == 49.0
