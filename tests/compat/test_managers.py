"""The LossScaleManager family: contrib's names, signatures and meaning."""

import numpy as np
import pytest
import tensorflow as tf
from driving import drive, finite
from version_1 import needs_eager

from lossscale import (
    DynamicLossScale,
    ExponentialUpdateLossScaleManager,
    FixedLossScale,
    FixedLossScaleManager,
    get,
)

pytestmark = needs_eager
#: Arguments, flags, and the scale after each. The first ones are contrib's own tests'.
VECTORS = [
    ((4, 2, 2, 2, 0.5), "FFTTTFTFTTTF", [4, 2, 2, 4, 4, 4, 4, 2, 2, 4, 4, 4]),
    ((1, 2, 2, 2, 0.5), "TTTFTF", [1, 2, 2, 2, 2, 1]),
    ((16, 2, 2, 2, 0.5), "FFFFFFFFFF", [16, 8, 8, 4, 4, 2, 2, 1, 1, 1]),
    # Two bad steps, times 0.8.
    ((1000, 1), "TFF", [2000, 2000, 1600]),
    # A growth that float32 refuses clears the bad steps.
    ((2.0**127, 1, 2, 4, 0.5), "FTF", [2.0**127] * 3),
]


@pytest.mark.parametrize(("arguments", "run", "expected"), VECTORS)
def test_exponential_manager_follows_the_rule(arguments, run, expected):
    def make():
        return get(ExponentialUpdateLossScaleManager(*arguments))

    assert drive(make, finite(run), "eager") == (expected, finite(run))


def test_a_manager_updates_by_the_flag_alone():
    assert ExponentialUpdateLossScaleManager(4, 2).update_loss_scale(True) is None
    with tf.Graph().as_default():
        manager = ExponentialUpdateLossScaleManager(4, 2)
        update_op = manager.update_loss_scale(tf.constant(False))
    assert isinstance(update_op, tf.Operation)


def test_fixed_manager_stays_and_skips():
    manager = FixedLossScaleManager(loss_scale=128)
    assert manager.update_loss_scale(tf.constant(False)) is None
    assert float(manager.get_loss_scale()) == 128
    _, should_apply = get(manager).update([tf.constant([np.inf])])
    assert not bool(should_apply)


def test_managers_stand_on_loss_scales_and_are_checkpointed(tmp_path):
    assert isinstance(get(FixedLossScaleManager(2)), FixedLossScale)
    manager = ExponentialUpdateLossScaleManager(64, 100)
    assert isinstance(get(manager), DynamicLossScale)
    assert get(manager) is get(manager)
    for flag in finite("FFTF"):
        manager.update_loss_scale(flag)
    path = tf.train.Checkpoint(m=manager).write(str(tmp_path / "checkpoint"))
    other = ExponentialUpdateLossScaleManager(8, 100)
    tf.train.Checkpoint(m=other).read(path).assert_consumed()
    assert other.loss_scale.numpy() == manager.loss_scale.numpy()
