"""What tests run on: logical CPU devices, a strategy over them, every Keras installed.

Import it before anything asks TensorFlow for its devices.
"""

import os
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

#: The folder that holds tests/, docs/, examples/, benchmarks/ and README.md.
ROOT = Path(__file__).parents[2]
#: The strategy of this process's tests, and its replicas. Slow tests start processes
#: with others: TensorFlow takes one strategy and one number of devices per process.
STRATEGY, _, _REPLICAS = os.environ.get("LOSSSCALE_TESTS_ON", "mirrored:2").partition(
    ":"
)
DEVICES = [f"CPU:{number}" for number in range(int(_REPLICAS))]

# TensorFlow reads the number of logical devices once, before the first op.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * len(DEVICES),
)
# The machine's two cores run two tests at a time. Processes that tests start know it,
# too.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

# A strategy's replicas are threads at each call or trace. TensorFlow looks at once
# whether they have ended, often too early, and then again a second later.
_wait_for_stop = tf.train.Coordinator.wait_for_stop
tf.train.Coordinator.wait_for_stop = lambda self, timeout=None: _wait_for_stop(
    self, timeout and min(timeout, 0.002)
)

from lossscale.runtime import keras_versions  # noqa: E402 - after the devices are set

keras_versions.imported("tf_keras")  # which the library leaves to those who use it


def make_strategy():
    """Returns a new strategy over all devices."""
    if STRATEGY == "central":
        return tf.distribute.experimental.CentralStorageStrategy(DEVICES, "CPU:0")
    return tf.distribute.MirroredStrategy(DEVICES)


def families():
    """Returns each kind of optimizer that is installed, with what tests need of it."""
    found = []
    if keras_versions.keras3() is not None:
        found.append(
            ("keras3", keras_versions.keras3(), keras_versions.keras3().optimizers)
        )
    for keras in keras_versions.keras2():
        legacy = getattr(keras.optimizers, "legacy", None)
        found.append(("keras2-legacy", keras, legacy or keras.optimizers))
        if legacy is not None:
            (_, _, base), _ = keras_versions.generations(keras)
            is_new = issubclass(keras.optimizers.Adam, base)
            new = keras.optimizers if is_new else keras.optimizers.experimental
            found.append(("keras2-new", keras, new))
    return [
        SimpleNamespace(name=name, keras=keras, optimizers=optimizers)
        for name, keras, optimizers in found
    ]


def each_keras():
    """Returns one family of each Keras, for tests in which optimizers have no part."""
    return list({family.keras: family for family in families()}.values())
