"""Gradients are divided by what multiplied their loss, when the scale has moved since.

It grows at every good step here. Gradients are made where its tensor cannot be used
later: in a loop, a branch or a function that has ended.
"""

from __future__ import annotations

import pytest
import tensorflow as tf
from exact import S, Trained, sharing, warned
from models import compiled

from lossscale import DynamicLossScale

pytestmark = [
    pytest.mark.compiled_once,
    pytest.mark.either_keras2,
    pytest.mark.slow,
]

FACTORS = [0.25, 0.25, 0.5]


def in_a_loop(get, factors):
    first, total = tf.zeros([8]), tf.zeros([8])
    for i in tf.range(tf.size(factors)):
        grads = get(factors[i])
        first, total = first + grads[0], total + grads[-1]
    return [first, total]


def in_a_branch(get, factors):
    if factors[0] > 0.0:
        factor = tf.reduce_sum(factors)
        grads = get(factor)
    else:
        grads = get(factors[0])
    return [grads[0], grads[-1]]


def growing():
    return DynamicLossScale(S, increment_period=1)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("collect", [in_a_loop, in_a_branch])
@pytest.mark.parametrize("unscales", [False, True])
def test_two_share_and_the_first_one_moves_the_scale(family, collect, unscales, mode):
    first, second = sharing(family, growing())

    def step(factors):
        of_first = collect(first.scaled, factors)[:1]
        of_second = collect(second.scaled, factors)[:1]
        first.apply(of_first)
        if unscales:
            of_second = second.optimizer.get_unscaled_gradients(of_second)
        second.apply(of_second)

    step = compiled(step, mode)
    with warned(0):
        for number in range(1, 4):
            step(tf.constant(FACTORS))
            found = first.subtracted(), second.subtracted()
            assert found == (number, number)
            assert first.state()[0] == S * 2**number


def _maker(trained):
    @tf.function
    def make(factor):
        return trained.scaled(factor)

    return make


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_a_function_scales_in_each_run_of_a_training_loop(family, mode):
    trained = Trained(family, growing(), sizes=(8,))
    make = _maker(trained)

    def steps(factors):
        for i in tf.range(tf.size(factors)):
            trained.apply(make(factors[i]))

    with warned(0):
        compiled(steps, mode)(tf.constant(FACTORS))
    assert (trained.subtracted(), trained.state()[0]) == (1.0, S * 8)


def test_each_gradient_of_a_function_that_has_ended_is_applied_by_itself(family):
    # The first apply moves the scale. The step's state knows what multiplied the loss.
    trained = Trained(family, growing(), sizes=(8, 8))
    trained.build()
    make = _maker(trained)

    @tf.function
    def step(factor):
        grads = make(factor)
        for pair in zip(grads, trained.variables):
            trained.optimizer.apply_gradients([pair])

    with warned(0):
        step(tf.constant(1.0))
    assert trained.subtracted() == [1.0, 1.0]


def test_replicas_share_and_the_first_one_moves_the_scale(family, mirrored):
    with mirrored.scope():
        first, second = sharing(family, growing())

    def replica(factors):
        of_first = in_a_loop(first.scaled, factors)[:1]
        of_second = in_a_loop(second.scaled, factors)[:1]
        first.apply(of_first)
        second.apply(of_second)

    @tf.function
    def step(factors):
        mirrored.run(replica, args=(factors,))

    with warned(0):
        for number in range(1, 3):
            step(tf.constant(FACTORS))
            # Both replicas' gradients are added up.
            found = first.subtracted(), second.subtracted()
            assert found == (2.0 * number, 2.0 * number)
            assert first.state()[0] == S * 2**number
