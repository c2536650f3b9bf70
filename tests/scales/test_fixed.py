"""FixedLossScale: it stays, and what it does with gradients that are not finite."""

import pytest
import tensorflow as tf

from lossscale import FixedLossScale

NAN = [tf.constant([1.0, float("nan")])]


@pytest.mark.peer_defect(20)
def test_by_default_every_step_is_applied_without_a_look_and_on_request_it_looks():
    loss_scale = FixedLossScale(128)
    assert loss_scale.update(NAN) == (None, True)
    assert loss_scale.adjust(False) == (None, True)
    assert loss_scale.skipped_steps.numpy() == 0
    loss_scale = FixedLossScale(128, skip_nonfinite=True)
    assert not bool(loss_scale.update(NAN)[1])
    assert bool(loss_scale.update([tf.constant([1.0])])[1])


def test_by_default_a_graph_gets_an_op_and_the_python_value_true():
    loss_scale = FixedLossScale(128)
    with tf.Graph().as_default():
        update_op, should_apply = loss_scale.update([tf.zeros([3])])
        assert isinstance(update_op, tf.Operation)
        assert should_apply is True


def test_a_checkpoint_does_not_change_the_setting(tmp_path):
    path = tf.train.Checkpoint(s=FixedLossScale(8)).write(str(tmp_path / "checkpoint"))
    other = FixedLossScale(16)
    tf.train.Checkpoint(s=other).read(path).assert_consumed()
    assert float(other) == 16 == other.loss_scale_value
