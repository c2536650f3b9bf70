"""Functions that users put between `tape.gradient` and `apply_gradients`.

Each takes a gradient of shape `[3, 3]`, some the weight, too. Whatever comes out is
made a gradient of that shape in a way that hands any power of the loss scale on. Begin
with `run.py`, which puts them there.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import tensorflow as tf

from between.algebra import LINEAR_ALGEBRA
from between.arithmetic import ARITHMETIC
from between.control import CONTROL
from between.movements import MOVEMENTS
from between.quantization import QUANTIZATION
from between.reductions import REDUCTIONS
from between.signals import SIGNALS
from between.thresholds import FLAGS, THRESHOLDS, WITH_WEIGHT
from between.values import GRADIENT, SHAPE, WEIGHT

FUNCTIONS = {
    **ARITHMETIC,
    **WITH_WEIGHT,
    **THRESHOLDS,
    **FLAGS,
    **LINEAR_ALGEBRA,
    **REDUCTIONS,
    **MOVEMENTS,
    **SIGNALS,
    **CONTROL,
    **QUANTIZATION,
}


def call(name, gradient, weight):
    """Returns what a function of the table makes of a gradient."""
    arguments = (gradient, weight) if name in WITH_WEIGHT else (gradient,)
    return _fitted(FUNCTIONS[name](*arguments))


def _fitted(value):
    """Returns a tensor as a gradient of the weight: its values, or their sum."""
    value = tf.cast(value, tf.float32)
    if value.shape.rank is not None and value.shape.num_elements() == 9:
        return tf.reshape(value, SHAPE)
    return tf.reduce_sum(value) * tf.ones(SHAPE)


def bare(name, gradient):
    """Returns what a function makes of a gradient that no loss scale has seen."""
    return call(name, tf.constant(gradient), tf.constant(WEIGHT)).numpy()


@lru_cache(maxsize=None)
def names():
    """Returns the names of the functions that this TensorFlow has."""
    return [name for name in FUNCTIONS if _runs(name)]


def _runs(name):
    try:
        bare(name, GRADIENT)
    except Exception:
        return False
    return True


def degree(name):
    """Returns which power of a factor the result holds, None if there is no such."""
    at_one = bare(name, GRADIENT).astype(np.float64)
    found = []
    for exponent in (-10, 10, 20):
        at = bare(name, GRADIENT * np.float32(2.0**exponent))
        with np.errstate(all="ignore"):
            powers = np.log2(at / at_one) / exponent
        found += powers[(at != 0.0) | (at_one != 0.0)].tolist()
    if not np.all(np.isfinite(found)) or np.ptp(found or [0.0]) > 2e-3:
        return None
    return round(float(np.mean(found or [0.0])), 2) + 0.0
