"""Every route to disk: a run that is saved and resumed ends as one that never stopped.

A run of four epochs is interrupted after two, when every route has written it. What is
read back and trained for the other two must end in the same bits: weights, slots, the
loss scale, its counters. At the interruption good steps, bad steps and skipped steps
are all under way.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import tensorflow as tf
from interrupted import EPOCHS, HALF, checkpoint, fit, fresh, model_of, wrapped
from limits import skip_without
from models import assert_same, training_state

from lossscale import LossScaleOptimizer

#: Checkpoints and .keras files are in test_persistence.py, too, on every version.
pytestmark = pytest.mark.slow


def counters(optimizer):
    scale = optimizer.loss_scale
    return {v.name.split(":")[0]: v.numpy().item() for v in scale.variables}


def assert_equal_ends(model, state):
    assert counters(model.optimizer) == state[0]
    assert_same(training_state(model), state[1])


def manager(model, folder):
    return tf.train.CheckpointManager(checkpoint(model), str(folder), max_to_keep=2)


def backup(family, folder):
    callbacks = family.keras.callbacks
    # TensorFlow 2.4 to 2.7 have it under another name.
    home = callbacks if hasattr(callbacks, "BackupAndRestore") else None
    return (home or callbacks.experimental).BackupAndRestore(str(folder))


def each_epoch(family, path, **arguments):
    return family.keras.callbacks.ModelCheckpoint(str(path), **arguments)


def write_savedmodel(family, model, folder):
    if family.name == "keras3":
        tf.saved_model.save(model, str(folder))
    else:
        model.save(str(folder), save_format="tf")


def read_savedmodel(family, folder):
    variables = str(folder / "variables" / "variables")
    if family.name == "keras3":
        model = fresh(family)
        tf.train.Checkpoint(model).read(variables).expect_partial()
    else:
        model = family.keras.models.load_model(str(folder))
        model.load_weights(variables).expect_partial()
    return model


def read_checkpoint(family, folder):
    model = fresh(family)
    status = checkpoint(model).read(str(folder / "checkpoint"))
    status.assert_existing_objects_matched()
    return model


def read_newest(family, folder):
    model = fresh(family, built=True)
    assert manager(model, folder / "manager").restore_or_initialize()
    return model


def read_weights(family, path, built=True):
    model = fresh(family, built)
    model.load_weights(str(path))
    return model


def load(family, path):
    return family.keras.models.load_model(str(path))


#: Route -> (the feature in limits.py, how to read it).
ROUTES = {
    "checkpoint, before build": (None, read_checkpoint),
    "manager, after build": (None, read_newest),
    ".h5": ("an optimizer in an .h5 file", lambda f, d: load(f, d / "m.h5")),
    "SavedModel": (None, lambda f, d: read_savedmodel(f, d / "saved")),
    ".weights.h5": (
        "an optimizer in a .weights.h5 file",
        lambda f, d: read_weights(f, d / "m.weights.h5"),
    ),
    "weights, before build": (
        "weights in TensorFlow's format",
        lambda f, d: read_weights(f, d / "weights", built=False),
    ),
    # .keras files
    "ModelCheckpoint": (
        "an optimizer in a .keras file",
        lambda f, d: load(f, d / "each.keras"),
    ),
    "ModelCheckpoint, weights": (
        None,
        lambda f, d: read_weights(f, d / name_of_weights(f)),
    ),
}


def name_of_weights(family):
    """Returns the name that a file of weights has which holds the optimizer too."""
    return "each.weights.h5" if family.name == "keras3" else "each"


def write_all(family, model, folder):
    """Writes a model by each route that is no callback."""
    checkpoint(model).write(str(folder / "checkpoint"))
    manager(model, folder / "manager").save()
    model.save(str(folder / "m.h5"))
    model.save_weights(str(folder / "m.weights.h5"))
    if family.name != "keras3":
        model.save_weights(str(folder / "weights"))
    write_savedmodel(family, model, folder / "saved")


class StopError(Exception):
    """Stops a run."""


#: Family -> (the folder's holder, the counters at half of the run, the end's state).
_SAVED = {}


@pytest.fixture
def run(family):
    """Returns `_SAVED` of the family: one run for all tests."""
    if family.name not in _SAVED:
        _SAVED[family.name] = save(family)
    return _SAVED[family.name]


def save(family):
    """Trains, writes half of a run by every route, and trains it whole."""
    holder = tempfile.TemporaryDirectory()
    folder, half = Path(holder.name), {}

    class Stop(family.keras.callbacks.Callback):
        """Writes and stops between two epochs."""

        def on_epoch_begin(self, epoch, logs=None):
            del logs
            if epoch == HALF:
                write_all(family, self.model, folder)
                half.update(counters(self.model.optimizer))
                raise StopError

    callbacks = [
        backup(family, folder / "backup"),
        each_epoch(family, folder / "each.keras"),
        each_epoch(family, folder / name_of_weights(family), save_weights_only=True),
        Stop(),
    ]
    with pytest.raises(StopError):
        fit(model_of(family, wrapped(family)), 0, EPOCHS, *callbacks)
    whole = model_of(family, wrapped(family))
    fit(whole, 0, EPOCHS)
    return holder, half, (counters(whole.optimizer), training_state(whole))


def test_what_is_saved_is_not_what_a_new_one_has(family, run):
    new = counters(wrapped(family))
    for name in ("current_loss_scale", "good_steps", "bad_steps", "skipped_steps"):
        assert run[1][name] != new[name]
        if name != "good_steps":
            assert run[2][0][name] != run[1][name]


@pytest.mark.peer_defect(12)
@pytest.mark.parametrize("route", ROUTES)
def test_a_run_goes_on_from(family, run, route):
    feature, read = ROUTES[route]
    if feature is not None:
        skip_without(feature, family)
    holder, _, end = run
    model = read(family, Path(holder.name))
    assert isinstance(model.optimizer, LossScaleOptimizer)
    fit(model, HALF, EPOCHS)
    assert_equal_ends(model, end)


@pytest.mark.peer_defect(12)
def test_a_run_goes_on_with_backup_and_restore(family, run, tmp_path):
    holder, _, end = run
    folder = tmp_path / "backup"  # the callback removes it
    shutil.copytree(str(Path(holder.name) / "backup"), str(folder))
    model = fresh(family)
    fit(model, 0, EPOCHS, backup(family, folder))
    assert_equal_ends(model, end)
