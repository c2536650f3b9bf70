"""nonfinite_loss="skip", and losses that are only infinite because of float16.

Their gradients are finite once the loss scale is low enough. So the loss scale must
fall, however many good steps are in between, of this optimizer or of another one. A bad
batch now and then must not lower it.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import compiled, variable_of
from strategies import last_replica_gets, scope_of

from lossscale import DynamicLossScale, LossScaleOptimizer, SpikeGuard
from lossscale.runtime import keras_versions

INF, NAN = float("inf"), float("nan")
GRAPHS = [pytest.param(m, marks=pytest.mark.slow) for m in ("graph", "mirrored")]
LATER = ["eager", "graph", GRAPHS[1]]
#: The loss is infinite at every loss scale, and its gradients are at those above 2**6.
START, FITS = 2.0**9, 2.0**6


class Trained:
    """An optimizer that trains four weights, all ones, at a rate of 0."""

    def __init__(self, family, scale, how="skip", guard=None):
        inner = family.optimizers.SGD(0.0)
        self.optimizer = LossScaleOptimizer(
            inner, scale, guard=guard, nonfinite_loss=how
        )
        self.variable = variable_of(family, np.ones([4], np.float32))
        self.optimizer.build([self.variable])
        self.optimizer.iterations  # noqa: B018 - Keras 2 makes it when it is asked for

    def step(self, loss):
        """Takes a step with `loss(weights)`."""
        tensor = keras_versions.tensor_of(self.variable)
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            scaled = self.optimizer.scale_loss(loss(tensor))
        grads = tape.gradient(scaled, [tensor])
        self.optimizer.apply_gradients(list(zip(grads, [self.variable])))

    @property
    def applied(self):
        return int(self.optimizer.applied_steps.numpy())


def good(weights, here=1.0):
    del here
    return tf.reduce_sum(weights)


def of_float16(weights, here=1.0):
    """Returns a loss that is summed in float16, where it is infinite.

    The sum of four squares of 200 is 160,000. Each gradient is 800.
    """
    values = tf.cast(weights * here, tf.float16) * 200.0
    return tf.cast(tf.reduce_sum(values * values), tf.float32) / 100.0


def bad(weights, here=1.0):
    return tf.reduce_sum(weights) * tf.where(here > 0.0, NAN, 1.0)


def runner(mode, mirrored, function):
    """Returns a function of no arguments that takes a step in a mode."""
    if mode == "mirrored":
        return tf.function(lambda: mirrored.run(function))
    return compiled(function, mode)


@pytest.fixture
def strategy(mode, request):
    return request.getfixturevalue("mirrored") if mode == "mirrored" else None


def of_last_replica(mode, loss):
    """Returns a loss that is finite on all replicas but the last."""
    if mode != "mirrored":
        return loss
    return lambda weights: loss(weights, last_replica_gets(1.0, 0.0))


@pytest.mark.parametrize("mode", LATER)
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_good_steps_of_another_optimizer_do_not_hide_it(family, mode, strategy, count):
    """Each in a function of its own, and one loss scale for all."""
    with scope_of(strategy):
        scale = DynamicLossScale(START, 10**6)
        every = [Trained(family, scale) for _ in range(count)]
    last = of_last_replica(mode, of_float16)
    losses = [good] * (count - 1) + [last]
    steps = [
        runner(mode, strategy, lambda one=one, loss=loss: one.step(loss))
        for one, loss in zip(every, losses)
    ]
    rounds = 45
    for _ in range(rounds):
        for step in steps:
            step()
    assert float(scale.numpy()) == FITS
    assert [each.applied for each in every] == [rounds] * (count - 1) + [rounds - 30]


@pytest.mark.parametrize("mode", ["eager", *GRAPHS])
def test_two_of_three_that_share_count_each_their_own(family, mode, strategy):
    with scope_of(strategy):
        scale = DynamicLossScale(START, 10**6)
        every = [Trained(family, scale) for _ in range(3)]
    last = of_last_replica(mode, bad)

    def together(turns):
        def step():
            for one, loss in zip(every, turns):
                if loss is not None:
                    one.step(loss)

        return runner(mode, strategy, step)

    both, first = together([last, last, good]), together([last, None, good])
    for _ in range(5):
        first()
    for _ in range(4):
        both()
    assert float(scale.numpy()) == START
    both()  # the tenth of the first: one step of all of them
    assert float(scale.numpy()) == START / 2
    for _ in range(4):
        both()
    assert float(scale.numpy()) == START / 2
    both()  # the tenth of the second
    assert float(scale.numpy()) == START / 4
    assert [each.applied for each in every] == [0, 0, 15]


def steps_of(trained, losses, mode, strategy):
    """Returns a step of each loss."""
    return [
        runner(mode, strategy, lambda loss=loss: trained.step(loss)) for loss in losses
    ]


@pytest.mark.parametrize(
    "mode", [pytest.param("eager", marks=pytest.mark.slow), "graph", "mirrored"]
)
def test_two_tasks_that_alternate(family, mode, strategy):
    with scope_of(strategy):
        trained = Trained(family, DynamicLossScale(START, 10**6))
    last = of_last_replica(mode, of_float16)
    steps = steps_of(trained, (good, last), mode, strategy)
    for _ in range(45):
        for step in steps:
            step()
    assert float(trained.optimizer.loss_scale.numpy()) == FITS
    # The 13th bad loss counts, then the 26th and the 39th.
    assert trained.applied == 45 + 45 - 39


@pytest.mark.parametrize("mode", LATER)
def test_one_bad_batch_now_and_then_never_lowers_it(family, mode, strategy):
    with scope_of(strategy):
        trained = Trained(family, DynamicLossScale(START, 10**6))
    last = of_last_replica(mode, bad)
    steps = steps_of(trained, (good, last), mode, strategy)
    for number in range(60):
        steps[number % 10 == 9]()
    assert float(trained.optimizer.loss_scale.numpy()) == START
    assert trained.applied == 54


@pytest.mark.parametrize("make", [lambda: None, SpikeGuard], ids=["none", "guard"])
def test_an_optimizer_that_counts_nothing_has_every_tenth_counted(family, make):
    """As larq's, whose `iterations` stay at 0 while good steps are in between."""
    scale = DynamicLossScale(START, 10**6)
    trained = Trained(family, scale, guard=make())
    counted = keras_versions.tensor_of(trained.optimizer.applied_steps)
    for number in range(1, 31):
        trained.step(bad)
        trained.step(good)
        counted.assign(0)
        assert float(scale.numpy()) == START / 2.0 ** (number // 10)


def test_it_goes_on_with_another_loss_scale(family):
    trained = Trained(family, DynamicLossScale(START, 10**6))
    for _ in range(9):
        trained.step(bad)
    trained.optimizer = trained.optimizer.with_loss_scale(DynamicLossScale(START))
    trained.step(bad)
    assert float(trained.optimizer.loss_scale) == START / 2
