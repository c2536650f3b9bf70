"""Gradients that a user's own function aggregates: called at each step, and looked at.

Legacy optimizers take `gradient_aggregator=`; any subclass in Keras 2 may
have its own way.
"""

import numpy as np
import pytest
import tensorflow as tf
from installed import families
from limits import LIMITS
from strategies import agreed, last_replica_gets

from lossscale import DynamicLossScale, LossScaleOptimizer

#: Where each kind of optimizer lets a user's function aggregate.
each_way = pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, id=f"{family.name}-{way}")
        for family in families()
        for way in ("argument", "override")
        if not LIMITS[f"aggregation by {way}"][0](family)
    ],
)


def sgd(family, way, aggregate):
    """Returns an optimizer that aggregates with a function of the user's."""
    if way == "argument":
        return family.optimizers.SGD(1.0, gradient_aggregator=aggregate)

    class Own(family.optimizers.SGD):
        def _aggregate_gradients(self, grads_and_vars):
            return aggregate(grads_and_vars)

        aggregate_gradients = _aggregate_gradients

    return Own(1.0)


@pytest.mark.each_keras
@each_way
@pytest.mark.parametrize("loop", ["keras2", "keras3"])
def test_it_is_called_at_every_step_and_what_it_returns_is_looked_at(family, way, loop):
    calls, factor = tf.Variable(0), tf.Variable(1.0)

    def aggregate(pairs):
        calls.assign_add(1)
        # Times 0, an infinity is 0.
        return [(tf.math.multiply_no_nan(g, factor), variable) for g, variable in pairs]

    scale = DynamicLossScale(8.0)
    optimizer = LossScaleOptimizer(sgd(family, way, aggregate), scale)
    variable = tf.Variable([8.0, 8.0], name="v")
    optimizer.build([variable])

    @tf.function
    def step(grad):
        grads = [optimizer.scale_loss(grad)]
        if loop == "keras2":
            (grad,) = optimizer.get_unscaled_gradients(grads)
            grads = [tf.clip_by_value(grad, -4.0, 4.0)]
        optimizer.apply_gradients(zip(grads, [variable]))

    for grad, by, expected in (
        ([1.0, 2.0], 1.0, ([7.0, 6.0], 8.0)),  # it sees true gradients
        ([1.0, np.inf], 0.0, ([7.0, 6.0], 4.0)),  # was bad before
        ([1.0, 2.0], np.inf, ([7.0, 6.0], 2.0)),  # is bad since
        ([1.0, 2.0], 2.0, ([5.0, 2.0], 2.0)),
    ):
        factor.assign(by)
        step(tf.constant(grad))
        assert (variable.numpy().tolist(), float(scale)) == expected
    assert [fault.kind for fault in optimizer.nonfinite_gradients()] == ["inf"]
    assert int(calls.numpy()) == 4
    assert int(optimizer.iterations.numpy()) == 2


@pytest.mark.each_keras
@each_way
@pytest.mark.parametrize("loss_scale", [8.0, "dynamic"])
def test_it_may_return_others(family, way, loss_scale):
    def aggregate(pairs):
        assert [variable is not None for _, variable in pairs] == [True, True]
        return [*pairs[1:], (tf.constant([3.0]), third)]

    inner = sgd(family, way, aggregate)
    optimizer = LossScaleOptimizer(inner, loss_scale)
    first, second, third, none = (tf.Variable([0.0], name=n) for n in "abcd")
    optimizer.build([first, second, third, none])

    def step(*grads):
        optimizer.scale_loss(tf.constant(1.0))
        grads = [None if g is None else g * optimizer.loss_scale() for g in grads]
        optimizer.apply_gradients(zip(grads, [first, none, second]))

    step(tf.constant([1.0]), None, tf.constant([2.0]))
    assert [v.numpy().item() for v in (first, second, third)] == [0.0, -2.0, -3.0]
    if loss_scale == "dynamic":
        step(tf.constant([1.0]), None, tf.constant([np.nan]))
        (fault,) = optimizer.nonfinite_gradients()
        assert (fault.kind, fault.variable) == ("nan", second)
        step(tf.constant([np.nan]), None, tf.constant([1.0]))  # of which none is left
        assert optimizer.nonfinite_gradients() == []
        assert optimizer.loss_scale.skipped_steps.numpy() == 2


@each_way
def test_replicas_that_communicate_in_it_do_not_part(family, mirrored, way):
    seen = []

    def aggregate(pairs):
        grads = [grad for grad, _ in pairs]
        context = tf.distribute.get_replica_context()
        seen.append(context.replica_id_in_sync_group)
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, grads)
        return list(zip(total, [variable for _, variable in pairs]))

    with mirrored.scope():
        variable = tf.Variable([8.0, 8.0], name="v")
        optimizer = LossScaleOptimizer(sgd(family, way, aggregate), "dynamic")
        optimizer.build([variable])

    def replica(special):
        grad = optimizer.scale_loss(last_replica_gets(special, 1.0) * tf.ones([2]))
        grads = optimizer.get_unscaled_gradients([grad])
        optimizer.apply_gradients(zip(grads, [variable]))

    step = tf.function(lambda special: mirrored.run(replica, (special,)))
    for special, expected in ((2.0, 5.0), (np.inf, 5.0), (1.0, 3.0)):
        step(tf.constant(special))
        np.testing.assert_array_equal(agreed(mirrored, variable), [expected] * 2)
    assert optimizer.loss_scale.skipped_steps.numpy() == 1
    assert len(seen) == 2
