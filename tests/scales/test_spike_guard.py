"""SpikeGuard against its rule in plain Python, and what it refuses."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import lossscale
from lossscale import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScale,
    SpikeGuard,
)

MAX = float(np.finfo(np.float32).max)


def reference(rule, run):
    """Yields whether each step is applied, and the state after it, in plain Python.

    The loss scale within doubles and halves.
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


def draw(seed, steps=40):
    """Returns a rule's arguments, and a run: (whether finite, largest) of each step."""
    rng = np.random.default_rng(seed)
    window = int(rng.integers(2, 9))
    rule = (window, float(rng.choice([1.0, 1.5, 3.0, 6.0])), int(rng.integers(1, 4)))
    rule += (float(rng.choice([1.25, 2.0, 8.0])), int(rng.integers(1, 6)))
    level = 2.0 ** rng.integers(-20, 20)
    largest = level * np.exp(rng.normal(0, rng.choice([0.0, 0.1, 1.0]), steps))
    largest *= np.where(rng.random(steps) < 0.15, 2.0 ** rng.integers(1, 15, steps), 1)
    largest[rng.random(steps) < 0.1] = 0.0
    largest[steps // 2 :] *= rng.choice([1.0, 2.0**10])  # perhaps a new level
    is_finite = rng.random(steps) > 0.1
    return rule, list(zip(is_finite.tolist(), largest.astype(np.float32).tolist()))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_step_of_every_run_is_the_references(seed):
    assert_as_reference(*draw(seed))


@pytest.mark.smoke
def test_spikes_zeros_overflows_and_a_new_level_as_the_reference():
    letters = {"-": (True, 1.0), "+": (True, 1.25), "^": (True, 64.0), "0": (True, 0.0)}
    letters["x"] = (False, math.nan)
    run = [letters[letter] for letter in "-+-0-^^-x0+^^^^^^-+-^^^-^x^-00000--"]
    assert_as_reference((3, 1.5, 2, 2.0, 3), run)


def assert_as_reference(rule, run):
    window, threshold, max_in_a_row, min_ratio, period = rule
    inner = DynamicLossScale(64.0, period)
    guard = SpikeGuard(inner, threshold, window, max_in_a_row, min_ratio=min_ratio)
    for (is_finite, largest), (is_applied, state) in zip(run, reference(rule, run)):
        told = largest if is_finite else np.nan  # on a bad step it may be anything
        assert bool(guard.adjust(is_finite, told)[1]) == is_applied
        counts = guard.spikes, guard.above_in_a_row, guard, inner.good_steps
        assert state == (
            [each for each in guard.recent.numpy().tolist() if each],
            guard.limit.numpy(),
            *(each.numpy() for each in counts),
        )
        # A spike counts as a finite step.
        assert guard.last_step_finite.numpy() == is_finite
    bad = sum(not is_finite for is_finite, _ in run)
    assert int(guard.skipped_steps) == int(inner.skipped_steps) == bad


def test_what_is_just_at_the_limit_is_no_spike():
    guard = SpikeGuard(1, window=3)
    for _ in range(3):
        assert bool(guard.adjust(True, 0.7)[1])
    twice = np.float32(2) * np.float32(0.7)
    assert guard.limit.numpy() == twice  # the deviation is 0, which min_ratio bounds
    assert not bool(guard.adjust(True, np.nextafter(twice, np.float32(9)))[1])
    assert bool(guard.adjust(True, twice)[1])


def test_one_that_looks_at_the_gradients_is_told_of_them_but_not_of_spikes():
    guard, bare = SpikeGuard(HeadroomLossScale(), window=2), HeadroomLossScale()
    for largest in (1.0, 2.0, 1.0):
        guard.adjust(True, largest)
        bare.adjust(True, largest)
    guard.adjust(True, 1e6)
    assert float(guard) == float(bare) == 2.0**11
    assert guard.loss_scale.peak.numpy() == bare.peak.numpy()


@pytest.mark.parametrize("largest", [0.0, 1e-45, 2.0**-127, MAX, np.float64(1e300)])
def test_its_state_is_finite_whatever_comes(largest):
    guard = SpikeGuard(1, threshold=1e30, window=2)
    for each in (largest, largest, 0.0, largest, 1.0, largest, largest):
        guard.adjust(True, each)
        guard.adjust(False, each)
        for variable in (guard.recent, guard.limit):
            assert np.isfinite(variable.numpy()).all()


class Mine(LossScale):
    """A user's own, which no Keras knows."""

    def __call__(self):
        return tf.constant(2.0)

    def _adjust(self, is_finite):
        del is_finite

    def get_config(self):
        return {}


def test_a_users_own_comes_back_with_the_guard():
    config = json.loads(json.dumps(lossscale.serialize(SpikeGuard(Mine()))))
    found = lossscale.deserialize(config, {"Mine": Mine})
    assert isinstance(found.loss_scale, Mine)


def test_the_arguments_it_takes():
    assert isinstance(SpikeGuard().loss_scale, DynamicLossScale)
    assert float(SpikeGuard(128)) == 128.0
    manager = lossscale.FixedLossScaleManager(8.0)
    assert float(SpikeGuard(manager)) == 8.0


def test_guards_in_guards_are_refused():
    guard = SpikeGuard()
    with pytest.raises(ValueError, match=r"must not be a SpikeGuard.*guard.loss_scale"):
        SpikeGuard(guard)


def test_repr_shows_both_in_one_line():
    shown = repr(SpikeGuard(DynamicLossScale(64.0)))
    assert shown.startswith("SpikeGuard(")
    assert "spikes=0" in shown
    assert "loss_scale=DynamicLossScale(" in shown
    assert "current_loss_scale=64.0" in shown
    assert "recent" not in shown
    assert "\n" not in shown
