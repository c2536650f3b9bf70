"""find_nonfinite: the layer at fault is named, and no other; the model as it was."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import policy_of, regression
from overflowing import data_for

from lossscale import LossScaleOptimizer, find_nonfinite


def chain(family, *layers, scale=16.0):
    """Returns a compiled model of a dense layer, these, and one in float32."""
    dense = family.keras.layers.Dense
    with policy_of(family.keras, "mixed_float16"):
        parts = [make(family.keras.layers) for make in layers]
        first, last = dense(4, name="first"), dense(1, dtype="float32", name="last")
        model = family.keras.Sequential([family.keras.Input((6,)), first, *parts, last])
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.5), scale)
    model.compile(optimizer, loss="mse")
    return model


@pytest.mark.parametrize("kind", ["inf", "-inf", "nan"])
def test_what_a_layers_gradient_is_is_told(family, kind):
    @tf.custom_gradient
    def broken(x):
        return x, lambda upstream: upstream * 0 + float(kind)

    model = chain(family, lambda layers: layers.Activation(broken, name="broken"))
    found = find_nonfinite(model, *data_for("gated"))
    assert (found.where, found.layer, found.kind) == ("gradient", "broken", kind)
    assert "No loss scale helps" in str(found)


def test_of_two_layers_with_one_input_the_guilty_one_is_named(family):
    def root(x):
        return tf.sqrt(tf.nn.relu(x) * 0)

    layers = family.keras.layers
    with policy_of(family.keras, "mixed_float16"):
        given = family.keras.Input((6,))
        hidden = layers.Dense(4, name="first")(given)
        guilty, innocent = layers.Activation(root, name="root"), layers.Dense(4)
        both = [guilty(hidden), innocent(hidden)]
        model = family.keras.Model(given, layers.Dense(1)(layers.Add()(both)))
    found = find_nonfinite(model, *data_for("gated"), loss="mse")
    assert (found.where, found.layer) == ("gradient", "root")


def test_a_loss_scale_that_is_too_high_is_no_layers_fault(family):
    found = find_nonfinite(chain(family, scale=2.0**40), *data_for("gated"))
    assert not found
    assert (found.where, found.layer, found.loss_scale) == ("scale", None, 2.0**40)
    assert "2**40" in str(found)


def test_a_layer_that_is_given_too_much_is_named(family):
    def times(layers):
        return layers.Activation(lambda x: x * 1e9, name="times", dtype="float32")

    def narrow(layers):
        return layers.Dense(4, name="narrow")

    found = find_nonfinite(chain(family, times, narrow), *data_for("gated"))
    assert (found.where, found.layer, found.operation) == ("forward", "narrow", "Cast")
    assert "before they were cast to float16" in str(found)


def test_weights_that_are_not_finite(family):
    model = chain(family)
    weights = model.get_weights()
    weights[0][0, 0] = np.nan
    model.set_weights(weights)
    found = find_nonfinite(model, *data_for("gated"))
    assert (found.where, found.layer, found.kind) == ("weights", "first", "nan")
    assert found.variables[0].endswith("first/kernel")


def test_a_layer_may_have_compiled_its_call(family):
    class Compiled(family.keras.layers.Layer):
        def __init__(self):
            super().__init__(name="compiled")
            self.inner = family.keras.layers.Dense(4, name="inner")

        @tf.function
        def call(self, x):
            return self.inner(x) * 3e4 * 3e4

    found = find_nonfinite(chain(family, lambda _: Compiled()), *data_for("gated"))
    assert (found.where, found.layer) == ("forward", "compiled")


# What it refuses


def test_data_that_are_not_finite_are_refused(family):
    model = regression(family, family.optimizers.SGD(0.5))
    x, y = data_for("gated")
    with pytest.raises(ValueError, match="`x` must be finite, got 48 values"):
        find_nonfinite(model, x * np.nan, y)
    with pytest.raises(ValueError, match="`y` must be finite, got 8 values"):
        find_nonfinite(model, x, y * np.inf)
    with pytest.raises(ValueError, match="`y` must be the targets"):
        find_nonfinite(model, x)


def test_models_that_cannot_be_asked_are_refused(family):
    empty = family.keras.Sequential()
    flat = family.keras.Sequential([family.keras.layers.Conv2D(2, 3)])
    for model, words in (
        (empty, "`model` must have layers"),
        (flat, "`model` must be built, or take `x`"),
    ):
        with pytest.raises(ValueError, match=words):
            find_nonfinite(model, *data_for("gated"), loss="mse")
