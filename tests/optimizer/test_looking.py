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

from lossscale import DynamicLossScale, HeadroomLossScale, LossScaleOptimizer

each_loop = pytest.mark.parametrize("loop", ["keras2", "keras3", "in-a-loop"])


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


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("loop", "mode"), [("keras2", "eager"), ("keras3", "graph"), ("in-a-loop", "graph")]
)
def test_it_sees_the_largest_on_the_last_replica(family, mirrored, loop, mode):
    with mirrored.scope():
        loss_scale = HeadroomLossScale(2.0**10, half_life=1e4)
        optimizer, variable = built(family, loss_scale)

    take = step_of(optimizer, variable, loop)

    def replica(grad):
        take(last_replica_gets(grad, [0.0, 2.0**-22]))

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


@each_loop
def test_with_communication_dtype_it_is_that_of_a_replica(family, mirrored, loop):
    """Not that of the sum. It was there before clipping."""
    skip_without("adding up over replicas", family)
    with mirrored.scope():
        loss_scale = DynamicLossScale(2.0**6)
        loss_scale.keep_largest()
        optimizer, variable = built(family, loss_scale, communication_dtype="float16")

    take = step_of(optimizer, variable, loop)

    def replica(grad):
        take(last_replica_gets(grad, [0.25, 0.0]))

    step = tf.function(lambda grad: mirrored.run(replica, args=(grad,)))
    for first, largest in ((0.5, 0.5), (-0.125, 0.25), (np.inf, np.inf)):
        step(tf.constant([first, 0.0]))
        assert loss_scale.last_largest.numpy() == largest


#: What the second gradient of a list is when it is applied.
SECOND = {
    "scaled": lambda optimizer, grad: optimizer.scale_loss(grad),
    "of unknown origin": lambda _, grad: grad,
    "unscaled by the loss scale": lambda optimizer, grad: optimizer.loss_scale.unscale(
        [grad * optimizer.loss_scale()]
    )[0],
    "held by a variable": lambda _, grad: tf.convert_to_tensor(HELD.assign(grad)),
}
HELD = tf.Variable([0.0])


@pytest.mark.parametrize(
    "mode", ["graph", pytest.param("eager", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("second", SECOND)
def test_what_no_list_covers_is_measured_as_it_is_applied(family, second, mode):
    """Beside gradients that were unscaled, and then changed, in one list."""
    loss_scale = HeadroomLossScale(64.0, half_life=1e4)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), loss_scale)
    variables = [variable_of(family, [1.0]) for _ in range(2)]

    def step(first, other):
        (grad,) = optimizer.get_unscaled_gradients([optimizer.scale_loss(first)])
        other = SECOND[second](optimizer, other)
        optimizer.apply_gradients(zip([16.0 * grad, other], variables))

    step = compiled(step, mode)
    for first, other in ((4.0, 2.0), (2.0, 8.0)):
        step(tf.constant([first]), tf.constant([-other]))
        assert float(loss_scale.last_largest) == max(first, other)
