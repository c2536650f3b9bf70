"""How many bad losses are ignored: the rule alone, beside one that sees every step."""

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from lossscale import DynamicLossScale, simulate
from lossscale.scales.ignored_losses import IgnoredLosses


def counted(run):
    """Returns which steps of a run count as overflows, from the rule in four lines.

    "N" is a step with a bad loss, "T" one that is applied, "O" an overflow.
    """
    level, found = 0, []
    for number, letter in enumerate(run):
        level = level + 4 if letter == "N" else max(level - (letter == "T"), 0)
        if level >= 40:
            level = 0
            found.append(number)
    return found


class Optimizer:
    """An optimizer's count of applied steps, and its level."""

    def __init__(self):
        self.applied_steps = tf.Variable(0, dtype=tf.int64)
        self.ignored_losses = IgnoredLosses(lambda: self.applied_steps)

    def counted(self, run):
        found = []
        for number, letter in enumerate(run):
            if letter == "T":
                self.applied_steps.assign_add(1)
            elif bool(self.ignored_losses.counts(tf.constant(letter == "N"))):
                found += [number] if letter == "N" else []
            elif letter == "O":
                raise AssertionError("an overflow always counts")
        return found


@settings(deadline=None)
@given(st.text("NNNTTTTTTO", max_size=150))
def test_it_counts_what_a_rule_says_that_looks_at_every_step(run):
    optimizer = Optimizer()
    assert optimizer.counted(run) == counted(run)
    assert optimizer.ignored_losses.counted.numpy() == len(counted(run))


RUNS = {
    "the tenth in a row": ("N" * 30, [9, 19, 29]),
    "nine are ignored": ("N" * 9 + "T" * 36 + "N" * 9, []),
    "nine, and nine more soon after": ("N" * 9 + "T" + "N" * 9, [11]),
    "one in ten": ("N" * 2 + "T" * 9 + ("N" + "T" * 9) * 40, []),
    "one in five": (("N" + "T" * 4) * 75, []),
    "one in four": (("N" + "T" * 3) * 75, list(range(36 * 4, 300, 37 * 4))),
    "every second": ("TN" * 45, [2 * n + 1 for n in (12, 25, 38)]),
    "overflows between them": ("NO" * 20, [18, 38]),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", RUNS)
def test_runs_that_programs_have_and_simulate_replays(name):
    run, expected = RUNS[name]
    assert counted(run) == expected
    assert Optimizer().counted(run) == expected
    scale = DynamicLossScale(2.0**100, 10**6)
    found = simulate(
        scale,
        is_finite=[letter == "T" for letter in run],
        bad_losses=[letter == "N" for letter in run],
        nonfinite_loss="skip",
    )
    halved = [n for n, letter in enumerate(run) if letter == "O" or n in expected]
    scales = [*found.loss_scale, found.final_loss_scale]
    assert [n for n in range(len(run)) if scales[n + 1] < scales[n]] == halved


def test_a_count_that_was_set_back_takes_nothing_away_and_adds_nothing():
    optimizer = Optimizer()
    optimizer.applied_steps.assign(1000)
    assert optimizer.counted("N" * 3) == []
    optimizer.applied_steps.assign(0)
    assert optimizer.counted("N" * 7) == [6]


def test_without_a_count_every_tenth_counts():
    ignored_losses = IgnoredLosses(lambda: tf.Variable(0))
    found = [bool(ignored_losses.counts(tf.constant(True))) for _ in range(20)]
    assert [n for n, counts in enumerate(found) if counts] == [9, 19]
