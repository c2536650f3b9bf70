"""Batches whose loss was not finite are named, as `fit` counts them, once per epoch."""

from __future__ import annotations

import csv
import re

import numpy as np
import pytest
import tensorflow as tf
from exact import heard
from faulty import ROWS, batches, scaled_gradients, told_by_fit, told_of
from models import data, has_ops, regression

import lossscale
from lossscale import DynamicLossScale, LossScaleMonitor, LossScaleOptimizer, SpikeGuard
from lossscale.monitor import reading

LOOK = ": look at these rows."


def monitor(**kwargs):
    return LossScaleMonitor(**{"verbose": 0, "patience": 100, **kwargs})


def named(messages):
    """Returns the messages that name batches."""
    return [message for message in messages if LOOK in message]


def run_of(steps, **faults):
    """Returns a run: `loss=[1, 3]` says at which steps there is such a fault."""
    run = [None] * steps
    for fault, numbers in faults.items():
        for number in numbers:
            run[number] = fault
    return run


def named_by_fit(faulty, run, watching, **kwargs):
    messages, history = told_by_fit(faulty, run, watching, **kwargs)
    return named(messages), history


def test_they_are_named_with_what_they_cost(anywhere, capsys):
    run = run_of(12, data=[3, 7], gradient=[5], loss=[10])
    messages, history = named_by_fit(anywhere, run, monitor(verbose=1), epochs=2)
    first, second = messages
    assert first == (
        "Epoch 1: 3 steps were skipped because the loss was NaN or inf before it was "
        f"scaled, last at batches 3, 7, 10, counted from 0{LOOK} "
        "Each of these steps counted as an overflow, though no loss scale is at fault: "
        "it was 2**10 when the epoch began, and is 64. LossScaleOptimizer(..., "
        'nonfinite_loss="skip") leaves it as it is at such steps.'
    )
    assert second.startswith("Epoch 2: 3 steps were skipped")
    assert "at batches 3, 7, 10, " in second
    assert history["nonfinite_losses"] == [3, 6]
    assert history["skipped_steps"] == [4, 8]
    line = capsys.readouterr().out
    assert "Steps skipped for a loss that was not finite: 6." in line


def test_epochs_and_steps_are_those_of_fit(faulty):
    """It begins at another epoch, counters are not zero, and an epoch ends early."""
    faulty.reset(applied=1234)
    faulty.scale.skipped_steps.assign(77)
    dataset = tf.data.Dataset.from_tensor_slices(batches(run_of(10, data=[2, 6])))
    fitted = {"steps_per_epoch": 5, "initial_epoch": 3, "epochs": 5, "verbose": 0}
    with heard() as messages:
        faulty.model.fit(dataset.batch(ROWS).repeat(), callbacks=[monitor()], **fitted)
    fourth, fifth = named(messages)
    assert fourth.startswith("Epoch 4: 1 step was skipped because the loss was NaN")
    assert "scaled, at batch 2, counted" in fourth
    assert fifth.startswith("Epoch 5: 1 step was skipped")
    assert "scaled, at batch 1, counted" in fifth


def test_only_the_last_ones_are_named(faulty):
    run = run_of(40, data=range(3, 33))
    (message,), history = named_by_fit(faulty, run, monitor())
    assert message.startswith("Epoch 1: 30 steps were skipped")
    listed = re.search("last at batches ([0-9, ]+), counted", message)[1]
    assert [*map(int, listed.split(", "))] == [*range(17, 33)]
    assert history["nonfinite_losses"] == [30]


def test_every_names_them_in_the_midst_of_an_epoch(faulty):
    run = run_of(9, data=[1, 2, 8])
    (message,), _ = named_by_fit(faulty, run, monitor(every=3))
    assert message.startswith("Epoch 1: 2 steps were skipped")
    assert "last at batches 1, 2, " in message


def test_between_which_batches_if_several_run_in_one_call(in_fours):
    run = run_of(8, data=[1, 6])
    (message,), _ = named_by_fit(in_fours, run, monitor(every=4))
    assert "1 step was skipped" in message
    assert "at batches 0 to 3, " in message
    (message,), _ = named_by_fit(in_fours, run, monitor())
    assert "last at batches 0 to 3, 4 to 7, " in message


def endless(run):
    """Returns the batches of a run as a dataset whose length nobody knows."""
    dataset = tf.data.Dataset.from_tensor_slices(batches(run)).batch(ROWS)
    return dataset.filter(lambda *_: True)


