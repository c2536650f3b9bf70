"""What the pages call of systems that need not be installed."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from types import ModuleType


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


#: Module -> its names, each module behind the one that it is in.
MODULES = {
    "wandb": {"init": begun},
    "wandb.integration": {},
    "wandb.integration.keras": {"WandbMetricsLogger": tracker},
}
