"""One loss scale for two optimizers, as in a GAN: adjusted once per step, from both.

On replicas it is in test_loops_in_every_mode.py.
"""

import numpy as np
import pytest
import tensorflow as tf
from exact import S, clip, sharing
from strategies import SCALE, rule

from lossscale import DynamicLossScale

#: Finite on the first optimizer and on the second, step by step.
RUN = [(True, True), (True, False), (False, True), (False, False), (True, True)]


def apply(trained, grads, unscales):
    if unscales:
        grads = clip(trained.optimizer.get_unscaled_gradients(grads))
    trained.apply(grads)


@pytest.mark.smoke
@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_one_adjustment_per_step(family, unscales, together):
    """Two losses are scaled together, or one after the other."""
    loss_scale = DynamicLossScale(**SCALE)
    both = sharing(family, loss_scale)

    @tf.function
    def step(factors):
        pairs = list(zip(both, tf.unstack(factors)))
        lists = (trained.scaled(factor) for trained, factor in pairs)
        for trained, grads in zip(both, list(lists) if together else lists):
            apply(trained, grads, unscales)

    # It grows at some steps: with the first apply, after the second loss was scaled.
    run = [*RUN, *RUN[::-1], (True, True)]
    scales = []
    for flags in run:
        step(tf.constant([0.5 if flag else np.inf for flag in flags]))
        scales.append(float(loss_scale))
    assert scales == [scale for scale, *_ in rule(map(all, run))]
    for trained, times in zip(both, np.sum(run, axis=0)):
        assert int(trained.optimizer.iterations.numpy()) == times
        assert trained.subtracted() == 0.5 * times
    assert loss_scale.skipped_steps.numpy() == sum(not all(flags) for flags in run)


@pytest.mark.parametrize("unscales", [True, False])
def test_one_loss_scaled_by_one_of_them(family, unscales):
    loss_scale = DynamicLossScale(64.0, 1)
    first, second = sharing(family, loss_scale)

    @tf.function
    def step(factor):
        grads = first.scaled(factor)
        for trained in (first, second):
            apply(trained, grads, unscales)

    for factor, subtracted in ((0.5, 0.5), (np.inf, 0.5), (0.25, 0.75)):
        step(tf.constant(factor))
        assert first.subtracted() == second.subtracted() == subtracted
    assert float(loss_scale) == 128.0


def test_of_applies_in_the_branches_of_a_condition_only_one_runs(pair):
    """They are of the same step as what the other optimizer applied before."""
    first, second = pair

    @tf.function
    def step(has_first):
        one, two = first.scaled(0.5), second.scaled(0.5)
        second.apply(two)
        if has_first:
            first.apply(one)
        else:
            first.apply([2.0 * grad for grad in one])

    for number, has_first in enumerate((True, False, False), 1):
        step(tf.constant(has_first))
        assert first.state() == (S, number, 0)
    assert (first.subtracted(), second.subtracted()) == (2.5, 1.5)


def test_each_may_be_applied_more_often_than_the_other(family):
    both = sharing(family)
    for index in [0, 0, 0, 1] * 2:
        both[index].apply(both[index].scaled(0.5))
    assert both[0].state() == (S, 6, 0)


def test_an_overflow_that_another_optimizer_unscaled_counts_once(family):
    loss_scale = DynamicLossScale(**SCALE)
    other, own = sharing(family, loss_scale)
    for unscales, factor in ((other, np.inf), (own, 0.5)):
        grads = own.scaled(factor)
        own.apply(unscales.optimizer.get_unscaled_gradients(grads))
    assert int(loss_scale.skipped_steps.numpy()) == 1
    assert own.subtracted() == 0.5
