"""Every expression of a zoo in the forward pass: `fit` trains as the bare optimizer.

Each group of them is trained in one mode, in turn. For all of them in every mode:

    LOSSSCALE_LAYERS=1 pytest -m slow tests/optimizer/test_zoo_of_expressions.py

No layer has a bias. A bias's gradient is scaled whatever the layers do, and could speak
for the others.
"""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest
import tensorflow as tf
from expressions import EXPRESSIONS, FEATURES, GROUPS, IMPUTES
from installed import families
from limits import skip_without
from models import compiled_by

from lossscale import LossScaleOptimizer, LossScaleWarning

pytestmark = pytest.mark.slow_on_the_newest

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


def forward(name, x, weights):
    """Returns what two layers make of a batch, each behind the expression.

    The first expression is a factor of weights' gradients, the second one is on their
    way back, too.
    """
    for weight in weights:
        x = EXPRESSIONS[name](x) @ weight
    return x


def kernels(name, x):
    """Returns the weights at the beginning."""
    width = EXPRESSIONS[name](x).shape[1]
    return [kernel([width, FEATURES]), kernel([width, 1])]


def reference(name, is_static):
    """Returns the weights after gradient descent without any Keras."""
    weights = None
    for x, y in batches_of([name], is_static):
        weights = weights or kernels(name, x)
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_mean(loss_of(y, forward(name, x, weights)))
        grads = tape.gradient(loss, weights, unconnected_gradients="zero")
        weights = [w - RATE * g for w, g in zip(weights, grads)]
    return [weight.numpy() for weight in weights]


class Network:
    """For each expression a branch of its own, from the same input."""

    def __init__(self, keras, names, is_static):
        class Expression(keras.layers.Layer):
            def __init__(self, function):
                super().__init__()
                self.function = function

            def call(self, x):
                return self.function(x)

        inputs = keras.Input((FEATURES,), batch_size=6 if is_static else None)
        self.layers, outputs = {}, []
        for name in names:
            x, self.layers[name] = inputs, []
            for width in (FEATURES, 1):
                x = Expression(EXPRESSIONS[name])(x)
                dense = keras.layers.Dense(
                    width, use_bias=False, kernel_initializer=kernel
                )
                x = dense(x)
                self.layers[name].append(dense)
            outputs.append(x)
        self.model = keras.Model(inputs, keras.layers.Concatenate()(outputs))

    def weights(self):
        """Returns each expression's."""
        return {
            name: [np.array(w) for layer in layers for w in layer.get_weights()]
            for name, layers in self.layers.items()
        }


def trained(family, names, mode, wrap):
    """Returns each expression's weights after `fit`, and what our warnings say."""
    is_static = mode == "xla"
    network = Network(family.keras, names, is_static)
    optimizer = family.optimizers.SGD(RATE)
    optimizer = LossScaleOptimizer(optimizer) if wrap else optimizer
    network.model.compile(optimizer, loss=loss_of, **compiled_by(mode))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network.model.fit(batches_of(names, is_static), verbose=0)
    ours = [str(w.message) for w in caught if w.category is LossScaleWarning]
    return network.weights(), ours


def agree(first, second):
    return all(
        np.allclose(one, other, rtol=1e-5, atol=1e-6)
        for one, other in zip(first, second)
    )


def is_possible(name, compiled):
    """Tells whether this TensorFlow has all of it, and if asked, XLA too."""

    def slopes(x):
        weights = kernels(name, x)
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_sum(forward(name, x, weights))
        return tape.gradient(loss, weights)

    x = tf.constant(np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, FEATURES))
    try:
        (tf.function(slopes, jit_compile=True) if compiled else slopes)(x)
    except Exception:
        return False
    return True


#: All groups in all modes: for a quarter of an hour.
EXPLORED = bool(os.environ.get("LOSSSCALE_LAYERS"))
QUICK = [("imputes", "eager"), ("imputes", "graph")]
#: XLA compiles for the longest.
IN_TURN = ["eager", "graph", "eager", "eager", "graph", "xla"]


def each_group():
    """Returns parameters: quick ones, and of the first Keras each group in a mode."""
    chosen = [
        (family, group, mode)
        for number, group in enumerate(GROUPS)
        for family in families()
        for mode in MODES
        if EXPLORED
        or (group, mode) in QUICK
        or (
            mode == IN_TURN[number % len(IN_TURN)] and family.name == families()[0].name
        )
    ]
    return [
        pytest.param(
            *(family, group, mode),
            id=f"{family.name}-{group}-{mode}",
            marks=[] if (group, mode) in QUICK else [pytest.mark.slow],
        )
        for family, group, mode in chosen
    ]


@pytest.mark.either_keras2
@pytest.mark.parametrize(("family", "group", "mode"), each_group())
def test_trains_as_the_bare_optimizer(family, group, mode):
    if mode == "xla":
        skip_without("compile(jit_compile=...)", family)
    names = [name for name in GROUPS[group] if is_possible(name, mode == "xla")]
    weights, warned = trained(family, names, mode, wrap=True)
    assert not warned, warned[0]
    expected = {name: reference(name, mode == "xla") for name in names}
    wrong = [name for name in names if not agree(weights[name], expected[name])]
    if wrong:  # by the optimizer, or by Keras's mode alone?
        expected, _ = trained(family, names, mode, wrap=False)
        wrong = [name for name in wrong if not agree(weights[name], expected[name])]
    assert not wrong, "\n".join(f"{name} {weights[name]}" for name in wrong)
