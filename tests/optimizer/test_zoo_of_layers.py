"""Layers of every Keras in a small network: `fit` trains as the bare optimizer.

A third of them is trained, in one mode each. All of them, in every mode:

    LOSSSCALE_LAYERS=1 pytest -m slow tests/optimizer/test_zoo_of_layers.py
"""

from __future__ import annotations

import gc
import inspect
import os
import warnings

import numpy as np
import pytest
import tensorflow as tf
from installed import families
from layers import DRAWN_IN_PYTHON, FAIL_IN_KERAS_2, LAYERS, NOT_TRAINED
from limits import TENSORFLOW, is_older, skip_without
from models import seed_all

from lossscale import LossScaleOptimizer, LossScaleWarning

#: How a model is compiled.
MODES = {
    "eager": {"run_eagerly": True},
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
}


def network(keras, name, module):
    """Returns a layer between two without a bias, or behind the input alone."""
    row, layers = LAYERS[name], keras.layers
    inputs = keras.Input(row.shape, dtype=row.dtype)
    x = other = inputs
    if not row.is_first:
        x, other = (layers.Dense(row.shape[-1], use_bias=False)(x) for _ in range(2))
    x = row.call(row.make(module, name), x, other, layers)
    x = layers.Dense(1, use_bias=False)(layers.Flatten()(x))
    return keras.Model(inputs, x)


def numbers(model):
    """Returns copies of a model's weights that are no counters and no words."""
    weights = [np.array(weight) for weight in model.get_weights()]
    return [weight for weight in weights if weight.dtype.kind == "f"]


