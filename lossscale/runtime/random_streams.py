"""Keeps the random streams of this process as they are while something draws."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import Any, Iterator

import numpy as np
import tensorflow as tf

# Not public. Without it a seeded program draws other numbers after we drew.
from tensorflow.python.eager import context

_KERAS3 = "global_seed_generator"


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Restores the streams at the end: Python's, NumPy's, TensorFlow's and Keras 3's.

    The states of a model's own layers are not among them.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    # Keras 3's module of global objects, which is not public.
    keras3: Any = sys.modules.get("keras.src.backend.common.global_state")
    of_keras3 = None if keras3 is None else keras3.get_global_attribute(_KERAS3)
    variables = [] if of_keras3 is None else [of_keras3.state]
    # It creates the generator if there is none. If operations must be deterministic, it
    # does not.
    with contextlib.suppress(RuntimeError):
        variables.append(tf.random.get_global_generator().state)
    saved = [(variable, variable.numpy()) for variable in variables]
    # TensorFlow keeps the kernel of a random operation, with how far it has drawn, by
    # its seeds. With the seed of `tf.random.set_seed` we would draw from the user's
    # kernels.
    here = context.context()
    seed, stream = here._seed, getattr(here, "_rng", None)
    if seed is not None:
        here._seed, here._rng = seed + 1_000_003, random.Random(seed)  # noqa: S311
    try:
        yield
    finally:
        if seed is not None:
            here._seed, here._rng = seed, stream
        for variable, value in saved:
            variable.assign(value)
        if keras3 is not None and of_keras3 is None:
            keras3.set_global_attribute(_KERAS3, None)
        np.random.set_state(of_numpy)  # noqa: NPY002 - the user's stream
        random.setstate(of_python)
