"""Each finding and each cause, called without a `fit`, and how often one is said."""

import itertools
import math
import re

import pytest
import tensorflow as tf
from said import fixed, recompiled, skips, texts, watched, with_room

from lossscale import DynamicLossScale, FixedLossScale
from lossscale.monitor import causes, findings
from lossscale.monitor.asking import Finding, told
from lossscale.monitor.model import Data
from lossscale.monitor.reading import Reading
from lossscale.monitor.watched import Run, Watched

OF_TABLES = [*(row.find for row in findings.FINDINGS), *causes.CAUSES]


def test_each_function_of_the_tables_says_one_thing_where_it_is_true():
    found = texts()
    assert {find.__name__ for find in OF_TABLES} <= set(found)
    for name, said in found.items():
        assert len(said) == 1, name


@pytest.mark.parametrize("row", findings.FINDINGS, ids=lambda row: row.find.__name__)
def test_nothing_is_said_of_a_healthy_run(row):
    for scale in (None, FixedLossScale(8)):
        w = watched(scale, applied=9, largest=1.0)
        assert list(row.find(w.run if row.of == "model" else w)) == []


def test_a_step_of_ones_own_need_not_use_the_optimizer_that_is_compiled():
    assert list(findings.replaced(recompiled(applied=9))) == []


#: What may be seen at a stall, in every combination.
SEEN = {
    "bad_loss": (None, "nan", "inf"),
    "bad_weights": ((), True),
    "bad_sums": ({}, {"total": None}),
    "bad_layer": (None, ("kernel", "bias")),
}
SCALES = (
    lambda: DynamicLossScale(8.0),
    lambda: DynamicLossScale(1.0),
    lambda: DynamicLossScale(8.0, min_loss_scale=8.0),
    lambda: DynamicLossScale(2.0**70),
    lambda: DynamicLossScale(0.5, min_loss_scale=2.0**-24),
    fixed,
    lambda: fixed(1.0),
)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_in_whatever_order_causes_are_asked_all_that_are_true_stay_true(policy):
    """Each has its own condition: the order only decides which is told first."""
    for make, applied in itertools.product(SCALES, (0, 9)):
        w = watched(make(), policy=policy, applied=applied)
        w.faults = [(w.run.model.trainable_weights[0], "nan")]
        for values in itertools.product(*SEEN.values()):
            vars(w).update(zip(SEEN, values))
            w.bad_weights = w.faults if w.bad_weights else ()
            says = {cause: " ".join(cause(w)) for cause in causes.CAUSES}
            true = {cause for cause, text in says.items() if text}
            assert true
            # The loss scale may not be blamed where something else is known.
            assert not (any(values) and causes.of_high_scale in true)
            if policy == "float32" and w.last.loss_scale < 2.0**64:
                assert causes.of_high_scale not in true
                assert "float16's" not in "".join(says.values())
            if not applied:
                assert "learning rate" not in "".join(says.values())
            assert not {causes.of_weights, causes.of_loss} <= true


@pytest.mark.parametrize(
    ("rows", "is_shuffled", "says"),
    [
        ([4, 7], True, "These rows of the data hold inf or NaN, counted from 0: 4, 7."),
        (list(range(8)), False, ": 0, 1, 2, 3, 4 and 3 more."),
        ([], False, "^The data are finite: .* names the layer.$"),
        ([], True, "^The data are finite: .* shuffle=False keeps them.$"),
        (None, False, "^Look whether the data .* names the layer.$"),
        (None, True, "^Look whether the data .* shuffle=False keeps them.$"),
    ],
)
def test_where_to_look(rows, is_shuffled, says):
    w = watched()
    w.run.data = Data(rows, is_shuffled)
    assert re.search(says, causes.what_to_look_at(w))


@pytest.mark.parametrize(
    ("before", "rows", "is_named"),
    [(0, 0, False), (0, 8, False), (0, 9, True), (4, 5, True), (4, 4, False)],
)
def test_few_bad_rows_are_not_the_cause_of_many_bad_steps(before, rows, is_named):
    """Nine bad steps in a row, of which some were before this epoch."""
    w = watched(applied=9, **skips(9, "nan", losses=9, bad_losses=9))
    w.epoch_began = w.epoch_began._replace(own=before)
    w.bad_loss, w.run.data = "nan", Data(list(range(rows)), False)
    (text,) = causes.of_loss(w)
    assert ("inf or NaN in the data, in rows" in text) == is_named
    w.run.data = Data(None, False)  # nobody knows them
    assert "inf or NaN in the data;" in "".join(causes.of_loss(w))


@pytest.mark.parametrize(
    ("room", "says"),
    [
        (29.5, "was 29 doublings below .* Only 11 of .* is 8, and could be 2\\*\\*28"),
        (200.0, r"Only 0 of .* could be 2\*\*127\."),
    ],
)
def test_what_a_loss_scale_could_be(room, says):
    (text,) = findings.underflow(with_room(room))
    assert re.search(says, text)


@pytest.mark.parametrize(
    ("once_per", "expected"),
    [
        ("process", ["1.1"]),
        ("training", ["1.1", "2.1"]),
        ("epoch", ["1.1", "1.2", "2.1", "2.2"]),
    ],
)
def test_how_often_something_is_said(once_per, expected):
    w, said = watched(), []

    def find(w):
        yield f"{w.run.training}.{w.run.epochs}"

    rows = [Finding("look", "optimizer", once_per, find)]
    for w.run.training in (1, 2):
        for w.run.epochs in (1, 2):
            for _ in range(2):
                said += [text for _, text in told(w.run, rows, "look")]
    assert said == expected
    assert list(told(w.run, rows, "begin")) == []


def test_of_bad_losses_whose_batch_is_unknown_a_stall_tells_alone():
    for in_a_row, times in ((2, 1), (9, 0)):
        read = skips(19, "nan", losses=19, bad_losses=in_a_row)
        w = watched(applied=9, **{**read, "in_a_row": 0})
        assert len([*findings.bad_losses(w)]) == times


def test_each_look_looks_at_the_weights_again():
    stub = watched(applied=9)
    w = Watched(stub.optimizer, patience=2)
    Run(stub.run.monitor, [w]).begin()
    for value in (1.0, math.nan, 1.0):
        w.run.model.trainable_weights[0].assign(tf.fill([6, 8], value))
        w.see(stub.last)
        assert len([*causes.of_weights(w)]) == math.isnan(value)


def test_a_run_of_skips_is_told_of_once():
    w, said = watched(), []
    for total, in_a_row in ((3, 3), (4, 4), (8, 3), (9, 4)):
        now = {"loss_scale": 8.0, "applied": 9, **skips(total, "nan")}
        w.see(Reading(**{**now, "in_a_row": in_a_row}))
        w.run.epochs += 1
        said.append(len([*told(w.run, findings.FINDINGS, "look")]))
    assert said == [1, 0, 1, 0]
