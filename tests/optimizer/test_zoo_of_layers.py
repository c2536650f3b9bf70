"""Layers of every Keras in a small network: `fit` trains as the bare optimizer.

Those of the first Keras are all trained, in one mode each, of the others some.
"""

from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest
import tensorflow as tf
from installed import families
from layers import FAIL_IN_KERAS_2, LAYERS
from limits import TENSORFLOW, is_older, skip_without
from models import compiled_by, seed_all

from lossscale import LossScaleOptimizer, LossScaleWarning


def network(keras, name):
    """Returns a layer between two without a bias, or behind the input alone."""
    row, layers = LAYERS[name], keras.layers
    inputs = keras.Input(row.shape, dtype=row.dtype)
    x = other = inputs
    if not row.is_first:
        x, other = (layers.Dense(row.shape[-1], use_bias=False)(x) for _ in range(2))
    x = row.call(row.make(layers, name), x, other, layers)
    x = layers.Dense(1, use_bias=False)(layers.Flatten()(x))
    return keras.Model(inputs, x)


def numbers(model):
    """Returns copies of a model's weights that are no counters and no words."""
    weights = [np.array(weight) for weight in model.get_weights()]
    return [weight for weight in weights if weight.dtype.kind == "f"]


def trained(family, name, mode, wrap):
    """Returns a network's weights before and after `fit`, and our warnings."""
    seed_all(family.keras)  # initial weights, and masks that are drawn
    rng = np.random.default_rng(5)
    data = LAYERS[name].inputs(12, rng), rng.normal(size=(12, 1)).astype(np.float32)
    model = network(family.keras, name)
    before = numbers(model)
    optimizer = family.optimizers.SGD(2.0**-4)
    optimizer = LossScaleOptimizer(optimizer) if wrap else optimizer
    model.compile(optimizer, "mse", **compiled_by(mode))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = tf.data.Dataset.from_tensor_slices(data)
        model.fit(batches.batch(6, drop_remainder=mode == "xla"), verbose=0)
    ours = [str(w.message) for w in caught if w.category is LossScaleWarning]
    return before, numbers(model), ours


def agree(first, second):
    """Tells whether weights before and after `fit` do."""
    return all(
        np.allclose(one, other, rtol=1e-5, atol=1e-6)
        for weights in zip(first, second)
        for one, other in zip(*weights)
    )


def bare_or_skip(family, name, mode):
    """Returns weights before and after a `fit` with the bare optimizer."""
    try:
        return trained(family, name, mode, wrap=False)[:2]
    except Exception as error:
        is_newest = TENSORFLOW >= (2, 21) and not is_older(family, (3, 15))
        fails = family.name != "keras3" and name in FAIL_IN_KERAS_2
        if mode != "xla" and is_newest and not fails:
            raise
        pytest.skip(f"the bare optimizer cannot train it here: {str(error)[:200]}")


def each_in_a_mode():
    """Returns parameters: each layer in one of the modes, in turn.

    Eagerly it takes half of the time of a graph, a fifth of that of XLA. Of Kerases but
    the first it is every eighth: what TensorFlow computes is the same.
    """
    found = []
    for family in families():
        is_first = family.name == families()[0].name
        there = [name for name in sorted(LAYERS) if hasattr(family.keras.layers, name)]
        for turn, name in enumerate(there):
            is_compiled = is_first and turn % 9 == 8
            mode = "xla" if is_compiled else ("eager", "graph", "eager")[turn % 3]
            is_quick = turn % 12 == 0 and is_first  # on all versions but the newest
            mark = pytest.mark.slow_on_the_newest if is_quick else pytest.mark.slow
            if is_first or turn % 8 == 0:
                each_id = f"{family.name}-{name}-{mode}"
                found.append(pytest.param(family, name, mode, id=each_id, marks=mark))
    return found


@pytest.mark.either_keras2
@pytest.mark.compiled_once
@pytest.mark.parametrize(("family", "name", "mode"), each_in_a_mode())
def test_trains_as_the_bare_optimizer(family, name, mode):
    if mode == "xla":
        skip_without("compile(jit_compile=...)", family)
    bare = bare_or_skip(family, name, "eager")
    assert any(not np.array_equal(*pair) for pair in zip(*bare))
    try:
        *ours, warned = trained(family, name, mode, wrap=True)
    except Exception:
        bare_or_skip(family, name, mode)
        raise
    if not agree(ours, bare):  # masks are drawn otherwise in some modes
        bare = bare_or_skip(family, name, mode)
    assert not warned, warned[0]
    for one, other in zip(ours[0] + ours[1], bare[0] + bare[1]):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    gc.collect()  # an optimizer that is alive listens to all that is eager
