"""LossScaleMonitor in `fit`: what it shows, and what it says, on every Keras."""

import csv
import re

import numpy as np
import pytest
import tensorflow as tf
from exact import warned
from faulty import FAULTS, Faulty, told_by_fit, told_of
from limits import skip_without
from models import FEATURES, backup_and_restore, build, data, regression

from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleMonitor,
    LossScaleOptimizer,
    SpikeGuard,
)
from lossscale.monitor import watched
from lossscale.runtime import keras_versions

ONES = np.ones([8, FEATURES], np.float32), np.ones([8, 1], np.float32)


def quiet_monitor(**kwargs):
    return LossScaleMonitor(**{"patience": 3, "verbose": 0, **kwargs})


# What it shows


def test_a_healthy_run_shows_its_loss_scale_and_says_nothing(
    family, rng, tmp_path, capsys
):
    x, y = data(rng)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(1e-3), DynamicLossScale(2**30))
    model = regression(family, optimizer, "mixed_float16")
    start, monitor = optimizer.loss_scale.numpy(), LossScaleMonitor()
    log = family.keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    with warned(0):
        fitted = model.fit(x, y, batch_size=4, epochs=3, callbacks=[monitor, log])
    printed = capsys.readouterr().out

    history = fitted.history
    scales, skipped = history["loss_scale"], history["skipped_steps"]
    assert not {"headroom", "largest_gradient"} & {*history}  # which nobody asked for
    assert [type(value) for value in (scales[0], skipped[0])] == [float, int]
    assert scales[-1] == float(optimizer.loss_scale) < start
    assert skipped[-1] == optimizer.loss_scale.skipped_steps.numpy() > 10
    with open(tmp_path / "log.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss_scale"]) for row in rows] == scales
    assert [int(row["skipped_steps"]) for row in rows] == skipped

    applied = int(optimizer.iterations.numpy())
    exponent = int(np.log2(scales[-1]))
    assert printed.splitlines()[-1] == (
        f"Loss scale: {applied} steps applied, {skipped[-1]} skipped in this fit; it "
        f"is 2**{exponent}, and was read between 2**{exponent} and 2**30."
    )
    assert applied + skipped[-1] == 48
    model.fit(x, y, batch_size=4, callbacks=[monitor], verbose=0)  # goes on
    assert "16 steps applied, 0 skipped" in capsys.readouterr().out


