"""Small models, optimizers and loops, the same on every Keras."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from lossscale import _keras

FEATURES = 6


def variable_of(family, value, dtype="float32"):
    """Returns a variable of the kind that the optimizers of a Keras train."""
    if family.name == "keras3":
        return family.keras.Variable(value, dtype=dtype, name="v")
    return tf.Variable(value, dtype=dtype, name="v")


def data(rng, rows=64):
    """Returns inputs and targets of a linear relation, in powers of two of noise."""
    x = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    y = x @ np.arange(1, FEATURES + 1, dtype=np.float32)[:, None] / 4
    return x, y.astype(np.float32)


def regression(family, optimizer, policy="float32", **compile_arguments):
    """Returns a compiled two-layer network with fixed initial weights."""
    keras = family.keras
    keras.mixed_precision.set_global_policy(policy)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    keras.mixed_precision.set_global_policy("float32")
    rng = np.random.default_rng(3)
    model.set_weights(
        [rng.normal(size=w.shape).astype(np.float32) / 2 for w in model.get_weights()]
    )
    loss = keras.losses.MeanSquaredError()
    model.compile(optimizer, loss=loss, **compile_arguments)
    return model


def inner_variables(optimizer):
    """Returns the variables of a wrapper's inner optimizer, or of a bare optimizer."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    found = inner.variables
    return list(found() if callable(found) else found)


def training_state(model):
    """Returns copies of all that a skipped step must not change."""
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    found = [np.array(weight) for weight in model.get_weights()]
    if not hasattr(inner, "get_slot_names"):
        return found + [np.array(v.numpy()) for v in inner_variables(inner)]
    # Keras 2's legacy optimizers list their slots in the order of their creation.
    found.append(np.array(inner.iterations.numpy()))
    slots = [
        inner.get_slot(variable, name).numpy()
        for name in sorted(inner.get_slot_names())
        for variable in model.trainable_variables
    ]
    return found + slots


def assert_same(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second):
        np.testing.assert_array_equal(one, other)


def differ(first, second):
    return any(not np.array_equal(one, other) for one, other in zip(first, second))


def with_infinity(x):
    """Returns inputs of which the last row alone overflows, so on the last replica."""
    bad = x.copy()
    bad[-1] = np.inf
    return bad


def compiled(function, mode):
    """Returns `function` as it is ("eager"), or as a graph, or compiled by XLA."""
    if mode == "eager":
        return function
    return tf.function(function, **(_keras.COMPILED_BY_XLA if mode == "xla" else {}))
