"""One loss scale for two optimizers, as in a GAN: adjusted once per step, from both."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from impossible import why_not
from installed import STRATEGY
from limits import skip_without
from models import compiled, optimizers_of
from strategies import SCALE, last_replica_gets, rule

from lossscale import DynamicLossScale

MODES = ["eager", "graph", "xla"]
#: Finite on the first optimizer and on the second, step by step.
RUN = [(True, True), (True, False), (False, True), (False, False), (True, True)]


def right_scales(run):
    """Returns the scale after each step, which is bad if any optimizer's is."""
    return [scale for scale, *_ in rule(map(all, run))]


def step_of(optimizers, variables, loop, together):
    """Returns a step of two losses, scaled together or one after the other."""

    def gradients(optimizer, factor):
        scaled = optimizer.scale_loss(factor)  # d loss / d variable = factor
        return tf.reshape(scaled, [1])

    def apply(optimizer, variable, grad):
        if loop == "keras2":
            grad = tf.clip_by_value(
                optimizer.get_unscaled_gradients([grad])[0], -2.0, 2.0
            )
        optimizer.apply_gradients([(grad, variable)])

    def step(factors):
        pairs = list(zip(optimizers, variables, tf.unstack(factors)))
        if together:
            grads = [gradients(optimizer, factor) for optimizer, _, factor in pairs]
            for (optimizer, variable, _), grad in zip(pairs, grads):
                apply(optimizer, variable, grad)
        else:
            for optimizer, variable, factor in pairs:
                apply(optimizer, variable, gradients(optimizer, factor))

    return step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", ["keras2", "keras3"])
@pytest.mark.parametrize("together", [True, False])
def test_one_adjustment_per_step(family, loop, together, mode):
    loss_scale = DynamicLossScale(**SCALE)
    optimizers, variables = optimizers_of(family, loss_scale, 2, [1.0])
    step = compiled(step_of(optimizers, variables, loop, together), mode)
    # It grows at some steps: with the first apply, after the second loss was scaled.
    run = [*RUN, *RUN[::-1], (True, True)]
    scales = []
    for flags in run:
        step(tf.constant([0.5 if flag else np.inf for flag in flags]))
        scales.append(float(loss_scale))
    assert scales == right_scales(run)
    for optimizer, variable, times in zip(optimizers, variables, np.sum(run, axis=0)):
        assert int(optimizer.iterations.numpy()) == times
        np.testing.assert_array_equal(variable.numpy(), [1.0 - 0.5 * times])
    assert loss_scale.skipped_steps.numpy() == sum(not all(flags) for flags in run)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", ["keras2", "keras3"])
def test_one_loss_scaled_by_one_of_them(family, loop, mode):
    loss_scale = DynamicLossScale(64.0, 1)
    optimizers, variables = optimizers_of(family, loss_scale, 2, [1.0])

    def step(factor):
        grad = tf.reshape(optimizers[0].scale_loss(factor), [1])
        for optimizer, variable in zip(optimizers, variables):
            grads = [grad]
            if loop == "keras2":
                grads = optimizer.get_unscaled_gradients(grads)
            optimizer.apply_gradients(zip(grads, [variable]))

    step = compiled(step, mode)
    for factor, expected in ((0.5, 0.5), (np.inf, 0.5), (0.25, 0.25)):
        step(tf.constant(factor))
        for variable in variables:
            np.testing.assert_array_equal(variable.numpy(), [expected])
    assert float(loss_scale) == 128.0


def test_each_may_be_applied_more_often_than_the_other(family):
    loss_scale = DynamicLossScale(64.0, 100)
    optimizers, variables = optimizers_of(family, loss_scale, 2, [1.0])
    for index in [0, 0, 0, 1] * 2:
        scaled = optimizers[index].scale_loss(tf.constant([0.5]))
        optimizers[index].apply_gradients([(scaled, variables[index])])
    assert loss_scale.good_steps.numpy() == 6
    assert loss_scale.skipped_steps.numpy() == 0


@pytest.mark.parametrize(("mode", "inside"), [("eager", True), ("graph", False)])
def test_on_two_replicas(family, mirrored, mode, inside):
    if why_not(STRATEGY, family.name, "loop"):
        pytest.skip("impossible, see impossible.py")
    loss_scale = None if inside else DynamicLossScale(**SCALE)
    with mirrored.scope():
        loss_scale = loss_scale or DynamicLossScale(**SCALE)
        optimizers, variables = optimizers_of(family, loss_scale, 2, [1.0])

    def replica(factors):
        factors = last_replica_gets(factors, [0.5, 0.5])
        step_of(optimizers, variables, "keras3", True)(factors)

    step = compiled(lambda factors: mirrored.run(replica, args=(factors,)), mode)
    scales = []
    for flags in RUN:
        step(tf.constant([0.5 if flag else np.inf for flag in flags]))
        scales.append(loss_scale.numpy())
    assert scales == right_scales(RUN)
    for optimizer, times in zip(optimizers, np.sum(RUN, axis=0)):
        assert int(optimizer.iterations.numpy()) == times


@pytest.mark.parametrize("looks", [False, True])
def test_in_a_graph_and_session(family, looks):
    """Also if the loss scale looks at the largest gradient, of both optimizers."""
    skip_without("a tf.compat.v1 graph", family)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loss_scale = DynamicLossScale(**SCALE)
        if looks:
            loss_scale.keep_largest()
        optimizers, _ = optimizers_of(family, loss_scale, 2, [1.0])
        variables = [tf.Variable([1.0]), tf.Variable([1.0])]
        factors = tf.compat.v1.placeholder(tf.float32, [2])
        train = [
            optimizer.minimize(lambda f=factor, v=variable: f * v, [variable])
            for optimizer, variable, factor in zip(
                optimizers, variables, tf.unstack(factors)
            )
        ]
        current = loss_scale()
        session.run(tf.compat.v1.global_variables_initializer())
        scales = []
        for number, flags in enumerate(RUN):
            good = [2.0**-number, 2.0**-4]
            fed = [g if flag else np.inf for g, flag in zip(good, flags)]
            session.run(train, {factors: fed})
            scales.append(float(session.run(current)))
            if looks:
                assert session.run(loss_scale.last_largest) == max(fed)
        assert scales == right_scales(RUN)
