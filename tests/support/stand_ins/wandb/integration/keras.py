"""A stand-in for `wandb.integration.keras`."""

from __future__ import annotations

import keras


class WandbMetricsLogger(keras.callbacks.Callback):
    """Says whether the monitor is before it, and stores nothing."""

    def __init__(self, log_freq):
        del log_freq
        super().__init__()

    def on_epoch_end(self, epoch, logs=None):
        del epoch
        assert {"loss_scale", "skipped_steps"} <= {*logs}

    def on_train_batch_end(self, batch, logs=None):
        del batch
        assert {"loss_scale", "skipped_steps"} <= {*logs}
