"""The engine, held by an optimizer that is of no framework.

Its steps in every mode are in scales/test_guard.py, and runs that go on from its
checkpoint in test_cut_runs.py. A wrapper holds an engine, so the rest is in all tests.
"""

import pytest
import tensorflow as tf
from exact import clip, gradients, heard
from strategies import agreed, last_replica_gets
from trained import ByEngine

from lossscale import DynamicLossScale, LossScaleEngine, SpikeGuard
from lossscale.optimizer.engine import EngineOfWrapper, Host

INF = float("inf")


class SGD:
    """A framework that nobody has heard of, in six lines."""

    def __init__(self, learning_rate):
        self.learning_rate = learning_rate

    def apply(self, grads, variables):
        context = tf.distribute.get_replica_context()
        for grad, variable in zip(context.all_reduce("SUM", grads), variables):
            variable.assign_sub(self.learning_rate * grad)


@pytest.mark.parametrize("unscales", [False, True], ids=["scaled", "unscaled"])
def test_an_overflow_on_the_last_replica_skips_the_step_on_all(mirrored, unscales):
    sgd = SGD(0.5 / mirrored.num_replicas_in_sync)
    with mirrored.scope():
        engine = LossScaleEngine(DynamicLossScale(1024.0))
        same = tf.VariableAggregation.ONLY_FIRST_REPLICA
        weight = tf.Variable([1.0, 1.0], aggregation=same)

    def replica(last):
        grads = gradients(engine.scale_loss, last_replica_gets(last, 1.0), [weight])
        grads = clip(engine.unscale(grads)) if unscales else grads
        engine.apply(grads, [weight], sgd.apply)

    step = tf.function(lambda last: mirrored.run(replica, (last,)))
    for last, left, scale in ((1.0, 0.5, 1024), (INF, 0.5, 512), (1.0, 0.0, 512)):
        step(tf.constant(last))
        assert agreed(mirrored, weight).tolist() == [left, left]
        assert float(engine.loss_scale) == scale
    assert engine.nonfinite_loss() == "inf"
    assert engine.applied_steps.numpy() == 2
    assert [number for number, _ in engine.record.skipped()[1]] == [1]


def test_the_names_in_a_checkpoint(tmp_path):
    """None is of the state of a step, or of the record of what was not finite."""
    ours = ByEngine(DynamicLossScale(64.0), guard=SpikeGuard(window=4))
    ours.apply(ours.unscale(gradients(ours.scale, INF, [ours.weight])))
    assert len(ours.engine.nonfinite_gradients()) == 1
    path = tf.train.Checkpoint(engine=ours.engine).save(str(tmp_path / "here"))
    names = [name.split("/.ATTR")[0] for name, _ in tf.train.list_variables(path)]
    assert sorted(name for name in names if name.startswith("engine/")) == [
        "engine/applied_steps",
        "engine/guard/above_in_a_row",
        "engine/guard/limit",
        "engine/guard/recent",
        "engine/guard/spikes",
        "engine/loss_scale/bad_steps",
        "engine/loss_scale/consecutive_skipped_steps",
        "engine/loss_scale/current_loss_scale",
        "engine/loss_scale/good_steps",
        "engine/loss_scale/last_step_finite",
        "engine/loss_scale/skipped_steps",
    ]


def test_a_count_of_ones_own_is_not_counted_for_it():
    mine, ours = tf.Variable(7, dtype=tf.int64), ByEngine(DynamicLossScale(1024.0))
    ours.engine = EngineOfWrapper(Host(lambda: mine), DynamicLossScale(1024.0))
    for factor in (1.0, INF):
        ours.apply(gradients(ours.engine.scale_loss, factor, [ours.weight]))
    assert ours.engine.applied_steps is mine
    assert mine.numpy() == 7
    assert [number for number, _ in ours.engine.record.skipped()[1]] == [7]


def test_gradients_of_another_shape_are_refused_before_the_step_is_counted():
    ours = ByEngine(DynamicLossScale(1024.0))
    rows = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([0, 1]), tf.constant([2]))
    for grad in (tf.ones([3]), rows):
        ours.scale(tf.constant(1.0))
        with pytest.raises(ValueError, match="`grads` must have the shapes"):
            ours.apply([grad])
    assert ours.engine.loss_scale.good_steps.numpy() == 0


def test_a_warning_begins_with_the_engine_and_its_first_variable():
    weights = [tf.Variable([1.0], name=name) for name in ("first", "second")]
    engine = LossScaleEngine()
    with heard() as told:
        engine.apply([tf.constant([1.0])] * 2, weights, lambda *_: None)
    (message,) = told
    begins = "LossScaleEngine for 'first' and others: The loss was never scaled"
    assert message.startswith(begins)
