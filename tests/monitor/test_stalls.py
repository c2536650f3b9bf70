"""The rule by which a monitor speaks: driven by real loss scales, read now and then."""

from __future__ import annotations

import pytest

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer
from lossscale.monitor.watched import Reading, Watched
from lossscale.optimizer.record import OwnSteps
from lossscale.runtime import kerases


def reading_of(loss_scale, skipped, in_a_row, applied, bad_losses=0):
    """Returns the reading of the only optimizer that a loss scale has."""
    own = OwnSteps(skipped, in_a_row, bad_losses)
    return Reading(float(loss_scale), skipped, applied, own)


def told(loss_scale, run, every, patience=3):
    """Returns the steps after which a stall is told of, reading every so many."""
    watched, found = watching(loss_scale, patience), []
    applied = in_a_row = skipped = 0

    def reading():
        return reading_of(loss_scale, skipped, in_a_row, applied)

    watched.begin(reading())
    for step, letter in enumerate(run, 1):
        loss_scale.adjust(letter == "T")
        applied += letter == "T"
        skipped += letter == "F"
        in_a_row = 0 if letter == "T" else in_a_row + 1
        if step % every == 0 and is_stall(watched, reading()):
            found.append(step)
    return found


def watching(loss_scale, patience):
    inner = kerases.installed()[0].optimizers.SGD()
    return Watched(LossScaleOptimizer(inner, loss_scale), "", patience)


def is_stall(watched, reading):
    watched.see(reading)
    return watched.is_stall()


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


def test_hysteresis_takes_its_steps_to_fall():
    loss_scale = DynamicLossScale(2.0**4, hysteresis=2, hysteresis_reset=("backoff",))
    assert told(loss_scale, "F" * 10, 10) == []
    loss_scale = DynamicLossScale(2.0**4, hysteresis=2, hysteresis_reset=("backoff",))
    assert told(loss_scale, "F" * 11, 11) == [11]


def test_a_scale_that_never_falls_does_not_search():
    scale = FixedLossScale(8, skip_nonfinite=True)
    assert told(scale, "F" * 9, 1) == [3]
    assert told(scale, "F" * 9, 9) == [9]


def test_another_rule_is_given_until_the_next_reading():
    class Slow(FixedLossScale):  # no multiplier to reckon with
        def _adjust(self, is_finite):
            del is_finite
            self.loss_scale_value = max(self.loss_scale_value - 1.0, 1.0)

    scale = Slow(8, skip_nonfinite=True)
    assert told(scale, "F" * 24, 12) == [24]


@pytest.mark.parametrize("every", [1, 3, 4])
def test_a_loss_that_is_not_finite_itself_is_told_of_while_the_scale_falls(every):
    loss_scale, found = DynamicLossScale(2.0**60), []
    watched = watching(loss_scale, 10)
    watched.begin(reading_of(2.0**60, 0, 0, 0))
    for step in range(1, 13):
        loss_scale.adjust(False)
        reading = reading_of(loss_scale, step, step, 0, bad_losses=step)
        if step % every == 0 and is_stall(watched, reading):
            found.append(step)
    assert found == [every if every > 3 else 3]  # once