@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize(
    ("count", "bad", "places"),
    [
        (9, [8], "8"),
        (10, [1, 9], "0 to 3, 8 to 9"),
        pytest.param(3, [2], "0 to 2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("length", ["known", "unknown"])
def test_no_batch_is_named_that_does_not_exist(
    family, in_fours, every, count, bad, places, length
):
    """The last call of an epoch runs those that are left."""
    run = run_of(count, data=bad)
    x = endless(run)
    if length == "known":
        x = tf.data.Dataset.from_tensor_slices(batches(run)).batch(ROWS)
    validation = tf.data.Dataset.from_tensor_slices(batches([None] * 6)).batch(ROWS)
    fitted = {"validation_data": validation, "epochs": 2, "verbose": 0}
    if length == "unknown" and not has_ops(family.keras):
        # Keras 2 wants to be told.
        x, fitted["steps_per_epoch"] = x.repeat(), count
    with heard() as messages:
        watching = [monitor(every=every)]
        in_fours.model.fit(x, callbacks=watching, **fitted)
    listed = [
        re.search("at batch(?:es)? ([0-9, to]+), counted", m) for m in named(messages)
    ]
    if every is None:
        assert [each[1] for each in listed] == [places] * 2
    else:
        numbers = [n for each in listed for n in re.findall("[0-9]+", each[1])]
        assert max(map(int, numbers)) < count


def test_batches_of_two_steps_that_run_in_one_call(family):
    model = looping(family, times=2)
    model.compile(model.optimizer, loss="mse", steps_per_execution=4)
    x, y = data(np.random.default_rng(7), 40)
    y[38] = np.nan  # batch 9 of 10
    messages, _ = told_of(model, x, y, monitor())
    assert "last at batches 8 to 9, counted from 0" in named(messages)[0]


def test_an_epoch_that_begins_within(faulty):
    """Keras 2 resumes there; so does whoever calls the callback in a loop."""
    batches_of = reading.Batches(faulty.optimizer)
    batches_of.begin(6, 4)
    assert batches_of._end() == 10
    batches_of.begin(10, 4)
    assert batches_of._end() == 14


def accumulating(family, count):
    """Returns a model whose own `train_step` applies once in `count` batches."""

    class Accumulating(family.keras.Sequential):
        def train_step(self, batch):
            loss, grads = scaled_gradients(self, batch)
            for total, grad in zip(self.sums, grads):
                total.assign_add(grad)
            self.batch.assign_add(1)
            tf.cond(self.batch % count == 0, self.apply_sums, lambda: None)
            return {"loss": loss}

        def apply_sums(self):
            pairs = zip(map(tf.identity, self.sums), self.trainable_variables)
            self.optimizer.apply_gradients(list(pairs))
            for total in self.sums:
                total.assign(tf.zeros_like(total))

    optimizer = LossScaleOptimizer(family.optimizers.SGD(1e-3), DynamicLossScale(8.0))
    model = regression(family, optimizer, model_class=Accumulating)
    optimizer.build(model.trainable_variables)
    model.batch = tf.Variable(0, trainable=False)
    model.sums = [
        tf.Variable(tf.zeros(v.shape), trainable=False)
        for v in model.trainable_variables
    ]
    return model


def test_a_loop_that_accumulates_is_named_by_the_batch_that_applies(family):
    model = accumulating(family, 3)
    x, y = data(np.random.default_rng(7), 48)
    y[20] = np.nan
    messages, _ = told_of(model, x, y, monitor())
    for message in named(messages):  # if the loss is seen in the branch that applies
        assert "1 step was skipped" in message
        assert "at batch 5, " in message


def test_spikes_are_counted_among_the_steps_and_are_no_bad_losses(family, rng):
    x, y = data(rng, 256)
    y[192:208] += 1e4  # a spike
    y[224] = np.nan
    guard = SpikeGuard(DynamicLossScale(1.0), window=8)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(2.0**-8), guard)
    messages, _ = told_of(regression(family, optimizer), x, y, monitor(), 16)
    (message,) = named(messages)
    assert "1 step was skipped because the loss was NaN" in message
    assert "at batch 14, " in message
    _, last = optimizer.engine.record.skipped()
    assert last == [(12, "left out"), (14, "nan")]


def test_no_scale_to_lose_is_no_cost(family):
    scale = lossscale.FixedLossScale(8, skip_nonfinite=True)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(2.0**-8), scale)
    x, y = data(np.random.default_rng(7), 48)
    y[20] = np.nan
    messages, _ = told_of(regression(family, optimizer), x, y, monitor())
    (message,) = named(messages)
    assert message.endswith(LOOK)


def test_bad_losses_before_many_overflows_are_counted(faulty):
    run = run_of(30, data=[1], gradient=range(4, 24))
    (message,), _ = named_by_fit(faulty, run, monitor())
    assert message.startswith("Epoch 1: 1 step was skipped because the loss was")
    assert "the loss was not finite before it was scaled: look at these" in message


def test_csv_holds_them(family, faulty, tmp_path):
    log = family.keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    with heard():
        run = run_of(6, data=[2], gradient=[4])
        faulty.fit(run, monitor(), log, epochs=2)
    with open(tmp_path / "log.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["nonfinite_losses"]) for row in rows] == [1, 2]


class Loop:
    """What a `train_step` of one's own may do with the steps of a batch."""

    times, only_positive = 1, False


def looping(family, **how):
    """Returns a model whose batches have several steps, or none, as `Loop` says."""

    class Looping(Loop, family.keras.Sequential):
        def train_step(self, batch):
            for _ in range(self.times):
                loss, grads = scaled_gradients(self, batch)
                pairs = list(zip(grads, self.trainable_variables))

                def apply(pairs=pairs):
                    self.optimizer.apply_gradients(pairs)
                    return 0

                is_on = batch[0][0, 0] > 0.0
                if self.only_positive:
                    tf.cond(is_on, apply, lambda: 0)
                else:
                    apply()
            return {"loss": loss}

    inner = family.optimizers.SGD(2.0**-8)
    optimizer = LossScaleOptimizer(inner, DynamicLossScale(2.0**10))
    model = regression(family, optimizer, model_class=Looping)
    optimizer.build(model.trainable_variables)
    for name, value in how.items():
        setattr(model, name, value)
    return model


def test_two_steps_in_each_batch(family):
    x, y = data(np.random.default_rng(7), 48)
    y[[20, 40]] = np.nan
    (message,) = named(told_of(looping(family, times=2), x, y, monitor())[0])
    assert "4 steps were skipped" in message
    assert "last at batches 5, 10, " in message


def test_three_steps_in_a_batch_of_data_without_a_length(family):
    x, y = data(np.random.default_rng(7), 48)
    y[25] = np.nan  # batch 6 of 12
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    endless = batches.filter(lambda *_: True)
    with heard() as messages:
        looping(family, times=3).fit(endless, verbose=0, callbacks=[monitor()])
    (message,) = named(messages)
    assert "3 steps were skipped because the loss was NaN" in message
    assert "last at batch 6, counted from 0" in message


def test_a_step_that_applies_at_some_batches(family):
    x, y = data(np.random.default_rng(7), 48)
    x[::4, 0] = [-1, 1, -1, -1, 1, -1, -1, 1, 1, -1, 1, -1]
    y[29] = np.nan  # batch 7
    (message,) = named(told_of(looping(family, only_positive=True), x, y, monitor())[0])
    assert "1 step was skipped" in message
    assert "at batch 7, counted from 0" in message


def test_data_that_end_before_the_epoch_does(family):
    x, y = data(np.random.default_rng(7), 80)
    y[29] = np.nan  # batch 7 of 20
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    with heard() as messages:
        model = looping(family)
        model.fit(batches, steps_per_epoch=30, verbose=0, callbacks=[monitor()])
    (message,) = named(messages)
    assert "at batch 7, counted from 0" in message


def test_a_checkpoint_that_is_restored_within_an_epoch(family, tmp_path):
    model = looping(family)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    class Back(family.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            del logs
            if batch == 1:
                self.path = checkpoint.write(str(tmp_path / "checkpoint"))
            if batch in (4, 9):
                checkpoint.read(self.path)

    x, y = data(np.random.default_rng(7), 48)
    y[[26, 42]] = np.nan  # batches 6 and 10
    with heard() as messages:
        callbacks = [monitor(), Back()]
        model.fit(x, y, 4, verbose=0, shuffle=False, callbacks=callbacks)
    (message,) = named(messages)
    assert "Epoch 1: 2 steps were skipped" in message
    assert "last at batches 6, 10, counted from 0" in message


def test_a_long_epoch_is_told_apart_as_far_as_is_kept(faulty, monkeypatch):
    monkeypatch.setattr(reading, "_MARKS", 4)
    run = run_of(12, data=[7])
    (message,), _ = named_by_fit(faulty, run, monitor())
    assert "at batches 4 to 7, counted from 0" in message


def test_it_says_when_bad_losses_lower_a_loss_scale_that_ignores_them(family):
    """Of every second batch the 13th counts, and of three in 32 batches none does."""
    messages = []
    for numbers in (range(0, 32, 2), [2, 9, 20]):
        inner = family.optimizers.SGD(2.0**-10)
        scale = DynamicLossScale(2.0**10)
        optimizer = LossScaleOptimizer(inner, scale, nonfinite_loss="skip")
        model = regression(family, optimizer)
        x, y = data(np.random.default_rng(7), 32)
        y[[*numbers]] = np.inf
        found, _ = told_of(model, x, y, monitor(every=4), rows=1, epochs=2)
        messages.append([each for each in found if "in float32" in each])
    said, nothing = messages
    assert nothing == []
    assert len(said) == 2
    assert "so 1 of them counted as an overflow: " in said[0]
    assert "scale was 2**10 when the epoch began, and is 512." in said[0]
    assert "scale was 512 when the epoch began, and is 256." in said[1]
    assert "Compute the loss in float32" in said[0]
