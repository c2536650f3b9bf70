"""DynamicLossScale: hysteresis, restored counts. test_reference.py has its rule."""

import os
import sys

import numpy as np
import pytest
import tensorflow as tf
from driving import finite, run
from models import compiled
from processes import printed

from lossscale import DynamicLossScale


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


def test_it_does_not_grow_to_infinity():
    loss_scale = DynamicLossScale(2.0**127, increment_period=1)
    loss_scale.adjust(True)
    assert float(loss_scale) == 2.0**127


@pytest.mark.peer_defect(21)
def test_an_overflow_never_raises_the_scale():
    loss_scale = DynamicLossScale(0.25, min_loss_scale=0.25)
    loss_scale.adjust(False)
    assert float(loss_scale) == 0.25


def test_settings_are_plain_attributes():
    loss_scale = DynamicLossScale(np.float32(8), np.array(3), hysteresis=2)
    assert loss_scale.initial_loss_scale == 8.0
    assert type(loss_scale.initial_loss_scale) is float
    assert loss_scale.increment_period == 3
    assert type(loss_scale.increment_period) is int
    assert loss_scale.hysteresis_reset == ("growth", "backoff")


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
import lossscale, resource

loss_scale = lossscale.DynamicLossScale(1024.0, increment_period=10**6)

def memory_after(steps):
    for _ in range(steps):
        loss_scale.adjust(True)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

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
