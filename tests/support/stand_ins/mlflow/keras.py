"""A stand-in for `mlflow.keras`."""

from __future__ import annotations

import keras


class MlflowCallback(keras.callbacks.Callback):
    """Says whether the monitor is before it, and stores nothing."""

    def on_epoch_end(self, epoch, logs=None):
        del epoch
        assert {"loss_scale", "skipped_steps"} <= {*logs}
