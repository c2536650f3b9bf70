"""Routes of `fit`: a run that is saved and resumed ends as one that never stopped.

A run of four epochs is interrupted after two, when each route has written it. What is
read back and trained for the other two must end in the same bits: weights, slots, the
loss scale, its counters. At the interruption good steps, bad steps and skipped steps
are all under way.
"""

from __future__ import annotations

import pytest
import tensorflow as tf
from installed import families
from interrupted import EPOCHS, HALF, fit, fresh
from limits import skip_without
from models import assert_same, checkpoint_of, scale_state, whole_state
from routes import backup_and_restore

from lossscale import LossScaleOptimizer

#: Files that a program writes itself are in test_histories.py and test_cut_runs.py.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=families(), ids=lambda family: family.name)
def family(request):
    """The kind of optimizers: all its tests read what one run has saved."""
    return request.param


def manager(model, folder):
    folder = str(folder / "manager")
    return tf.train.CheckpointManager(checkpoint_of(model), folder, max_to_keep=2)


def name_of_weights(family):
    """Returns the name that a file of weights has which holds the optimizer too."""
    return "each.weights.h5" if family.name == "keras3" else "each"


@pytest.fixture(scope="module")
def saved(family, tmp_path_factory):
    """Returns where half of a run is written by every route, and its end's state."""
    folder, half = tmp_path_factory.mktemp("saved"), {}

    class Stop(family.keras.callbacks.Callback):
        """Writes and stops between two epochs."""

        def on_epoch_begin(self, epoch, logs=None):
            del logs
            if epoch == HALF:
                manager(self.model, folder).save()
                half.update(scale_state(self.model.optimizer))
                raise InterruptedError

    each_epoch = family.keras.callbacks.ModelCheckpoint
    callbacks = [
        backup_and_restore(family, folder / "backup"),
        each_epoch(str(folder / "each.keras")),
        each_epoch(str(folder / name_of_weights(family)), save_weights_only=True),
        Stop(),
    ]
    with pytest.raises(InterruptedError):
        fit(fresh(family), 0, EPOCHS, *callbacks)
    whole = fresh(family)
    new = scale_state(whole.optimizer)
    fit(whole, 0, EPOCHS)
    end = scale_state(whole.optimizer)
    for name in ("current_loss_scale", "good_steps", "bad_steps", "skipped_steps"):
        assert half[name] != new[name]
        assert half[name] != end[name] or name == "good_steps"
    return folder, whole_state(whole)


def read_newest(family, folder):
    model = fresh(family, built=True)
    assert manager(model, folder).restore_or_initialize()
    return model


def read_weights(family, path):
    model = fresh(family, built=True)
    model.load_weights(str(path))
    return model


#: Route -> (the feature in limits.py, how to read it).
ROUTES = {
    "manager, after build": (None, read_newest),
    "ModelCheckpoint": (
        "an optimizer in a .keras file",
        lambda f, d: f.keras.models.load_model(str(d / "each.keras")),
    ),
    "ModelCheckpoint, weights": (
        None,
        lambda f, d: read_weights(f, d / name_of_weights(f)),
    ),
}


@pytest.mark.peer_defect(12)
@pytest.mark.parametrize("route", ROUTES)
def test_a_run_goes_on_from(family, saved, route):
    feature, read = ROUTES[route]
    if feature is not None:
        skip_without(feature, family)
    folder, end = saved
    model = read(family, folder)
    assert isinstance(model.optimizer, LossScaleOptimizer)
    fit(model, HALF, EPOCHS)
    assert_same(whole_state(model), end)


@pytest.mark.peer_defect(12)
def test_a_run_goes_on_with_backup_and_restore(family, saved):
    folder, end = saved
    model = fresh(family)
    # It removes the files then.
    fit(model, 0, EPOCHS, backup_and_restore(family, folder / "backup"))
    assert_same(whole_state(model), end)
