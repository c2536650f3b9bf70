"""What the pages call of systems that need not be installed, with one worker each.

Horovod as 0.28.1 is: gradients are added up where an optimizer computes them, and in
its tape's `gradient`. Of one worker the sum is what it has.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from types import ModuleType

import tensorflow as tf


def install():
    """Puts what is needed in the place of each system that is not installed."""
    systems = {name.partition(".")[0] for name in MODULES}
    missing = {name for name in systems if importlib.util.find_spec(name) is None}
    for name, names in MODULES.items():
        above, _, last = name.rpartition(".")
        if name.partition(".")[0] in missing:
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(names)
            if above:
                setattr(sys.modules[above], last, sys.modules[name])


def nothing(*args, **kwargs):
    """Does nothing."""
    del args, kwargs


def begun(mode):
    """Begins a run of a tracker, of which nothing is kept."""
    assert mode == "offline"
    return contextlib.nullcontext()


def tracker(**settings):
    """Returns a callback that stores nothing, but asks for what the monitor logs."""
    import keras

    class Tracker(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            del epoch
            assert {"loss_scale", "skipped_steps"} <= {*logs}

        def on_train_batch_end(self, batch, logs=None):
            if "log_freq" in settings:
                self.on_epoch_end(batch, logs)

    return Tracker()


def allreduce(tensor):
    """Returns the mean over all workers."""
    return tf.identity(tensor)


class DistributedGradientTape:
    """Adds up what a tape computes. Horovod asks for variables of TensorFlow."""

    def __init__(self, tape):
        self._tape = tape

    def gradient(self, target, sources):
        """Returns the mean gradients over all workers."""
        for source in sources:
            source.ref()  # which Horovod calls, and Keras 3's variables do not have
        return [allreduce(grad) for grad in self._tape.gradient(target, sources)]


def DistributedOptimizer(optimizer):  # noqa: N802 - Horovod's name
    """Returns the optimizer as one that adds up where it computes gradients.

    As Horovod's: a class that is made here, of the optimizer's own, from its config.
    """
    base = type(optimizer)

    def adding_up(name):
        def compute(self, *args, **kwargs):
            pairs = getattr(base, name)(self, *args, **kwargs)
            return [(allreduce(grad), variable) for grad, variable in pairs]

        return compute

    # Legacy optimizers have the first, new ones the second.
    names = ["_compute_gradients", "compute_gradients"]
    methods = {name: adding_up(name) for name in names if hasattr(base, name)}
    return type(base.__name__, (base,), methods).from_config(optimizer.get_config())


#: Module -> its names, each module behind the one that it is in.
MODULES = {
    "horovod": {},
    "horovod.tensorflow": {
        "DistributedGradientTape": DistributedGradientTape,
        "init": nothing,
    },
    "horovod.tensorflow.keras": {
        "DistributedOptimizer": DistributedOptimizer,
        "init": nothing,
    },
    "wandb": {"init": begun},
    "wandb.integration": {},
    "wandb.integration.keras": {"WandbMetricsLogger": tracker},
}
