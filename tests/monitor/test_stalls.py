"""The rule by which a monitor speaks: driven by real loss scales, read now and then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tensorflow as tf

from lossscale import DynamicLossScale, FixedLossScale, LossScale, LossScaleOptimizer
from lossscale.monitor.reading import Reading
from lossscale.monitor.watched import Watched
from lossscale.runtime import keras_versions


def told(loss_scale, run, every, patience=3, loss_is_finite=True):
    """Returns the steps after which a stall is told of, reading every so many."""
    inner = keras_versions.installed()[0].optimizers.SGD()
    watched = Watched(LossScaleOptimizer(inner, loss_scale), patience)
    watched.run, runs = SimpleNamespace(training=1), {None}
    found, applied, skipped, in_a_row = [], 0, 0, 0

    def reading():
        bad = 0 if loss_is_finite else in_a_row
        own = {"own": skipped, "nonfinite": skipped, "in_a_row": in_a_row}
        now = float(loss_scale), skipped, applied
        return Reading(*now, **own, bad_losses=bad)

    watched.begin(reading())
    for step, letter in enumerate(run, 1):
        loss_scale.adjust(letter == "T")
        applied += letter == "T"
        skipped += letter == "F"
        in_a_row = 0 if letter == "T" else in_a_row + 1
        if step % every == 0:
            watched.see(reading())
            if watched.is_stalled and watched.run_of_skips not in runs:
                runs.add(watched.run_of_skips)
                found.append(step)
    return found


@pytest.mark.parametrize(
    ("run", "every", "expected"),
    [
        ("TFFTFFT", 1, []),
        ("TFFFFFF", 1, [4]),  # once
        ("TFFFTFFFF", 1, [4, 8]),  # and again after a good step
        ("TFFFTFFFF", 9, [9]),
        ("TFFFTFFTF", 3, []),
        ("TFFFFFFFF", 3, [6]),
        ("TFFFFFTFFFFF", 6, [6, 12]),  # the good step was between two readings
    ],
)
def test_patience_skipped_steps_in_a_row_are_told_of_once(run, every, expected):
    assert told(DynamicLossScale(2.0**20), run, every) == expected


@pytest.mark.parametrize("floor", [1.0, 2.0**10])  # it is silent at the floor, too
@pytest.mark.parametrize("every", [1, 2, 5, 10, 20])
def test_a_search_is_silent(every, floor):
    loss_scale = DynamicLossScale(2.0**30, min_loss_scale=floor)
    assert told(loss_scale, "F" * 20 + "T" * 20, every) == []


@pytest.mark.parametrize(("every", "expected"), [(1, 13), (2, 14), (5, 15), (60, 60)])
def test_a_scale_stuck_at_its_floor_is_told_of(every, expected):
    # Ten steps to fall, three that no longer lower it.
    assert told(DynamicLossScale(2.0**10), "F" * 60, every) == [expected]


@pytest.mark.parametrize(("steps", "expected"), [(10, []), (11, [11])])
def test_hysteresis_takes_its_steps_to_fall(steps, expected):
    scale = DynamicLossScale(2.0**4, hysteresis=2, hysteresis_reset=("backoff",))
    assert told(scale, "F" * steps, steps) == expected


def test_a_scale_that_never_falls_does_not_search():
    scale = FixedLossScale(8, skip_nonfinite=True)
    assert told(scale, "F" * 9, 1) == [3]
    assert told(scale, "F" * 9, 9) == [9]


def test_another_rule_is_given_until_the_next_reading():
    class Slow(LossScale):  # no multiplier to reckon with
        def next_state(self, state, is_finite):
            del is_finite
            return {"current_loss_scale": tf.maximum(state.current_loss_scale - 1, 1)}

        def get_config(self):
            return {}

    scale = Slow(8.0)
    assert told(scale, "F" * 24, 12) == [24]


@pytest.mark.parametrize("every", [1, 3, 4])
def test_a_loss_that_is_not_finite_itself_is_told_of_while_the_scale_falls(every):
    scale = DynamicLossScale(2.0**60)
    assert told(scale, "F" * 12, every, 10, loss_is_finite=False) == [max(every, 3)]
