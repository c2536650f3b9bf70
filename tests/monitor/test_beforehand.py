"""What LossScaleMonitor says before training begins, and how a dying run goes on."""

from __future__ import annotations

import os

import numpy as np
import pytest
from exact import warned

from lossscale import (
    DynamicLossScale,
    LossScaleMonitor,
    LossScaleOptimizer,
    LossScaleWarning,
)


def small(family, loss_scale):
    """Returns a model and its optimizer, both built, as Keras 3's backups want them."""
    keras = family.keras
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = LossScaleOptimizer(family.optimizers.SGD(2.0**-6), loss_scale)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse", run_eagerly=True)
    return model, optimizer


def backup_of(family, folder, **kwargs):
    callbacks = family.keras.callbacks
    found = getattr(callbacks, "BackupAndRestore", None)
    found = found or callbacks.experimental.BackupAndRestore  # up to TensorFlow 2.7
    return found(str(folder), **kwargs)


def test_a_stop_beside_a_backup_is_warned_of_when_training_begins(family, tmp_path):
    x, y = np.ones([8, 2], np.float32), np.ones([8, 1], np.float32)

    def fit(*callbacks):  # Keras 2 cannot go on with a model whose backup is deleted
        model, _ = small(family, DynamicLossScale(64.0))
        model.fit(x, y, verbose=0, callbacks=list(callbacks))

    stop = LossScaleMonitor(on_stall="stop", verbose=0)
    with pytest.warns(
        LossScaleWarning, match=r"deletes its backup .*on_stall=\"raise\""
    ):
        fit(stop, backup_of(family, tmp_path / "a"))
    with pytest.warns(LossScaleWarning, match="deletes its backup"):
        fit(backup_of(family, tmp_path / "b"), stop)
    with warned(0):
        fit(stop)
        for on_stall in ("warn", "raise"):
            monitor = LossScaleMonitor(on_stall=on_stall, verbose=0)
            fit(monitor, backup_of(family, tmp_path / on_stall))
        if hasattr(backup_of(family, tmp_path / "c"), "delete_checkpoint"):
            kept = backup_of(family, tmp_path / "d", delete_checkpoint=False)
            fit(stop, kept)


def test_a_run_that_raised_goes_on_from_its_backup(family, tmp_path):
    class Poison(family.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            del logs
            if epoch == 1:
                weights = self.model.get_weights()
                self.model.set_weights([np.full_like(each, np.inf) for each in weights])

    model, _ = small(family, DynamicLossScale(64.0))
    x, y = np.ones([8, 2], np.float32), np.ones([8, 1], np.float32)
    poison, folder, epochs = Poison(), tmp_path / "backup", []
    monitor = LossScaleMonitor(1, on_stall="raise", verbose=0)
    backup = backup_of(family, folder)
    with pytest.raises(FloatingPointError):
        model.fit(x, y, epochs=4, verbose=0, callbacks=[monitor, poison, backup])
    assert os.path.exists(folder)

    again, fresh = small(family, DynamicLossScale(8.0))
    seen = family.keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, _: epochs.append(epoch)
    )
    monitor = LossScaleMonitor(verbose=0)
    callbacks = [monitor, backup_of(family, folder), seen]
    again.fit(x, y, epochs=3, verbose=0, callbacks=callbacks)
    assert epochs[0] == 1
    assert float(fresh.loss_scale) == 64.0
