"""Batches whose loss was not finite are named, as `fit` counts them, once per epoch."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from exact import heard
from faulty import ROWS, batches, scaled_gradients, told_by_fit, told_of
from models import data, regression

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
    pattern = r"(\d+) steps? w.* skipped because .* at batch(?:es)? ([\d, to]+)"
    found = [re.search(pattern, message) for message in messages]
    return [(int(each[1]), each[2].strip(" ,")) for each in found if each]


def test_they_are_named_with_what_they_cost(anywhere, capsys):
    run = run_of(12, data=[3, 7], gradient=[5], loss=[10])
    messages, history = told_by_fit(anywhere, run, monitor(verbose=1), epochs=2)
    first = next(each for each in messages if each.startswith("Epoch 1: "))
    said, cost = first.split(COUNTED)
    assert said == (
        "Epoch 1: 3 steps were skipped because the loss was NaN or inf before it was "
        "scaled, last at batches 3, 7, 10, counted from 0. These rows of the data hold "
        "inf or NaN, counted from 0: 31, 63, 87. Look at these rows, and repair them "
        "or leave them out."
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
    epochs = [each[:8] for each in messages if each.startswith("Epoch")]
    assert epochs == ["Epoch 4:", "Epoch 5:"]


#: How many steps, with which faults, how the monitor looks -> what is named.
LAST_16 = ", ".join(map(str, range(17, 33)))
RUNS = {
    "only the last ones": (40, {"data": range(3, 33)}, {}, [(30, LAST_16)]),
    "in the midst of an epoch": (9, {"data": [1, 2, 8]}, {"every": 3}, [(2, "1, 2")]),
    "not those of a stall": (9, {"data": [1, 6, 7, 8]}, {}, [(1, "1")]),
    "none of a dead run": (9, {"data": range(9)}, {}, []),
    "overflows hide them": (30, {"data": [1], "gradient": range(4, 24)}, {}, []),
}


@pytest.mark.parametrize(
    ("count", "faults", "how", "expected"), RUNS.values(), ids=RUNS
)
def test_which_are_named(faulty, count, faults, how, expected):
    messages, _ = told_by_fit(faulty, run_of(count, **faults), monitor(**how))
    assert named(messages) == expected
    if faults.get("gradient"):
        assert "1 step was skipped because the loss was not finite" in messages[0]


@pytest.mark.parametrize(
    ("begun", "size", "count", "bad", "expected"),
    [
        ([0, 1, 2], 1, None, [0, 2], "batches 0, 2"),
        ([0, 1, 2], 1, None, [], ""),
        # Four run in a call, and the last call of an epoch runs those left.
        ([0, 4, 8], 4, 9, [8], "batch 8"),
        ([0, 4, 8], 4, 10, [1, 9], "batches 0 to 3, 8 to 9"),
        ([0, 4, 8], 4, None, [1, 9], "batches 0 to 3, 8 or later"),
        ([0], 4, None, [2], "batch 0 or later"),
        ([0, 4], 4, 16, [5], "batches 4 to 7"),  # in the midst of an epoch
        # Of many, as far as they are told apart.
        (range(12), 1, 12, [7], "batches 4 to 7"),
    ],
)
def test_no_batch_is_named_that_does_not_exist(
    monkeypatch, begun, size, count, bad, expected
):
    """A step of each batch is skipped if it is bad, and the counts tell where."""
    monkeypatch.setattr(of_batches, "_MARKS", 4)
    now = [0]
    record = SimpleNamespace(counts=lambda: tf.constant([now[0]]))
    engine = SimpleNamespace(record=record)
    found = of_batches.Batches(SimpleNamespace(engine=engine), count)
    for batch in begun:
        now[0] = sum(number < batch for number in bad)
        found.begin(batch, size)
    expected = expected and f", at {expected}, counted from 0"
    assert found.where(range(len(bad))) == expected


def looping(family, *, times=1, only_positive=False):
    """Returns a model whose batches have several steps, or one if an input is."""

    class Looping(family.keras.Sequential):
        def train_step(self, batch):
            for _ in range(times):
                loss, grads = scaled_gradients(self, batch)
                pairs = list(zip(grads, self.trainable_variables))

                def apply(pairs=pairs):
                    self.optimizer.apply_gradients(pairs)
                    return 0

                if only_positive:
                    tf.cond(batch[0][0, 0] > 0.0, apply, lambda: 0)
                else:
                    apply()
            return {"loss": loss}

    inner, scale = family.optimizers.SGD(2.0**-8), DynamicLossScale(2.0**10)
    optimizer = LossScaleOptimizer(inner, scale)
    model = regression(family, optimizer, model_class=Looping)
    optimizer.build(model.trainable_variables)
    return model


#: A step of one's own: how it loops, rows that are NaN, batches in a call -> named.
LOOPS = {
    "two steps in a batch": ({"times": 2}, [20, 40], 1, (4, "5, 10")),
    "two, and four batches in a call": ({"times": 2}, [38], 4, (2, "8 to 11")),
    "one in some batches": ({"only_positive": True}, [29], 1, (1, "7")),
}


@pytest.mark.parametrize(
    ("how", "bad", "at_once", "expected"), LOOPS.values(), ids=LOOPS
)
def test_steps_of_ones_own(family, how, bad, at_once, expected):
    model, (x, y) = looping(family, **how), data(np.random.default_rng(7), 48)
    x[::4, 0] = [-1, 1, -1, -1, 1, -1, -1, 1, 1, -1, 1, -1]
    y[bad] = np.nan
    model.compile(model.optimizer, loss="mse", steps_per_execution=at_once)
    messages, _ = told_of(model, x, y, monitor())
    assert named(messages) == [expected]


@pytest.mark.parametrize(("bad", "scales"), [(range(4, 14), [512, 256]), ([9], [])])
def test_it_says_when_bad_losses_lower_a_loss_scale_that_ignores_them(
    family, bad, scales
):
    """The tenth in a row counts, and one in each of two epochs: not one in five."""
    scale = DynamicLossScale(2.0**10)
    inner = family.optimizers.SGD(0.0)
    model = regression(family, LossScaleOptimizer(inner, scale, nonfinite_loss="skip"))
    x, y = data(np.random.default_rng(7), 32)
    y[[*bad]] = np.inf
    found, _ = told_of(model, x, y, monitor(every=4), rows=1, epochs=2)
    said = [each for each in found if "more than one in five" in each]
    assert len(said) == len(scales)
    for text, lowered in zip(said, scales):
        assert "so 1 of them counted as an overflow: " in text
        assert f"when the epoch began, and is {lowered}." in text
