"""Trackers of experiments: what their callbacks store of LossScaleMonitor's logs."""

from __future__ import annotations

import json

import pytest
from faulty import Faulty
from installed import families

from lossscale import LossScaleMonitor

pytestmark = pytest.mark.slow
KEYS = ["headroom", "largest_gradient", "loss_scale", "skipped_steps"]
RUN = [None, "gradient", None]


def monitor():
    return LossScaleMonitor(every=1, check_underflow=True, verbose=0)


def fit_twice(callback):
    """Fits with the Keras that `import keras` gives: the trackers take that one."""
    Faulty(families()[0]).reset().fit(RUN, monitor(), callback, epochs=2)


def test_dvclive_stores_each_epoch(tmp_path, monkeypatch):
    dvclive = pytest.importorskip("dvclive.keras", reason="no dvclive")
    monkeypatch.chdir(tmp_path)
    options = {"save_dvc_exp": False, "dvcyaml": None}
    fit_twice(dvclive.DVCLiveCallback(dir=str(tmp_path / "live"), **options))
    found = json.loads((tmp_path / "live" / "metrics.json").read_text())["train"]
    assert [found["loss_scale"], found["skipped_steps"]] == [256.0, 2]
    assert found["largest_gradient"] > 0


def test_mlflow_stores_each_epoch(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="no MLflow")
    callbacks = pytest.importorskip("mlflow.keras.callback", reason="no mlflow.keras")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with mlflow.start_run() as run:
        fit_twice(callbacks.MlflowCallback())
    mlflow.flush_async_logging()
    history = mlflow.MlflowClient().get_metric_history
    values = {key: [m.value for m in history(run.info.run_id, key)] for key in KEYS}
    assert values["loss_scale"] == [512.0, 256.0]
    assert values["skipped_steps"] == [1.0, 2.0]
    assert values["largest_gradient"][-1] > 0


def test_wandb_stores_batches(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="no wandb")
    callbacks = pytest.importorskip("wandb.integration.keras", reason="no wandb")
    monkeypatch.chdir(tmp_path)
    with wandb.init(mode="offline", dir=str(tmp_path)) as run:
        fit_twice(callbacks.WandbMetricsLogger(log_freq=1))
        found = dict(run.summary)
    for kind in ("batch", "epoch"):
        assert found[f"{kind}/loss_scale"] == 256.0
        assert found[f"{kind}/skipped_steps"] == 2
        assert found[f"{kind}/largest_gradient"] > 0


def test_aim_stores_each_epoch(tmp_path, monkeypatch):
    callbacks = pytest.importorskip("aim.keras", reason="no Aim")
    monkeypatch.chdir(tmp_path)
    callback = callbacks.AimCallback(
        repo=str(tmp_path), system_tracking_interval=None, log_system_params=False
    )
    fit_twice(callback)
    (listed,) = callback.experiment.collect_sequence_info(("metric",)).values()
    callback.close()
    found = {each["name"]: each["values"] for each in listed}
    scales, skipped = found["loss_scale"], found["skipped_steps"]
    assert [scales["first"], scales["last"]] == [512.0, 256.0]
    assert [skipped["first"], skipped["last"]] == [1, 2]
    assert found["largest_gradient"]["last"] > 0
