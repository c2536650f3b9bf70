"""All three tools leave the model, its metrics and the random streams as they were."""

import functools
import random

import numpy as np
import pytest
import tensorflow as tf
from faulty import scaled_gradients
from limits import is_older
from models import (
    FEATURES,
    assert_same,
    has_ops,
    policy_of,
    regression,
    seed_all,
    training_state,
)

import lossscale
from lossscale.runtime.keras_versions import layers_of

pytestmark = pytest.mark.each_version

TOOLS = {
    "find_nonfinite": lossscale.find_nonfinite,
    "gradient_ranges": functools.partial(
        lossscale.gradient_ranges, activations=True, verbose=0
    ),
    "forward_ranges": lambda model, x, _: lossscale.forward_ranges(model, x, verbose=0),
}
X, Y = np.ones([16, FEATURES], np.float32), np.full([16, 1], 7.0, np.float32)


def drawing(family):
    """Returns a layer that draws from every global stream."""
    keras = family.keras
    # Older versions of Keras do not seed their global generator.
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


def seeded(family, *last, is_built=True, **compiled_by):
    """Returns a new seeded model that draws in many ways."""
    keras = family.keras
    seed_all(keras)
    layers = keras.layers
    with policy_of(keras, "mixed_float16"):
        parts = [layers.Dense(8), layers.Dropout(0.5), layers.GaussianNoise(0.1)]
        parts += [layers.BatchNormalization(), layers.Dense(1, dtype="float32")]
        # What a layer draws in Python while `fit` builds it, it does not draw again.
        given = [keras.Input((FEATURES,)), drawing(family)] if is_built else []
        model = keras.Sequential([*given, *parts, *last])
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD(0.01), 256)
    model.compile(optimizer, loss="mse", metrics=["mae"], **compiled_by)
    return model


@pytest.mark.every
@pytest.mark.parametrize("way", [{"run_eagerly": True}, {"is_built": False}], ids=str)
def test_a_seeded_fit_gives_the_same_weights(family, way):
    weights = []
    for tools in ({}, TOOLS):
        model = seeded(family, **way)
        seed_all(family.keras)
        for tool in tools.values():
            tool(model, X, Y)
        model.fit(X, Y, epochs=2, verbose=0)
        weights.append(model.get_weights())
    assert_same(*weights)


def everything(model):
    """Returns all of a model that no tool may change."""
    layers = layers_of(model)
    policies = [(each.compute_dtype, each.variable_dtype) for each in layers]
    patched = [each.name for each in layers if "call" in vars(each)]
    eagerly = tf.config.functions_run_eagerly()
    state = training_state(model)
    for owner in (model, *model.metrics):
        state += [np.array(variable.numpy()) for variable in owner.variables]
    return state, list(model.metrics), policies, patched, eagerly


def assert_unchanged(model, before):
    (state, *others), (state_before, *others_before) = everything(model), before
    assert_same(state, state_before)
    assert others == others_before


def test_between_two_fits_nothing_moves(family):
    weights = []
    for tools in ({}, TOOLS):
        model = seeded(family)
        model.fit(X, Y, verbose=0)
        before = everything(model)
        for tool in tools.values():
            tool(model, X, Y)
            assert_unchanged(model, before)
        model.fit(X, Y, verbose=0)
        weights.append(model.get_weights())
    assert_same(*weights)


@pytest.mark.parametrize("tool", TOOLS)
def test_an_error_leaves_the_model_as_it_was(family, tool):
    class Fails(family.keras.layers.Layer):
        is_told = False

        def call(self, x):
            if self.is_told:
                raise ArithmeticError("on purpose")
            return x

    fails = Fails()
    model = seeded(family, fails)
    model.fit(X, Y, verbose=0)
    fails.is_told = True
    before = everything(model)
    # AutoGraph may turn it into another.
    with pytest.raises(Exception, match="on purpose"):
        TOOLS[tool](model, X, Y)
    assert_unchanged(model, before)


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


def test_a_loss_that_a_train_step_returns_is_logged_as_before(family):
    class Own(family.keras.Sequential):
        def train_step(self, batch):
            loss, grads = scaled_gradients(self, batch)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
            return {"loss": loss}

    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD(0.0))
    model = regression(family, optimizer, model_class=Own)
    logged = model.fit(X, Y, verbose=0).history["loss"]
    for tool in TOOLS.values():
        tool(model, X, Y)
        logged += model.fit(X, Y, verbose=0).history["loss"]
    assert len(set(logged)) == 1
