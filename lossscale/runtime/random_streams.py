"""Keeps the random streams of this process as they are while something draws."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import Any, Iterator

import numpy as np

# Neither is public. Without them a seeded program draws other numbers after we drew.
from tensorflow.python.eager import context
from tensorflow.python.ops import stateful_random_ops

from lossscale.runtime import kerases

_KERAS3 = "global_seed_generator"


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Restores the streams at the end: Python's, NumPy's, TensorFlow's and Keras's.

    The states of a model's own layers are not among them.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    of_keras2 = [(each, each.getstate()) for each in _generators_of_keras2()]
    variables = _state_variables()
    saved = [(variable, variable.numpy()) for variable in variables]
    keras3 = _state_of_keras3()
    had_none = keras3 is not None and keras3.get_global_attribute(_KERAS3) is None
    try:
        with _other_seed():
            yield
    finally:
        for variable, value in saved:
            variable.assign(value)
        if had_none and keras3 is not None:
            keras3.set_global_attribute(_KERAS3, None)
        for generator, state in of_keras2:
            generator.setstate(state)
        np.random.set_state(of_numpy)  # noqa: NPY002 - the user's stream
        random.setstate(of_python)


@contextlib.contextmanager
def _other_seed() -> Iterator[None]:
    """Gives eager operations another seed than `tf.random.set_seed` has set.

    TensorFlow keeps the kernel of a random operation, with how far it has drawn, by its
    seeds. With the user's own seeds we would draw from the user's kernels.
    """
    here = context.context()
    seed, stream = here._seed, getattr(here, "_rng", None)
    if seed is not None:
        here._seed, here._rng = seed + 1_000_003, random.Random(seed)  # noqa: S311
    try:
        yield
    finally:
        if seed is not None:
            here._seed, here._rng = seed, stream


def _generators_of_keras2() -> Iterator[Any]:
    """Yields what `keras.utils.set_random_seed` of each Keras 2 seeds."""
    for keras in kerases.keras2():
        module = sys.modules[keras.backend.clear_session.__module__]
        seeds = getattr(module, "_SEED_GENERATOR", None)  # newer than TensorFlow 2.4
        generator = getattr(seeds, "generator", None)
        if generator is not None:
            yield generator


def _state_variables() -> Iterator[Any]:
    """Yields the states of TensorFlow's and of Keras 3's global generators."""
    generator = stateful_random_ops.global_generator
    if generator is not None:
        yield generator.state
    keras3 = _state_of_keras3()
    found = keras3 and keras3.get_global_attribute(_KERAS3)
    if found is not None:
        yield found.state


def _state_of_keras3() -> Any:
    """Returns the module that holds Keras 3's global objects, None without Keras 3."""
    return sys.modules.get("keras.src.backend.common.global_state")
