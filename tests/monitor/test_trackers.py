"""Trackers of experiments: what their callbacks store of LossScaleMonitor's logs."""

import json
from functools import partial

import pytest
from faulty import Faulty
from installed import families

from lossscale import LossScaleMonitor

pytestmark = pytest.mark.slow
KEYS = ["largest_gradient", "loss_scale", "skipped_steps"]
RUN = [None, "gradient", None]


def fit_twice(callback):
    """Fits with the Keras that `import keras` gives: the trackers take that one."""
    monitor = LossScaleMonitor(every=1, check_underflow=True, verbose=0)
    Faulty(families()[0]).reset().fit(RUN, monitor, callback, epochs=2)


def dvclive(folder):
    callbacks = pytest.importorskip("dvclive.keras", reason="no dvclive")
    options = {"save_dvc_exp": False, "dvcyaml": None}
    fit_twice(callbacks.DVCLiveCallback(dir=str(folder / "live"), **options))
    return json.loads((folder / "live" / "metrics.json").read_text())["train"]


def mlflow(folder):
    mlflow = pytest.importorskip("mlflow", reason="no MLflow")
    callbacks = pytest.importorskip("mlflow.keras.callback", reason="no mlflow.keras")
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    with mlflow.start_run() as run:
        fit_twice(callbacks.MlflowCallback())
    mlflow.flush_async_logging()
    history = mlflow.MlflowClient().get_metric_history
    return {key: history(run.info.run_id, key)[-1].value for key in KEYS}


def wandb(folder, kind="epoch"):
    wandb = pytest.importorskip("wandb", reason="no wandb")
    callbacks = pytest.importorskip("wandb.integration.keras", reason="no wandb")
    with wandb.init(mode="offline", dir=str(folder)) as run:
        fit_twice(callbacks.WandbMetricsLogger(log_freq=1))
        return {key: run.summary[f"{kind}/{key}"] for key in KEYS}


def aim(folder):
    callbacks = pytest.importorskip("aim.keras", reason="no Aim")
    options = {"system_tracking_interval": None, "log_system_params": False}
    callback = callbacks.AimCallback(repo=str(folder), **options)
    fit_twice(callback)
    (listed,) = callback.experiment.collect_sequence_info(("metric",)).values()
    callback.close()
    return {each["name"]: each["values"]["last"] for each in listed}


STORES = [dvclive, mlflow, wandb, partial(wandb, kind="batch"), aim]


@pytest.mark.parametrize("store", STORES)
def test_a_tracker_stores_what_the_monitor_logs(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = store(tmp_path)
    assert (found["loss_scale"], found["skipped_steps"]) == (256.0, 2)
    assert found["largest_gradient"] > 0
