"""Layers and expressions in a small network: `fit` trains as the bare optimizer.

Those of the first Keras are all trained, of the others some. Where a layer may have a
bias it has none: a bias's gradient is scaled whatever the layer does, and could speak
for the weights'. A group of expressions is in one network, each in a
branch of its own, before and behind a layer.
"""

from __future__ import annotations

import numpy as np
import pytest
from exact import heard
from expressions import FEATURES, GROUPS
from installed import families
from limits import TENSORFLOW, is_older
from models import compiled_by, seed_all

from lossscale import LossScaleOptimizer

FLAT, ROWS, IMAGE = (4,), (6, 3), (6, 6, 3)
PLAIN = {"use_bias": False}
#: Name -> the input's shape, and how it is made of a Keras's layers. Those of one kind
#: compute alike: one of them is here, and none that is a single operation of
#: expressions.py.
LAYERS = {
    "Dense": (FLAT, lambda layers: layers.Dense(3, "relu", **PLAIN)),
    "EinsumDense": (FLAT, lambda layers: layers.EinsumDense("ab,bc->ac", 3)),
    "Embedding": (FLAT, lambda layers: layers.Embedding(8, 3)),
    "Masking": (ROWS, lambda layers: layers.Masking(0.0)),
    "TimeDistributed": (
        ROWS,
        lambda layers: layers.TimeDistributed(layers.Dense(3, **PLAIN)),
    ),
    "SpectralNormalization": (
        FLAT,
        lambda layers: layers.SpectralNormalization(layers.Dense(3, **PLAIN)),
    ),
    "Dropout": (FLAT, lambda layers: layers.Dropout(0.5, seed=3)),
    # Activations and normalizations
    "BatchNormalization": (IMAGE, lambda layers: layers.BatchNormalization()),
    "LayerNormalization": (ROWS, lambda layers: layers.LayerNormalization()),
    # Convolutions and pooling
    "Conv2D": (IMAGE, lambda layers: layers.Conv2D(2, 3, padding="same", **PLAIN)),
    # Loops
    "GRU": (ROWS, lambda layers: layers.GRU(3, **PLAIN)),
    "LSTM": (ROWS, lambda layers: layers.LSTM(3, **PLAIN)),
    "RNN": (ROWS, lambda layers: layers.RNN(layers.SimpleRNNCell(3, **PLAIN))),
    "Discretization": (FLAT, lambda layers: layers.Discretization([0.2, 0.5])),
    # Of images, drawn anew in each step
    "RandomFlip": (IMAGE, lambda layers: layers.RandomFlip(seed=3)),
    "RandomRotation": (IMAGE, lambda layers: layers.RandomRotation(0.2, seed=3)),
    # Of two inputs
    "Dot": (ROWS, lambda layers: lambda x, y: layers.Dot(2)([x, y])),
    "AdditiveAttention": (
        ROWS,
        lambda layers: lambda x, y: layers.AdditiveAttention()([x, y]),
    ),
    "MultiHeadAttention": (
        ROWS,
        lambda layers: layers.MultiHeadAttention(2, 3, **PLAIN),
    ),
}
OF_TWO = {"Dot", "AdditiveAttention", "MultiHeadAttention"}
#: Those before which nothing is trained, and the dtype of their input.
FIRST = {"Embedding": "int32", "Discretization": "float32"}
#: What the newest Keras 2 cannot train: its own check takes no InputSpec.
FAIL_IN_KERAS_2 = {"SpectralNormalization"}


def of_expressions(keras, group):
    """Returns a network with two layers behind each expression of a group."""

    class Expression(keras.layers.Layer):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def call(self, x):
            return self.function(x)

    inputs, outputs = keras.Input((FEATURES,), batch_size=6), []
    for function in GROUPS[group].values():
        x = inputs
        for width in (FEATURES, 1):
            x = keras.layers.Dense(width, **PLAIN)(Expression(function)(x))
        outputs.append(x)
    return keras.Model(inputs, keras.layers.Concatenate()(outputs))


def network(keras, name):
    """Returns a layer between two without a bias, or behind the input alone."""
    if name in GROUPS:
        return of_expressions(keras, name)
    layers, (shape, make) = keras.layers, LAYERS[name]
    inputs = keras.Input(shape, dtype=FIRST.get(name, "float32"))
    x = [inputs]
    if name not in FIRST:
        dense = [layers.Dense(shape[-1], **PLAIN) for _ in range(1 + (name in OF_TWO))]
        x = [layer(inputs) for layer in dense]
    x = make(layers)(*x)
    if name == "Discretization":
        x = layers.Embedding(8, 3)(x)
    x = layers.Dense(1, **PLAIN)(layers.Flatten()(x))
    return keras.Model(inputs, x)


def inputs_of(name, rows, rng):
    """Returns so many rows of what a layer takes."""
    if name in GROUPS:
        x = rng.normal(size=(rows, FEATURES)).astype(np.float32) / 2
        x[1, 2] = 0.0
        x[2, 1] = np.nan if name == "imputes" else x[2, 1]
        return x
    shape, dtype = (rows, *LAYERS[name][0]), FIRST.get(name, "float32")
    if dtype == "float32":
        return rng.uniform(0.1, 0.9, shape).astype(dtype)
    numbers = rng.integers(1, 6, shape)
    return numbers.astype(dtype)


def numbers(model):
    """Returns copies of a model's weights that are no counters and no words."""
    weights = [np.array(weight) for weight in model.get_weights()]
    return [weight for weight in weights if weight.dtype.kind == "f"]


def fitted(family, name, wrap):
    """Returns a network's weights before and after `fit`, and our warnings."""
    seed_all(family.keras)  # initial weights, and masks that are drawn
    rng = np.random.default_rng(5)
    data = inputs_of(name, 12, rng), rng.normal(size=(12, 1)).astype(np.float32)
    model = network(family.keras, name)
    before = numbers(model)
    optimizer = family.optimizers.SGD(2.0**-4)
    optimizer = LossScaleOptimizer(optimizer) if wrap else optimizer
    model.compile(optimizer, "mse", **compiled_by("graph"))
    with heard() as ours:
        model.fit(*data, batch_size=6, shuffle=False, verbose=0)
    return before, numbers(model), ours


def bare_or_skip(family, name):
    """Returns weights before and after a `fit` with the bare optimizer."""
    try:
        return fitted(family, name, wrap=False)[:2]
    except Exception as error:
        is_newest = TENSORFLOW >= (2, 21) and not is_older(family, (3, 15))
        if is_newest and (family.name == "keras3" or name not in FAIL_IN_KERAS_2):
            raise
        pytest.skip(f"the bare optimizer cannot train it here: {str(error)[:200]}")


def each_of_some():
    """Returns parameters: all networks of the first Keras, of others every eighth.

    What TensorFlow computes for them is the same.
    """
    for number, family in enumerate(families()):
        there = [name for name in sorted(LAYERS) if hasattr(family.keras.layers, name)]
        for name in [*GROUPS, *there][:: 8 if number else 1]:
            yield pytest.param(family, name, id=f"{family.name}-{name}")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), each_of_some())
def test_trains_as_the_bare_optimizer(family, name):
    bare = bare_or_skip(family, name)
    assert any(not np.array_equal(*pair) for pair in zip(*bare))
    *ours, warned = fitted(family, name, wrap=True)
    assert not warned, warned[0]
    for weights in zip(ours, bare):
        for one, other in zip(*weights):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
