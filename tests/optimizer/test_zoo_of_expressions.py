"""Every expression of a zoo in the forward pass: `fit` trains as the bare optimizer.

Each group of them is trained in one mode, in turn. For all of them in every mode:

    LOSSSCALE_LAYERS=1 pytest -m slow tests/optimizer/test_zoo_of_expressions.py

No layer has a bias. A bias's gradient is scaled whatever the layers do, and could speak
for the others.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf
from exact import heard
from expressions import EXPRESSIONS, FEATURES, GROUPS, IMPUTES
from installed import families
from limits import skip_without
from models import compiled, compiled_by

from lossscale import LossScaleOptimizer

RATE = 2.0**-7
MODES = ["eager", "graph", "xla"]


def kernel(shape, dtype="float32", **_):
    """Initializes weights: the same of each shape."""
    value = np.random.default_rng(shape[0]).normal(size=tuple(shape)) / 4
    return tf.cast(value, dtype)


def batches_of(names, is_static):
    """Returns batches of seven and five rows, or if shapes are static two of six."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(12, FEATURES)).astype(np.float32) / 2
    x[1, 2] = 0.0
    y = x @ np.array([[1], [-2], [0.5], [1]], np.float32)
    if IMPUTES.keys() >= set(names):
        x[2, 1] = x[7, 3] = np.nan
    batches = tf.data.Dataset.from_tensor_slices((x, y))
    return batches.batch(6 if is_static else 7, drop_remainder=is_static)


def loss_of(y, predictions):
    """Returns a loss in which no output has to do with another."""
    return tf.reduce_sum((predictions - y) ** 2, -1)


def gradients(name, x, y, weights):
    """Returns the gradients of two layers, each behind the expression.

    The first expression is a factor of weights' gradients, the second one is on their
    way back, too.
    """
    with tf.GradientTape() as tape:
        tape.watch(weights)
        for weight in weights:
            x = EXPRESSIONS[name](x) @ weight
        loss = tf.reduce_mean(loss_of(y, x))
    return tape.gradient(loss, weights, unconnected_gradients="zero")


def reference(name, is_compiled):
    """Returns the weights after gradient descent without any Keras.

    None if this TensorFlow has not all of it, or if asked, XLA has not.
    """
    step = compiled(gradients, "xla" if is_compiled else "eager")
    weights = None
    try:
        for x, y in batches_of([name], is_compiled):
            if weights is None:
                width = EXPRESSIONS[name](x).shape[1]
                weights = [kernel([width, FEATURES]), kernel([width, 1])]
            grads = step(name, x, y, weights)
            weights = [w - RATE * g for w, g in zip(weights, grads)]
    except Exception:
        return None
    return [weight.numpy() for weight in weights]


def fitted_together(family, names, mode, wrap):
    """Returns each expression's weights after `fit`, and what our warnings say.

    Each has a branch of its own, from the same input.
    """
    keras, is_static = family.keras, mode == "xla"

    class Expression(keras.layers.Layer):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def call(self, x):
            return self.function(x)

    inputs = keras.Input((FEATURES,), batch_size=6 if is_static else None)
    layers, outputs = {}, []
    for name in names:
        x, layers[name] = inputs, []
        for width in (FEATURES, 1):
            how = {"use_bias": False, "kernel_initializer": kernel}
            layers[name].append(keras.layers.Dense(width, **how))
            x = layers[name][-1](Expression(EXPRESSIONS[name])(x))
        outputs.append(x)
    model = keras.Model(inputs, keras.layers.Concatenate()(outputs))
    optimizer = family.optimizers.SGD(RATE)
    optimizer = LossScaleOptimizer(optimizer) if wrap else optimizer
    model.compile(optimizer, loss=loss_of, **compiled_by(mode))
    with heard() as ours:
        model.fit(batches_of(names, is_static), verbose=0)
    weights = {
        name: [np.array(w) for layer in both for w in layer.get_weights()]
        for name, both in layers.items()
    }
    return weights, ours


def agree(first, second):
    return all(
        np.allclose(one, other, rtol=1e-5, atol=1e-6)
        for one, other in zip(first, second)
    )


#: All groups in all modes: for a quarter of an hour.
EXPLORED = bool(os.environ.get("LOSSSCALE_LAYERS"))
QUICK = [("imputes", "eager"), ("imputes", "graph")]
#: XLA compiles for the longest.
IN_TURN = ["eager", "graph", "eager", "eager", "graph", "xla"]


def each_group():
    """Returns parameters: quick ones, and of the first Keras each group in a mode."""
    found = []
    for number, group in enumerate(GROUPS):
        for family in families():
            is_first = family.name == families()[0].name
            for mode in MODES:
                is_quick = (group, mode) in QUICK
                is_its_turn = is_first and mode == IN_TURN[number % len(IN_TURN)]
                if EXPLORED or is_quick or is_its_turn:
                    each_id = f"{family.name}-{group}-{mode}"
                    marks = [] if is_quick else [pytest.mark.slow]
                    one = pytest.param(family, group, mode, id=each_id, marks=marks)
                    found.append(one)
    return found


@pytest.mark.parametrize(("family", "group", "mode"), each_group())
def test_trains_as_the_bare_optimizer(family, group, mode):
    if mode == "xla":
        skip_without("compile(jit_compile=...)", family)
    expected = {name: reference(name, mode == "xla") for name in GROUPS[group]}
    names = [name for name, weights in expected.items() if weights is not None]
    weights, warned = fitted_together(family, names, mode, wrap=True)
    assert not warned, warned[0]
    wrong = [name for name in names if not agree(weights[name], expected[name])]
    if wrong:  # by the optimizer, or by Keras's mode alone?
        expected, _ = fitted_together(family, names, mode, wrap=False)
        wrong = [name for name in wrong if not agree(weights[name], expected[name])]
    assert not wrong, "\n".join(f"{name} {weights[name]}" for name in wrong)
