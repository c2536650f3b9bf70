"""Two logical CPU devices, one strategy, and every Keras that is installed."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pytest
import tensorflow as tf

# TensorFlow reads the number of logical devices once, before the first op.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2,
)
# The machine's two cores run two tests at a time.
tf.config.threading.set_intra_op_parallelism_threads(1)

from lossscale import _keras  # noqa: E402 - after the devices are set

_STRATEGY = []


@pytest.fixture(scope="session")
def mirrored():
    """MirroredStrategy on two CPUs: one for all, a second breaks its collectives."""
    if not _STRATEGY:
        _STRATEGY.append(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    return _STRATEGY[0]


def families():
    """Returns each kind of optimizer that is installed, with what tests need of it."""
    found = []
    if _keras.keras3() is not None:
        keras = _keras.keras3()
        found.append(_family("keras3", keras, keras.optimizers))
    for keras in _keras.keras2():
        legacy = getattr(keras.optimizers, "legacy", None)
        found.append(_family("keras2-legacy", keras, legacy or keras.optimizers))
        new = _new_optimizers(keras)
        if new is not None:
            found.append(_family("keras2-new", keras, new))
    return found


def _new_optimizers(keras):
    if getattr(keras.optimizers, "legacy", None) is None:
        return None
    module = sys.modules[keras.mixed_precision.LossScaleOptimizer.__module__]
    adam = keras.optimizers.Adam
    is_new = issubclass(adam, module.LossScaleOptimizerV3.__mro__[2])
    return keras.optimizers if is_new else keras.optimizers.experimental


def _family(name, keras, optimizers):
    return SimpleNamespace(name=name, keras=keras, optimizers=optimizers)


@pytest.fixture(params=families(), ids=lambda family: family.name)
def family(request):
    """Keras 3, Keras 2's new optimizers, Keras 2's legacy ones: each that is here."""
    yield request.param
    request.param.keras.mixed_precision.set_global_policy("float32")


@pytest.fixture
def rng():
    return np.random.default_rng(7)
