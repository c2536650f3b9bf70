"""Batches whose loss was not finite are named, as `fit` counts them, once per epoch."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf
from exact import heard
from faulty import ROWS, batches, told_by_fit, told_of
from models import data, has_ops, regression
from own_steps import looping

from lossscale import DynamicLossScale, LossScaleMonitor, LossScaleOptimizer
from lossscale.monitor import batches as of_batches

COUNTED = " Each of these steps counted as an overflow"


def monitor(**kwargs):
    return LossScaleMonitor(**{"verbose": 0, "patience": 100, **kwargs})


def run_of(steps, **faults):
    """Returns a run: `loss=[1, 3]` says at which steps there is such a fault."""
    run = [None] * steps
    for fault, numbers in faults.items():
        for number in numbers:
            run[number] = fault
    return run


def named(messages):
    """Returns of each message that names batches: how many steps, and which batches."""
    pattern = (
        r"(\d+) steps? w.* skipped because .* at batch(?:es)? ([\d, to]+| ?\d+ or l)"
    )
    found = [re.search(pattern, message) for message in messages]
    return [(int(each[1]), each[2].strip(" ,")) for each in found if each]


def test_they_are_named_with_what_they_cost(anywhere, capsys):
    run = run_of(12, data=[3, 7], gradient=[5], loss=[10])
    messages, history = told_by_fit(anywhere, run, monitor(verbose=1), epochs=2)
    first = next(each for each in messages if each.startswith("Epoch 1: "))
    said, cost = first.split(COUNTED)
    assert said == (
        "Epoch 1: 3 steps were skipped because the loss (mse) was NaN or inf before it "
        "was scaled, last at batches 3, 7, 10, counted from 0. These rows of the data "
        "hold inf or NaN, counted from 0: 31, 63, 87. Look at these rows, and repair "
        "them or leave them out."
    )
    assert ", though no loss scale is at fault: it was 2**10 when the epoch" in cost
    assert named(messages) == [(3, "3, 7, 10")] * 2
    assert history["nonfinite_losses"] == [3, 6]
    assert history["skipped_steps"] == [4, 8]
    line = capsys.readouterr().out
    assert "8 skipped in this fit; it is 4, and was read between" in line
    assert "Steps skipped for a loss that was not finite: 6." in line


def test_epochs_and_steps_are_those_of_fit(faulty):
    """It begins at another epoch, counters are not zero, and an epoch ends early."""
    faulty.reset(applied=1234)
    faulty.scale.skipped_steps.assign(77)
    dataset = tf.data.Dataset.from_tensor_slices(batches(run_of(10, data=[2, 6])))
    fitted = {"steps_per_epoch": 5, "initial_epoch": 3, "epochs": 5, "verbose": 0}
    with heard() as messages:
        faulty.model.fit(dataset.batch(ROWS).repeat(), callbacks=[monitor()], **fitted)
    assert named(messages) == [(1, "2"), (1, "1")]
    fourth, fifth = (each for each in messages if each.startswith("Epoch"))
    assert fourth.startswith("Epoch 4: ")
    assert fifth.startswith("Epoch 5: ")
    assert (
        "Look whether the data of that batch" in fourth
    )  # a data set is not looked at


#: How many steps, with which faults, how the monitor looks -> what is named.
LAST_16 = ", ".join(map(str, range(17, 33)))
RUNS = {
    "only the last ones": (40, {"data": range(3, 33)}, {}, [(30, LAST_16)]),
    "in the midst of an epoch": (9, {"data": [1, 2, 8]}, {"every": 3}, [(2, "1, 2")]),
    "not those of a stall": (9, {"data": [1, 6, 7, 8]}, {}, [(1, "1")]),
    "none of a dead run": (9, {"data": range(9)}, {}, []),
}


@pytest.mark.parametrize(
    ("count", "faults", "how", "expected"), RUNS.values(), ids=RUNS
)
def test_which_are_named(faulty, count, faults, how, expected):
    messages, _ = told_by_fit(faulty, run_of(count, **faults), monitor(**how))
    assert named(messages) == expected


def test_that_many_overflows_hide_which_they_were(faulty):
    run = run_of(30, data=[1], gradient=range(4, 24))
    first = told_by_fit(faulty, run, monitor())[0][0]
    assert "1 step was skipped because the loss (mse) was not finite before it" in first


@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize(
    ("count", "bad", "known", "unknown"),
    [
        (9, [8], "8", "8 or l"),
        (10, [1, 9], "0 to 3, 8 to 9", "0 to 3, 8 or l"),
        pytest.param(3, [2], "0 to 2", "0 or l", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("is_known", [True, False])
def test_no_batch_is_named_that_does_not_exist(
    family, in_fours, every, count, bad, known, unknown, is_known
):
    """Four batches run in a call, and the last call of an epoch runs those left."""
    x = tf.data.Dataset.from_tensor_slices(batches(run_of(count, data=bad))).batch(ROWS)
    fitted = {"epochs": 1, "verbose": 0}
    if not is_known:
        x = x.filter(lambda *_: True)
        if not has_ops(family.keras):  # Keras 2 wants to be told
            x, fitted["steps_per_epoch"] = x.repeat(), count
            unknown = known
    with heard() as messages:
        in_fours.model.fit(x, callbacks=[monitor(every=every)], **fitted)
    ((_, places),) = named(messages)
    if every is None:
        assert places == (known if is_known else unknown)
    else:
        assert max(map(int, re.findall("[0-9]+", places))) < count


#: A step of one's own: how it loops, rows that are NaN, batches in a call -> named.
LOOPS = {
    "two steps in a batch": ({"times": 2}, [20, 40], 1, (4, "5, 10")),
    "two, and four batches in a call": ({"times": 2}, [38], 4, (2, "8 to 11")),
    "three, of data without a length": ({"times": 3}, [25], 0, (3, "6")),
    "one in some batches": ({"only_positive": True}, [29], 1, (1, "7")),
}


@pytest.mark.parametrize(
    ("how", "bad", "at_once", "expected"), LOOPS.values(), ids=LOOPS
)
def test_steps_of_ones_own(family, how, bad, at_once, expected):
    model, (x, y) = looping(family, **how), data(np.random.default_rng(7), 48)
    x[::4, 0] = [-1, 1, -1, -1, 1, -1, -1, 1, 1, -1, 1, -1]
    y[bad] = np.nan
    if at_once > 1:
        model.compile(model.optimizer, loss="mse", steps_per_execution=at_once)
    given = (x, y)
    if not at_once:
        given = tf.data.Dataset.from_tensor_slices(given).batch(4)
        given = (given.filter(lambda *_: True), None)
    messages, _ = told_of(model, *given, monitor(), 4 if at_once else None)
    assert named(messages) == [expected]


def test_data_that_end_before_the_epoch_does(family):
    x, y = data(np.random.default_rng(7), 80)
    y[29] = np.nan  # batch 7 of 20
    given = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    with heard() as messages:
        model = looping(family)
        model.fit(given, steps_per_epoch=30, verbose=0, callbacks=[monitor()])
    assert named(messages) == [(1, "7")]


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
    assert named(messages) == [(2, "6, 10")]


def test_a_long_epoch_is_told_apart_as_far_as_is_kept(faulty, monkeypatch):
    monkeypatch.setattr(of_batches, "_MARKS", 4)
    messages, _ = told_by_fit(faulty, run_of(12, data=[7]), monitor())
    assert named(messages) == [(1, "4 to 7")]


def test_it_says_when_bad_losses_lower_a_loss_scale_that_ignores_them(family):
    """The tenth in a row counts, and one in each of two epochs: not one in five."""
    messages = []
    for numbers in (range(4, 14), [9]):
        inner = family.optimizers.SGD(0.0)
        optimizer = LossScaleOptimizer(
            inner, DynamicLossScale(2.0**10), nonfinite_loss="skip"
        )
        model = regression(family, optimizer)
        x, y = data(np.random.default_rng(7), 32)
        y[[*numbers]] = np.inf
        found, _ = told_of(model, x, y, monitor(every=4), rows=1, epochs=2)
        messages.append([each for each in found if "more than one in five" in each])
    said, nothing = messages
    assert nothing == []
    assert len(said) == 2
    assert "so 1 of them counted as an overflow: " in said[0]
    assert "scale was 2**10 when the epoch began, and is 512." in said[0]
    assert "scale was 512 when the epoch began, and is 256." in said[1]
    assert "hold inf or NaN, counted from 0: 4, 5, 6, 7, 8 and 5 more" in said[0]