def trained(family, name, module, mode, wrap):
    """Returns a network's weights before and after `fit`, and our warnings."""
    seed_all(family.keras)  # initial weights, and masks that are drawn
    rng = np.random.default_rng(5)
    data = LAYERS[name].inputs(12, rng), rng.normal(size=(12, 1)).astype(np.float32)
    model = network(family.keras, name, module)
    before = numbers(model)
    optimizer = family.optimizers.SGD(2.0**-4)
    how = MODES[mode]
    if TENSORFLOW < (2, 9):
        how = {key: value for key, value in how.items() if key != "jit_compile"}
    model.compile(LossScaleOptimizer(optimizer) if wrap else optimizer, "mse", **how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = tf.data.Dataset.from_tensor_slices(data)
        model.fit(batches.batch(6, drop_remainder=mode == "xla"), verbose=0)
    ours = [str(w.message) for w in caught if w.category is LossScaleWarning]
    return before, numbers(model), ours


def is_newest(family):
    """Tells whether the tables are of this version: what they have can be trained."""
    return TENSORFLOW >= (2, 21) and not is_older(family, (3, 15))


def fails(family, name):
    return family.name != "keras3" and name in FAIL_IN_KERAS_2


def agree(first, second):
    """Tells whether weights before and after `fit` do."""
    return all(
        np.allclose(one, other, rtol=1e-5, atol=1e-6)
        for weights in zip(first, second)
        for one, other in zip(*weights)
    )


def bare_or_skip(family, name, module, mode):
    """Returns weights before and after a `fit` with the bare optimizer."""
    try:
        return trained(family, name, module, mode, wrap=False)[:2]
    except Exception as error:
        if mode != "xla" and is_newest(family) and not fails(family, name):
            raise
        pytest.skip(f"the bare optimizer cannot train it here: {str(error)[:200]}")


def assert_trains_as_bare(family, name, module, mode):
    if name in DRAWN_IN_PYTHON and mode != "eager":
        pytest.skip("draws in Python while it is traced: no two graphs are the same")
    bare = bare_or_skip(family, name, module, "eager")
    assert any(not np.array_equal(*pair) for pair in zip(*bare))
    try:
        *ours, warned = trained(family, name, module, mode, wrap=True)
    except Exception:
        bare_or_skip(family, name, module, mode)
        raise
    if not agree(ours, bare):  # masks are drawn otherwise in some modes
        bare = bare_or_skip(family, name, module, mode)
    assert not warned, warned[0]
    for one, other in zip(ours[0] + ours[1], bare[0] + bare[1]):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    gc.collect()  # an optimizer that is alive listens to all that is eager


def modules_of(keras):
    """Returns the modules in which a Keras has layers."""
    found = [keras.layers]
    experimental = getattr(keras.layers, "experimental", None)
    if experimental is not None:
        found.append(experimental)
        found.append(getattr(experimental, "preprocessing", experimental))
    return found


def every_layer(keras):
    """Returns the name of each class of layers of a Keras, and its module: no alias."""
    found = {}
    for module in modules_of(keras):
        for name in dir(module):
            value = getattr(module, name)
            if inspect.isclass(value) and issubclass(value, keras.layers.Layer):
                known = found.get(value, (name, module))
                found[value] = known if known[0] in LAYERS else (name, module)
    return dict(found.values())


def each_layer():
    """Returns each Keras with each layer of it that can be trained, and its module."""
    return [
        (family, name, module)
        for family in families()
        for name, module in sorted(every_layer(family.keras).items())
        if name in LAYERS
    ]


def quick():
    """Returns parameters for quick tests, which take some of them.

    What is there for images is tried on them, and for rows and volumes in slow tests.
    """
    found = []
    for family, name, module in each_layer():
        if name[-2:] in {"1D", "3D"} and f"{name[:-2]}2D" in LAYERS:
            continue
        number = len(found)
        mode = "graph" if number % 5 == 0 else "eager"
        found.append((family, name, module, mode))
    first = families()[0].name
    return [
        pytest.param(*each, id=f"{each[0].name}-{each[1]}-{each[3]}")
        for number, each in enumerate(found)
        if number % (12 if each[0].name == first else 24) == 0
    ]


@pytest.mark.skipif(TENSORFLOW >= (2, 21), reason="slow tests have all of them")
@pytest.mark.either_keras2
@pytest.mark.parametrize(("family", "name", "module", "mode"), quick())
def test_trains_as_the_bare_optimizer(family, name, module, mode):
    assert_trains_as_bare(family, name, module, mode)


#: All layers of each Keras in all modes: for half an hour.
EXPLORED = bool(os.environ.get("LOSSSCALE_LAYERS"))


def thorough():
    """Returns parameters for slow tests: each third layer in one of the modes, in turn.

    Of Kerases but the first every 24th. What TensorFlow computes is the same.
    """
    found = []
    for number, each in enumerate(each_layer()):
        is_first = each[0].name == families()[0].name
        modes = ["eager", "graph", *(["xla"] if is_first else [])]
        if not EXPLORED:
            # Eagerly it takes half of the time of a graph, a fifth of that of XLA.
            turn = number // 3
            is_compiled = is_first and turn % 9 == 0
            modes = ["xla" if is_compiled else modes[turn % 3 == 1]]
        if EXPLORED or number % (3 if is_first else 24) == 0:
            found += [(*each, mode) for mode in modes]
    return [
        pytest.param(*each, id=f"{each[0].name}-{each[1]}-{each[3]}") for each in found
    ]


@pytest.mark.slow
@pytest.mark.either_keras2
@pytest.mark.compiled_once
@pytest.mark.parametrize(("family", "name", "module", "mode"), thorough())
def test_trains_as_the_bare_optimizer_in_turn(family, name, module, mode):
    if mode == "xla":
        skip_without("compile(jit_compile=...)", family)
    assert_trains_as_bare(family, name, module, mode)


@pytest.mark.every_combination
def test_every_layer_is_trained_or_it_is_said_why_not(family):
    if not is_newest(family):
        pytest.skip("the tables are of the newest versions")
    unknown = every_layer(family.keras).keys() - LAYERS.keys() - NOT_TRAINED.keys()
    assert not unknown, "put them into one of the tables in tests/support/layers.py"
    assert not LAYERS.keys() & NOT_TRAINED.keys()
