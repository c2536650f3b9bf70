"""LossScaleOptimizer with loss scales that look at the gradients.

They must see the greatest magnitude of the unscaled gradients, before anybody clipped
them, on all replicas: here the last one has it.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from limits import skip_without
from models import built, compiled, variable_of
from strategies import last_replica_gets

from lossscale import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScaleOptimizer,
)

MODES = ["eager", "graph"]
LOOPS = ["keras2", "keras3", "in-a-loop"]


def step_of(optimizer, variable, loop):
    """Returns a step whose gradient, unscaled, is what it is called with."""

    def step(grad):
        scaled = optimizer.scale_loss(grad)
        if loop == "in-a-loop":
            total = tf.zeros([2])
            for _ in tf.range(2):
                (part,) = optimizer.get_unscaled_gradients([scaled])
                total += part
            scaled = total / 2
        elif loop == "keras2":
            (scaled,) = optimizer.get_unscaled_gradients([scaled])
            scaled = tf.clip_by_norm(scaled, 2.0**-6)
        optimizer.apply_gradients([(scaled, variable)])

    return tf.autograph.to_graph(step) if loop == "in-a-loop" else step


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*MODES, "xla"])
@pytest.mark.parametrize("loop", LOOPS)
def test_it_sees_what_was_there_before_clipping(family, loop, mode):
    loss_scale = HeadroomLossScale(half_life=1e4)
    optimizer, variable = built(family, loss_scale)
    step = compiled(step_of(optimizer, variable, loop), mode)
    for number, largest in enumerate([2.0**-3, 2.0**-20, 3.0, 0.0]):
        step(tf.constant([-largest, largest / 2]))
        assert float(loss_scale.last_largest) == largest
        assert float(loss_scale) == 2.0 ** (14 if number < 2 else 10)
    step(tf.constant([1.0, np.nan]))
    assert float(loss_scale.last_largest) == np.inf
    assert int(loss_scale.skipped_steps) == 1
    assert int(optimizer.iterations.numpy()) == 4


@pytest.mark.slow
def test_one_list_unscaled_and_one_as_it_came(family):  # eagerly none is told apart
    loss_scale = HeadroomLossScale(half_life=1e4)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), loss_scale)
    variables = [variable_of(family, [1.0]), variable_of(family, [1.0])]

    def step(first, second):
        grads = [optimizer.scale_loss(each) for each in (first, second)]
        grads[:1] = optimizer.get_unscaled_gradients(grads[:1])
        grads[0] = 16.0 * grads[0]  # what the user makes of it does not count
        optimizer.apply_gradients(zip(grads, variables))

    step = tf.function(step)
    for first, second in ((4.0, 2.0), (2.0, 8.0)):
        step(tf.constant([first]), tf.constant([-second]))
        assert float(loss_scale.last_largest) == max(first, second)


@pytest.mark.smoke
@pytest.mark.parametrize("loop", ["keras2", "keras3"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_largest_on_the_last_replica(family, mirrored, loop, mode):
    with mirrored.scope():
        loss_scale = HeadroomLossScale(2.0**10, half_life=1e4)
        optimizer, variable = built(family, loss_scale)

    def replica(grad):
        grad = last_replica_gets(grad, [0.0, 2.0**-22])
        step_of(optimizer, variable, loop)(grad)

    step = compiled(lambda grad: mirrored.run(replica, args=(grad,)), mode)
    for largest in (2.0**-12, 2.0**-2):
        step(tf.constant([-largest, 0.0]))
        assert loss_scale.last_largest.numpy() == largest
        assert loss_scale.numpy() == 2.0**11 / largest
    step(tf.constant([np.inf, 0.0]))
    assert loss_scale.last_largest.numpy() == np.inf
    assert loss_scale.numpy() == 2.0**12  # the ceiling
    for variable in (*loss_scale.variables, loss_scale.last_largest):
        copies = mirrored.experimental_local_results(variable)
        assert len({copy.numpy().item() for copy in copies}) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("unscales", [False, True])
def test_with_communication_dtype_it_is_that_of_a_replica(
    family, mirrored, unscales, mode
):
    """Not that of the sum. It was there before clipping."""
    skip_without("adding up over replicas", family)
    with mirrored.scope():
        loss_scale = DynamicLossScale(2.0**6)
        loss_scale.keep_largest()
        optimizer, variable = built(family, loss_scale, communication_dtype="float16")

    def replica(grad):
        grad = last_replica_gets(grad, [0.25, 0.0])
        step_of(optimizer, variable, "keras2" if unscales else "keras3")(grad)

    step = compiled(lambda grad: mirrored.run(replica, args=(grad,)), mode)
    for first, largest in ((0.5, 0.5), (-0.125, 0.25)):
        step(tf.constant([first, 0.0]))
        assert loss_scale.last_largest.numpy() == largest
    step(tf.constant([np.inf, 0.0]))
    assert loss_scale.last_largest.numpy() == np.inf


@pytest.mark.every
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by", ["nothing known", "LossScale.unscale", "a variable"])
def test_what_no_list_covers_is_measured_as_it_is_applied(family, by, mode):
    """Beside gradients that were unscaled, and then changed, in one list."""
    loss_scale = HeadroomLossScale(64.0, half_life=1e4)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), loss_scale)
    variables = [variable_of(family, [1.0]) for _ in range(2)]
    held = tf.Variable([0.0])

    def step(first, second):
        (grad,) = optimizer.get_unscaled_gradients([optimizer.scale_loss(first)])
        if by == "LossScale.unscale":
            (second,) = loss_scale.unscale([second * loss_scale()])
        elif by == "a variable":
            held.assign(second)
            second = tf.convert_to_tensor(held)
        optimizer.apply_gradients(zip([16.0 * grad, second], variables))

    step = compiled(step, mode)
    for first, second in ((4.0, 2.0), (2.0, 8.0)):
        step(tf.constant([first]), tf.constant([-second]))
        assert float(loss_scale.last_largest) == max(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_two_optimizers_share_one(family, mode):
    loss_scale = HeadroomLossScale(half_life=1e4)
    steps = [step_of(*built(family, loss_scale), "keras3") for _ in range(2)]

    def both(factors):
        for step, factor in zip(steps, tf.unstack(factors)):
            step(tf.stack([factor, 0.0]))

    step = compiled(both, mode)
    for factors in ([2.0**-3, 2.0**-9], [2.0**-9, 2.0**-4], [2.0**-9, 2.0**-8]):
        step(tf.constant(factors))
        assert float(loss_scale.last_largest) == max(factors)
    assert float(loss_scale) == 2.0**14
    step(tf.constant([np.inf, 1.0]))
    assert float(loss_scale.last_largest) == np.inf
    assert int(loss_scale.skipped_steps) == 1
    assert int(loss_scale.good_steps) == 0
