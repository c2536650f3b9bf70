"""Each finding and each cause, called without a `fit`, and how often one is said."""

from __future__ import annotations

import itertools
import re

import pytest
from said import fixed, seen, skips, texts, watched, with_rooms

from lossscale import DynamicLossScale, FixedLossScale
from lossscale.monitor import causes, findings
from lossscale.monitor.asking import Finding, told
from lossscale.monitor.model import Data
from lossscale.monitor.reading import Reading

OF_TABLES = [*(row.find for row in findings.FINDINGS), *causes.CAUSES]


def test_each_function_of_the_tables_says_one_thing_where_it_is_true():
    found = texts()
    assert {find.__name__ for find in OF_TABLES} <= set(found)
    for name, said in found.items():
        assert len(said) == 1, name


@pytest.mark.parametrize("find", [row.find for row in findings.FINDINGS])
def test_nothing_is_said_of_a_healthy_run(find):
    w = watched(applied=9, largest=1.0)
    is_of_model = find in [r.find for r in findings.FINDINGS if r.of == "model"]
    assert list(find(w.run if is_of_model else w)) == []


#: What may be seen at a stall, in every combination.
SEEN = {
    "loss": (None, "nan", "inf"),
    "weights": (None, True),
    "accumulators": ({}, {"total": None}),
    "layer": (None, ("kernel", "bias")),
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
        for values in itertools.product(*SEEN.values()):
            found = {k: v for k, v in zip(SEEN, values) if v}
            stall = seen(w, **found)
            true = [cause for cause in causes.CAUSES if list(cause(stall))]
            assert true
            says = {cause: " ".join(cause(stall)) for cause in true}
            scale_is_blamed = causes.of_high_scale in true
            # It may not be told where something else is known.
            assert not (found and scale_is_blamed)
            if policy == "float32" and w.last.loss_scale < 2.0**64:
                assert not scale_is_blamed
                assert "float16's" not in "".join(says.values())
            if not applied:
                assert "learning rate" not in "".join(says.values())
            assert not ({causes.of_weights, causes.of_loss} <= set(true))


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


def test_few_bad_rows_are_not_the_cause_of_many_bad_steps():
    w = watched(applied=9, **skips(9, "nan", losses=9, bad_losses=9))
    for count, is_named in ((0, False), (8, False), (9, True)):
        w.run.data = Data(list(range(count)), False)
        (text,) = causes.of_loss(seen(w, loss="nan"))
        assert ("inf or NaN in the data, in rows" in text) == is_named


@pytest.mark.parametrize(
    ("room", "says"),
    [
        (29.5, "was 29 doublings below .* Only 11 of .* is 8, and could be 2\\*\\*28"),
        (200.0, r"Only 0 of .* could be 2\*\*127\."),
    ],
)
def test_what_a_loss_scale_could_be(room, says):
    (text,) = findings.underflow(with_rooms(room))
    assert re.search(says, text)


def test_a_scale_that_checks_nothing_is_not_looked_at_if_weights_are_finite():
    assert list(findings.unchecked_weights(watched(FixedLossScale(8)))) == []


@pytest.mark.parametrize(
    ("once_per", "expected"),
    [
        ("process", ["1.1"]),
        ("training", ["1.1", "2.1"]),
        ("epoch", ["1.1", "1.2", "2.1", "2.2"]),
        (None, ["1.1", "1.2", "2.1", "2.2"]),
    ],
)
def test_how_often_something_is_said(once_per, expected):
    w = watched()

    def find(w):
        yield f"{w.run.training}.{w.run.epochs}"

    def also(run):
        yield f"of {run.training}"

    row = Finding("look", "optimizer", once_per, find, tells=(also,))
    rows = [row, Finding("look", "model", None, also)]
    said = []
    for w.run.training in (1, 2):
        for w.run.epochs in (1, 2):
            for _ in range(2):
                said += [text for _, text in told(w.run, rows, "look")]
    alone = [text for text in said if text.startswith("of")]
    assert [text.split("\n")[0] for text in said if text not in alone] == expected
    assert all("\n  * of" in text for text in said if text not in alone)
    # What was told in the first is not said again, until it changes.
    assert alone == (["of 2"] if once_per == "process" else [])


def test_a_run_of_skips_is_told_of_once():
    w, said = watched(), []
    for total, in_a_row in ((3, 3), (4, 4), (8, 3), (9, 4)):
        now = {"loss_scale": 8.0, "applied": 9, **skips(total, "nan")}
        w.see(Reading(**{**now, "in_a_row": in_a_row}))
        w.run.epochs += 1
        said.append(len([*told(w.run, findings.FINDINGS, "look")]))
    assert said == [1, 0, 1, 0]
