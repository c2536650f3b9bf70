"""A stand-in for `dvclive.keras`."""

from __future__ import annotations

import keras


class DVCLiveCallback(keras.callbacks.Callback):
    """Says whether the monitor is before it, and stores nothing."""

    def __init__(self, save_dvc_exp):
        del save_dvc_exp
        super().__init__()

    def on_epoch_end(self, epoch, logs=None):
        del epoch
        assert {"loss_scale", "skipped_steps"} <= {*logs}
