"""LossScaleOptimizer with loss scales that look at the gradients.

They must see the greatest magnitude of the unscaled gradients, before anybody clipped
them, on all replicas: here the last one has it.
"""

import numpy as np
import pytest
import tensorflow as tf
from limits import skip_without
from models import built, compiled, variable_of
from strategies import agreed, assert_bit_equal, last_replica_gets

from lossscale import DynamicLossScale, HeadroomLossScale, LossScaleOptimizer


def step_on(strategy, optimizer, variable, loop, on_others, mode="graph"):
    """Returns a step. What it is given is the true gradient of the last replica."""

    def step(grad):
        scaled = optimizer.scale_loss(last_replica_gets(grad, on_others))
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

    step = tf.autograph.to_graph(step) if loop == "in-a-loop" else step
    return compiled(lambda grad: strategy.run(step, args=(grad,)), mode)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("loop", "mode"), [("keras2", "eager"), ("keras3", "graph"), ("in-a-loop", "graph")]
)
def test_it_sees_the_largest_on_the_last_replica(family, mirrored, loop, mode):
    with mirrored.scope():
        loss_scale = HeadroomLossScale(2.0**10, half_life=1e4)
        optimizer, variable = built(family, loss_scale)
    step = step_on(mirrored, optimizer, variable, loop, [0.0, 2.0**-22], mode)
    for largest in (2.0**-12, 2.0**-2):
        step(tf.constant([-largest, 0.0]))
        assert loss_scale.last_largest.numpy() == largest
        assert loss_scale.numpy() == 2.0**11 / largest
    step(tf.constant([np.inf, 0.0]))
    assert loss_scale.last_largest.numpy() == np.inf
    assert loss_scale.numpy() == 2.0**12  # the ceiling
    assert_bit_equal(mirrored, [*loss_scale.variables, loss_scale.last_largest])


@pytest.mark.parametrize("loop", ["keras2", "keras3", "in-a-loop"])
def test_with_communication_dtype_it_is_that_of_a_replica(family, mirrored, loop):
    """Not that of the sum. It was there before clipping."""
    skip_without("adding up over replicas", family)
    with mirrored.scope():
        loss_scale = DynamicLossScale(2.0**6)
        optimizer, variable = built(family, loss_scale, communication_dtype="float16")
    loss_scale.keep_largest()
    step = step_on(mirrored, optimizer, variable, loop, [0.25, 0.0])
    for first, largest in ((0.5, 0.5), (-0.125, 0.25), (np.inf, np.inf)):
        step(tf.constant([first, 0.0]))
        assert agreed(mirrored, loss_scale.last_largest) == largest
    copies = mirrored.experimental_local_results(loss_scale.last_largest)
    assert len(copies) == mirrored.num_replicas_in_sync


def unscaled_by_the_loss_scale(optimizer, grad):
    scale = optimizer.loss_scale
    return scale.unscale([grad * scale()])[0]


HELD = tf.Variable([0.0])
#: What the second gradient of a list is when it is applied.
SECOND = {
    "scaled": lambda optimizer, grad: optimizer.scale_loss(grad),
    "of unknown origin": lambda _, grad: grad,
    "unscaled by the loss scale": unscaled_by_the_loss_scale,
    "held by a variable": lambda _, grad: tf.convert_to_tensor(HELD.assign(grad)),
}


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