@pytest.mark.each_version
def test_a_tracker_behind_the_monitor_sees_numbers_and_one_before_it_none(family):
    class Tracker(family.keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            del logs
            self.batches, self.epochs = [], []

        def on_train_batch_end(self, batch, logs=None):
            del batch
            self.batches.append(dict(logs))

        def on_epoch_end(self, epoch, logs=None):
            del epoch
            self.epochs.append(dict(logs))

    faulty, before, behind = Faulty(family), Tracker(), Tracker()
    run, keys = [None, "gradient", None], {"headroom", "largest_gradient"}
    options = {"every": 1, "check_underflow": True}
    # A fit for each: Keras 2 converts logs once, for the first that wants numbers.
    faulty.reset().fit(run, quiet_monitor(**options), behind, epochs=2)
    faulty.reset().fit(run, before, quiet_monitor(**options), epochs=2)
    for logs in (*behind.batches, *behind.epochs):
        assert {type(logs[key]) for key in (*keys, "loss_scale")} == {float}
        assert type(logs["skipped_steps"]) is int
    assert [each["skipped_steps"] for each in behind.batches] == [0, 1, 1, 1, 2, 2]
    assert [each["loss_scale"] for each in behind.epochs] == [512.0, 256.0]
    assert behind.epochs[-1]["largest_gradient"] > 0
    for logs in before.batches:  # Keras 2.4's epochs begin with the last batch's logs
        assert not {*keys, "loss_scale", "skipped_steps"} & {*logs}


def test_a_spike_is_told_once_and_the_last_one_is_printed(family, rng, capsys):
    x, y = data(rng, 256)
    y[-32:-16] += 1e4  # the last but one of sixteen batches has wrong targets
    inner, guard = family.optimizers.SGD(2.0**-8), SpikeGuard(window=12)
    optimizer = LossScaleOptimizer(inner, DynamicLossScale(1.0), guard=guard)
    model = regression(family, optimizer)
    (message,), history = told_of(model, x, y, LossScaleMonitor(), 16, epochs=2)
    assert history["spikes"] == [1, 2]
    assert history["skipped_steps"] == [0, 0]
    assert message.startswith("A step was skipped as a spike, at batch 14, counted ")
    spike = optimizer.last_spike()
    size = f"with a gradient of {spike.largest:.3g} in {spike.name}, "
    line = capsys.readouterr().out
    assert "30 steps applied, 0 skipped in this fit; it is 1," in line
    assert f"Steps left out as spike: 2, the last {size}" in line
    assert f" times the limit of {spike.limit:.3g}." in line


def test_it_is_a_callback_of_every_keras_and_looks_at_no_batch_unasked():
    monitor = LossScaleMonitor()
    for keras in keras_versions.installed():
        assert isinstance(monitor, keras.callbacks.Callback)
        callbacks = keras.callbacks.CallbackList([monitor])
        # Before the end of a batch Keras 3 reads all metrics from the device.
        assert not getattr(callbacks, "_should_call_train_batch_end_hooks", False)
    # Keras 3.3 has no such mark.
    assert getattr(monitor.on_train_batch_end, "_is_default", True)


def test_accumulated_gradients_are_counted_by_the_batch(family, capsys):
    skip_without("gradient_accumulation_steps", family)
    inner = family.optimizers.SGD(1e-3, gradient_accumulation_steps=1000)
    optimizer = LossScaleOptimizer(inner, DynamicLossScale(2.0**40))
    x, y = data(np.random.default_rng(7), rows=24)
    y[4:] = np.nan  # all but the first of six batches
    monitor = LossScaleMonitor(patience=3, every=1)
    (first, _), _ = told_of(regression(family, optimizer), x, y, monitor)
    assert "1 step was skipped" in first
    assert "at batch 1, " in first
    line = capsys.readouterr().out
    unit = "(each a batch, with gradient_accumulation_steps=1000)"
    assert line.startswith(f"Loss scale: 1 steps applied, 5 skipped in this fit {unit}")
    assert int(optimizer.applied_steps.numpy()) == 1


# What it says


@pytest.mark.each_version
@pytest.mark.peer_defect(27)
def test_each_fault_is_named_once(anywhere):
    """The table has what is said of each; here of two replicas, and of many runs."""
    faults = [part for fault in FAULTS for part in (None, fault, fault, fault)]
    messages, _ = told_by_fit(anywhere, faults, quiet_monitor(patience=2, every=1))
    stalls = [text for text in messages if "in a row were" in text]
    for text, batch, scale in zip(stalls, (2, 6, 10), (256, 32, 4)):
        assert text.startswith(
            f"2 steps in a row were skipped, the last at batch {batch}, counted from "
            f"0. The loss scale is {scale}.\n  * "
        )
    overflow, infinite, nan = stalls
    assert "model's last ones first: first/bias (inf), first/kernel (inf)." in overflow
    # An overflow of a scale that can still fall is not blamed on the layer.
    assert "the loss scale falls to fit them." in overflow
    assert "The loss itself is inf" in infinite
    assert "The loss itself is NaN" in nan
    assert " and 1 more." in nan  # of six weights
    assert len([text for text in messages if text.startswith("Epoch 1: 1 step")]) == 1
    (of_statistics,) = [text for text in messages if "Non-trainable" in text]
    assert "norm/moving_variance (NaN), norm/moving_mean (NaN)" in of_statistics
    assert len(messages) == 5


# What it does


@pytest.fixture
def counted(monkeypatch):
    """Returns a list, which gets an entry each time that the monitor reads."""
    reads, read = [], watched.read

    def counting(optimizer):
        reads.append(optimizer)
        return read(optimizer)

    monkeypatch.setattr(watched, "read", counting)
    return reads


@pytest.mark.parametrize("good", [2, 40])
def test_on_stall_raise_needs_no_every(faulty, counted, good):
    monitor = quiet_monitor(on_stall="raise", patience=4)
    run = [None] * good + ["gradient"] * 60
    with pytest.raises(FloatingPointError, match=r"[4-7] steps in a row"):
        faulty.fit(run, monitor)
    # Once as it begins, and once in `patience` steps.
    skipped = int(faulty.scale.skipped_steps.numpy())
    assert 4 <= skipped < 8
    assert len(counted) == 1 + (good + skipped) // 4


def test_others_read_at_the_end_of_an_epoch_alone(faulty, counted):
    told_by_fit(faulty, ["gradient"] * 20, quiet_monitor())
    assert len(counted) == 3  # as it begins, at the epoch's end, and at the end


def test_on_stall_stop_stops_at_once(faulty):
    monitor = quiet_monitor(on_stall="stop", every=1)
    messages, history = told_by_fit(faulty, ["gradient"] * 9, monitor, epochs=2)
    assert len(messages) == 1
    assert history["skipped_steps"] == [3]


# What it refuses


def test_another_optimizer_is_refused_with_the_line_to_write(family, rng):
    model = regression(family, family.optimizers.SGD(0.1))
    line = r"\n\n    model.compile\(lossscale.LossScaleOptimizer\(optimizer\), ...\)\n"
    with pytest.raises(TypeError, match="(?s)model.optimizer.*SGD[^,]*" + line):
        told_of(model, *data(rng), LossScaleMonitor())
    family.keras.mixed_precision.set_global_policy("mixed_float16")
    model = regression(family, family.optimizers.SGD(0.1), "mixed_float16")
    if model.optimizer is None or not keras_versions.is_own_wrapper(model.optimizer):
        pytest.skip("this Keras has not wrapped it")
    with pytest.raises(TypeError, match=", Keras's own: under mixed_float16"):
        told_of(model, *data(rng), LossScaleMonitor())


def test_underflow_is_not_looked_for_where_nothing_is_looked_at(family):
    model = small(family, FixedLossScale(8))
    message = "`check_underflow` must be .* that does not look at the gradients"
    with pytest.raises(ValueError, match=message):
        told_of(model, *ONES, quiet_monitor(check_underflow=True))


def test_a_graph_of_tensorflow_1_is_refused(faulty):
    monitor = LossScaleMonitor()
    monitor.set_model(faulty.model)
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="v1 graph"):
        monitor.on_train_begin()


