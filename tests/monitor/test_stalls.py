"""The rule by which a monitor speaks: driven by real loss scales, read now and then."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

from lossscale import DynamicLossScale, FixedLossScale, LossScale, LossScaleOptimizer
from lossscale.monitor.reading import Reading
from lossscale.monitor.watched import Watched
from lossscale.runtime import keras_versions


class Slow(LossScale):
    """It has no multiplier to reckon with."""

    def next_state(self, state, is_finite):
        del is_finite
        return {"current_loss_scale": tf.maximum(state.current_loss_scale - 1, 1)}

    def get_config(self):
        return {}


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


def high():
    return DynamicLossScale(2.0**20)


def fixed():
    return FixedLossScale(8, skip_nonfinite=True)


def slow_to_fall():
    return DynamicLossScale(2.0**4, hysteresis=2, hysteresis_reset=("backoff",))


@pytest.mark.parametrize(
    ("make", "run", "every", "expected"),
    [
        (high, "TFFTFFT", 1, []),
        (high, "TFFFFFF", 1, [4]),  # once
        (high, "TFFFTFFFF", 1, [4, 8]),  # and again after a good step
        (high, "TFFFTFFFF", 9, [9]),
        (high, "TFFFTFFTF", 3, []),
        (high, "TFFFFFFFF", 3, [6]),
        (high, "TFFFFFTFFFFF", 6, [6, 12]),  # the good step was between two readings
        # A scale that begins too high searches. Ten steps to fall, three in vain.
        *((high, "F" * 20 + "T" * 20, every, []) for every in (1, 5, 20)),
        (lambda: DynamicLossScale(2.0**10), "F" * 60, 1, [13]),
        (lambda: DynamicLossScale(2.0**10), "F" * 60, 5, [15]),
        (lambda: DynamicLossScale(2.0**10), "F" * 60, 60, [60]),
        (lambda: DynamicLossScale(2.0**30, min_loss_scale=2.0**10), "F" * 22, 2, []),
        (slow_to_fall, "F" * 10, 10, []),
        (slow_to_fall, "F" * 11, 11, [11]),
        (fixed, "F" * 9, 1, [3]),
        (fixed, "F" * 9, 9, [9]),
        # Nobody knows how a rule of one's own falls, so it has until the next reading.
        (lambda: Slow(8.0), "F" * 24, 12, [24]),
    ],
)
def test_patience_skipped_steps_in_a_row_are_told_of_once(make, run, every, expected):
    assert told(make(), run, every) == expected


@pytest.mark.parametrize("every", [1, 3, 4])
def test_a_loss_that_is_not_finite_itself_is_told_of_while_the_scale_falls(every):
    scale = DynamicLossScale(2.0**60)
    assert told(scale, "F" * 12, every, 10, loss_is_finite=False) == [max(every, 3)]
