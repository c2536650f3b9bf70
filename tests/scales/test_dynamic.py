"""DynamicLossScale: hysteresis, bounds, rounding. test_reference.py has its rule."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from driving import finite, run
from models import compiled
from processes import printed

from lossscale import DynamicLossScale

FLOAT32_MAX = float(np.finfo(np.float32).max)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("reset", "expected"),
    [
        (("growth",), [1024, 1024, 512, 256, 256, 128, 64, 32]),
        (("good",), [1024, 1024, 1024, 512, 512, 512, 256, 128]),
        (("growth", "backoff"), [1024, 1024, 512, 512, 512, 256, 256, 128]),
        (("good", "backoff"), [1024, 1024, 1024, 512, 512, 512, 256, 256]),
    ],
)
def test_four_families_of_hysteresis(reset, expected):
    loss_scale = DynamicLossScale(1024, 100, hysteresis=2, hysteresis_reset=reset)
    assert run(loss_scale, finite("FTFFTFFF")) == expected


@pytest.mark.smoke
@pytest.mark.peer_defect(7)
def test_growth_catches_up_with_a_restored_counter():
    loss_scale = DynamicLossScale(8, increment_period=3)
    loss_scale.good_steps.assign(100)
    loss_scale.adjust(True)
    assert float(loss_scale) == 16


@pytest.mark.peer_defect(21)
def test_an_overflow_never_raises_the_scale():
    loss_scale = DynamicLossScale(0.25, min_loss_scale=0.25)
    loss_scale.adjust(False)
    assert float(loss_scale) == 0.25


def test_settings_are_plain_attributes():
    loss_scale = DynamicLossScale(np.float32(8), np.int64(3), hysteresis=2)
    assert loss_scale.initial_loss_scale == 8.0
    assert type(loss_scale.initial_loss_scale) is float
    assert loss_scale.increment_period == 3
    assert type(loss_scale.increment_period) is int
    assert loss_scale.hysteresis_reset == ("growth", "backoff")


FLOAT32_TINY = float(np.finfo(np.float32).tiny)


def grown_as_by_3_0(scale, multiplier, ceiling):
    """Returns what 3.0.0 computed, in float64."""
    scale = np.float64(scale)
    larger = scale * np.float64(np.float32(multiplier))
    if ceiling is not None:
        return np.float32(min(larger, ceiling))
    return np.float32(larger if larger < 2.0**128 - 2.0**103 else scale)


@pytest.mark.parametrize("ceiling", [None, 123456.789, 3e9, FLOAT32_MAX])
@pytest.mark.parametrize("multiplier", [2.0, 2.0**127, 3.0, 1.5, 2.0**0.001])
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_growth_and_backoff_are_those_of_3_0_to_the_bit(mode, multiplier, ceiling):
    ends = [FLOAT32_TINY, 1.5 * FLOAT32_TINY, 1.0, 2.0**127, FLOAT32_MAX]
    ends += [np.nextafter(np.float32(end), np.float32(1)) for end in ends]
    halves = [FLOAT32_MAX / 2, 2.0**126, 2.0**24, 1e30]
    some = np.exp2(np.random.default_rng(0).uniform(-126, 127.9, 200))
    scales = np.array([*ends, *halves, *some], np.float32)
    loss_scale = DynamicLossScale(
        1, 1, multiplier, min_loss_scale=FLOAT32_TINY, max_loss_scale=ceiling
    )

    def both(scales, zeros):
        state = SimpleNamespace(current_loss_scale=scales)
        state.good_steps = state.bad_steps = zeros
        rule = loss_scale.next_state
        flags = tf.zeros_like(zeros) < 1, tf.zeros_like(zeros) > 0
        return [rule(state, flag)["current_loss_scale"] for flag in flags]

    both = compiled(both, mode)
    grown, fallen = both(tf.constant(scales), tf.zeros(scales.shape, tf.int64))
    wanted = [grown_as_by_3_0(scale, multiplier, ceiling) for scale in scales]
    assert np.array_equal(grown.numpy().view(np.int32), np.array(wanted).view(np.int32))
    wanted = np.maximum(scales / np.float32(multiplier), np.float32(FLOAT32_TINY))
    assert np.array_equal(fallen.numpy().view(np.int32), wanted.view(np.int32))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_restored_count_of_bad_steps_is_cleared(mode):
    loss_scale = DynamicLossScale(8.0, increment_period=2)
    adjust = compiled(lambda flag: loss_scale.adjust(flag)[1], mode)
    for flags, expected in (("TT", 0), ("F", 0), ("T", 7)):
        loss_scale.good_steps.assign(0)
        loss_scale.bad_steps.assign(7)
        for flag in finite(flags):
            adjust(tf.constant(flag))
        assert loss_scale.bad_steps.numpy() == expected


@pytest.mark.parametrize(
    ("argument", "variables"),
    [
        ("search_period", []),
        ("backoff_cooldown", ["cooldown_steps"]),
        ("overflow_tolerance", ["window_steps", "window_bad_steps"]),
    ],
)
def test_what_is_not_used_no_file_knows_of(argument, variables, tmp_path):
    plain, using = DynamicLossScale(64), DynamicLossScale(8, **{argument: 1})
    assert argument not in plain.get_config()
    assert argument not in repr(plain)
    assert using.get_config()[argument] == 1
    assert len(using.variables) == len(plain.variables) + len(variables)
    plain.adjust(True)
    path = tf.train.Checkpoint(scale=plain).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(scale=using).read(path)  # what is missing stays
    assert (float(using), int(using.good_steps.numpy())) == (64.0, 1)
    for name in variables:
        assert getattr(plain, name) is None
        assert getattr(using, name).numpy() == 0


#: What fairseq 0.12.2's DynamicLossScaler(64, scale_window=5, tolerance=...) has.
FLAGS = [letter == "T" for letter in "FTTTTFTTFTTTTTTTTFTTFF"]
FAIRSEQS = {
    0.0: [32] * 5 + [16] * 3 + [8] * 5 + [16] * 4 + [8] * 3 + [4, 2],
    0.2: [32] * 5 + [16] * 3 + [8] * 5 + [16] * 4 + [8] * 3 + [4, 2],
    0.3: [32] * 13 + [64] * 4 + [32] * 3 + [16, 8],
}


@pytest.mark.parametrize("tolerance", FAIRSEQS)
def test_a_share_of_overflows_is_tolerated_as_by_fairseq(tolerance):
    loss_scale, seen = DynamicLossScale(64, 5, overflow_tolerance=tolerance), []
    for flag in FLAGS:
        _, applied = loss_scale.adjust(flag)
        assert bool(applied) == flag  # those that are tolerated are skipped as well
        seen.append(float(loss_scale))
    assert seen == FAIRSEQS[tolerance]


#: Prints how many kilobytes of memory so many eager steps take.
COUNTING = """
import lossscale

loss_scale = lossscale.DynamicLossScale(1024.0, increment_period=10**6)

def memory_after(steps):
    for _ in range(steps):
        loss_scale.adjust(True)
    with open("/proc/self/status") as file:
        (line,) = [each for each in file if each.startswith("VmHWM")]
    return int(line.split()[1])

before = memory_after(1000)
print(memory_after(4000) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="where memory is counted")
def test_a_count_that_never_comes_again_is_not_kept():
    """TensorFlow keeps a tensor of each Python number: 2.5 MB for these steps.

    In a process of its own, since this one may have needed more memory before.
    """
    path = os.pathsep.join(sys.path)
    assert int(printed("-c", COUNTING, PYTHONPATH=path)) < 1250