def small(family, loss_scale="dynamic"):
    """Returns a model in float32, where no finite gradient overflows, in eager mode.

    Its optimizer is built, as Keras 3's backups want it.
    """
    optimizer = LossScaleOptimizer(family.optimizers.SGD(2.0**-6), loss_scale)
    model = regression(family, optimizer, run_eagerly=True)
    build(optimizer, model.trainable_variables)
    return model


# Loops of your own


@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize("begins", [True, False])
def test_a_loop_may_leave_hooks_out(family, capsys, every, begins):
    model, monitor = small(family), LossScaleMonitor(every=every)
    monitor.set_model(model)
    if begins:
        monitor.on_train_begin()
    for epoch in range(2):
        logs = {}
        for batch in range(3):
            model.train_on_batch(*ONES)
            if every:
                monitor.on_train_batch_end(batch, logs)
        monitor.on_epoch_end(epoch, logs)
        assert (logs["loss_scale"], logs["skipped_steps"]) == (2.0**15, 0)
    monitor.on_train_end()
    applied = 5 if every else 3  # since the first hook
    line = f"Loss scale: {applied} steps applied, 0 skipped in this fit; it is 2**15, "
    assert line in capsys.readouterr().out


def test_a_monitor_that_saw_nothing_says_nothing(capsys):
    LossScaleMonitor().on_train_end()
    assert capsys.readouterr().out == ""


# Runs that have a backup


def test_a_stop_beside_a_backup_is_warned_of_when_training_begins(family, tmp_path):
    backup = backup_and_restore(family, tmp_path / "deleted")
    given = [("stop", backup), ("raise", backup)]
    if hasattr(backup, "delete_checkpoint"):
        kept = backup_and_restore(family, tmp_path / "kept", delete_checkpoint=False)
        given.append(("stop", kept))
    said = []
    for on_stall, beside in given:
        callbacks = [beside, quiet_monitor(on_stall=on_stall)]
        # Keras 2 cannot go on with a model whose backup is deleted.
        said.append(told_of(small(family), *ONES, None, callbacks=callbacks)[0])
    ((first,), *others) = said
    assert re.search(r"deletes its backup .*on_stall=\"raise\"", first)
    assert not any(others)


def test_a_run_that_raised_keeps_its_backup(family, tmp_path):
    model = small(family)
    bad = [np.full_like(each, np.inf) for each in model.get_weights()]
    spoiling = family.keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, _: epoch == 1 and model.set_weights(bad)
    )
    monitor = LossScaleMonitor(1, on_stall="raise", verbose=0)
    backup = backup_and_restore(family, tmp_path / "backup")
    with pytest.raises(FloatingPointError):
        model.fit(*ONES, epochs=4, verbose=0, callbacks=[monitor, spoiling, backup])
    assert (tmp_path / "backup").exists()
