"""SpikeGuard against its rule in plain Python, and what it refuses."""

import math

import numpy as np
import pytest
import tensorflow as tf

from lossscale import DynamicLossScale, FixedLossScale, SpikeGuard
from lossscale.scales.adjustment import adjust_to_step

MAX = float(np.finfo(np.float32).max)


def reference(rule, run):
    """Yields whether each step is applied, and the state after it, in plain Python.

    The loss scale beside it doubles and halves.
    """
    window, threshold, max_in_a_row, min_ratio, period = rule
    recent, limit, spikes, above, scale, good = [], MAX, 0, 0, 64.0, 0
    for is_finite, largest in run:
        is_applied = is_finite
        if not is_finite:
            scale, good = max(scale / 2, 1.0), 0
        else:
            above = above + 1 if largest > limit else 0
            is_applied = not 0 < above <= max_in_a_row
            spikes += not is_applied
        if is_applied:
            good += 1
            if good >= period:
                scale, good = scale * 2, 0
            if largest >= 2.0**-126:
                recent = [*recent, largest][-window:]
            if len(recent) == window:
                logs = [math.log(each) for each in recent]
                mean = math.fsum(logs) / window
                deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / window)
                room = max(threshold * deviation, math.log(min_ratio))
                top = min(mean + room, math.log(MAX))
                limit = float(np.float32(math.exp(top)))
        yield is_applied, (recent, limit, spikes, above, scale, good)


LETTERS = {"-": (True, 1.0), "+": (True, 1.25), "^": (True, 64.0), "0": (True, 0.0)}
LETTERS["x"] = (False, math.nan)


@pytest.mark.smoke
@pytest.mark.parametrize("rule", [(3, 1.5, 2, 2.0, 3), (5, 6.0, 1, 1.125, 1)])
def test_spikes_zeros_overflows_and_a_new_level_as_the_reference(rule):
    run = [LETTERS[letter] for letter in "-+-0-^^-x0+^^^^^^-+-^^^-^x^-00000--"]
    window, threshold, max_in_a_row, min_ratio, period = rule
    scale = DynamicLossScale(64.0, period)
    guard = SpikeGuard(
        threshold=threshold,
        window=window,
        max_in_a_row=max_in_a_row,
        min_ratio=min_ratio,
    )
    for (is_finite, largest), (is_applied, state) in zip(run, reference(rule, run)):
        # On a bad step it may be anything.
        told = tf.constant(largest if is_finite else np.nan, tf.float32)
        flag = tf.constant(is_finite)
        assert bool(adjust_to_step(scale, flag, told, guard=guard)[1]) == is_applied
        counts = guard.spikes, guard.above_in_a_row, scale, scale.good_steps
        assert state == (
            [each for each in guard.recent.numpy().tolist() if each],
            guard.limit.numpy(),
            *(each.numpy() for each in counts),
        )
    assert int(scale.skipped_steps) == sum(not is_finite for is_finite, _ in run)


def judged(guard, largest):
    one = FixedLossScale(1, skip_nonfinite=True)
    largest = tf.constant(largest, tf.float32)
    return bool(adjust_to_step(one, tf.constant(True), largest, guard=guard)[1])


def test_what_is_just_at_the_limit_is_no_spike():
    guard = SpikeGuard(window=3)
    assert all(judged(guard, 0.7) for _ in range(3))
    twice = np.float32(2) * np.float32(0.7)
    assert guard.limit.numpy() == twice  # the deviation is 0, which min_ratio bounds
    assert not judged(guard, np.nextafter(twice, np.float32(9)))
    assert judged(guard, twice)


@pytest.mark.parametrize("largest", [0.0, 1e-45, 2.0**-127, MAX, np.float64(1e300)])
def test_its_state_is_finite_whatever_comes(largest):
    guard = SpikeGuard(threshold=1e30, window=2)
    for each in (largest, largest, 0.0, largest, 1.0, largest, largest):
        judged(guard, min(each, MAX))
        for variable in (guard.recent, guard.limit):
            assert np.isfinite(variable.numpy()).all()


def test_it_is_shown_in_one_line():
    guard = SpikeGuard()
    guard.limit.assign(2.0)
    assert repr(guard) == (
        "SpikeGuard(limit=2.0, spikes=0, above_in_a_row=0, threshold=6.0, window=128, "
        "max_in_a_row=3, min_ratio=2.0)"
    )
