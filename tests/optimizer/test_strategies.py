"""Every strategy, entry point and Keras: all replicas skip a step, or all apply it.

The infinity is on the first replica, the last, all of them or none. Every copy of every
variable stays equal to the last bit, and to what one replica computes unwrapped.

The strategy with replicas is MirroredStrategy on two of them. The last test runs some
of this file once more on four, of this one and another, in processes of their own.

Put the flag of one replica in the place of the agreed one and these tests fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import strategies
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from impossible import why_not
from installed import DEVICES, ROOT, STRATEGY
from limits import skip_without
from models import assert_same, variable_of
from reference import reference
from strategies import RUN, SHORT_RUN, applied, rule

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.runtime.mode import COMPILED_BY_XLA

ON_REPLICAS = STRATEGY
HERE = Path(__file__)


@pytest.fixture(params=["none", "one-device", ON_REPLICAS])
def place(request):
    """The name of a strategy."""
    return request.param


@pytest.fixture
def strategy(place, request):
    if place == "none":
        return None
    if place == "one-device":
        return tf.distribute.OneDeviceStrategy("CPU:0")
    return request.getfixturevalue("mirrored")


def skip_impossible(place, family, entry):
    if place == ON_REPLICAS:
        skip_without("adding up over replicas", family)
    reason = why_not(place, family.name, entry)
    if reason:
        pytest.skip(f"impossible, see impossible.py: {reason}")


def run_for(place, eagerly):
    # An eager step on replicas starts threads.
    return SHORT_RUN if eagerly and place == ON_REPLICAS else RUN


def assert_right(seen, run, weights):
    assert seen.states == rule(applied(run))
    assert seen.iterations == list(np.cumsum(applied(run)))
    assert len(seen.weights) == len(run)
    for ours, theirs in zip(seen.weights, weights):
        assert_same(ours, theirs)


@pytest.mark.peer_defect(1)
@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_fit(place, strategy, family, eagerly):
    skip_impossible(place, family, "fit")
    if place == ON_REPLICAS:
        skip_without("fit over replicas", family)
    run = run_for(place, eagerly)
    seen = strategies.fit(strategy, family, run, run_eagerly=eagerly)
    assert_right(seen, run, strategies.fit_on_one(family, run))


WAYS = {
    "keras3-in-scope": {"way": "keras3", "inside": True},
    "keras2-out-of-scope": {"way": "keras2", "inside": False},
    "eager": {"eagerly": True},
    "xla": COMPILED_BY_XLA,
}


@pytest.mark.peer_defect(1)
@pytest.mark.parametrize("way", WAYS)
def test_strategy_run(place, strategy, family, way):
    skip_impossible(place, family, "xla" if way == "xla" else "loop")
    run = run_for(place, way == "eager")
    seen = strategies.loop(strategy, family, run, **WAYS[way])
    replicas = strategies.count(strategy)
    assert_right(seen, run, strategies.loop_on_one(family, run, replicas))


@pytest.mark.peer_defect(23)
@pytest.mark.parametrize("way", ["keras2", "keras3"])
@pytest.mark.every_combination
@pytest.mark.slow_on_the_newest
def test_strategy_run_without_the_optimizers_aggregation(mirrored, family, way):
    skip_impossible(ON_REPLICAS, family, "unaggregated")
    seen = strategies.loop(mirrored, family, RUN, way, aggregate=False)
    assert_right(seen, RUN, strategies.loop_on_one(family, RUN, 1))


@pytest.mark.peer_defect(22)
@pytest.mark.parametrize("context", ["replica", "cross-replica"])
@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_update(place, strategy, context, eagerly):
    run = run_for(place, eagerly)
    seen = strategies.update(strategy, run, context, eagerly)
    assert seen.states == rule(applied(run))
    assert seen.answers == [{flag} for flag in applied(run)]


@pytest.mark.peer_defect(30)
def test_an_overflow_of_the_sum_moves_nothing(mirrored, family):
    """Of gradients that are finite in every partial sum but the whole one."""
    skip_impossible(ON_REPLICAS, family, "loop")
    replicas = len(DEVICES)
    with mirrored.scope():
        variable = variable_of(family, [1.0, 2.0], "float16")
        loss_scale = DynamicLossScale(1.0)
        optimizer = LossScaleOptimizer(strategies.momentum(family), loss_scale)
        optimizer.build([variable])

    def each(grad):
        one = tf.cast(optimizer.scale_loss(tf.constant(1.0)), tf.float16)
        optimizer.apply_gradients([(grad * one, variable)])

    step = tf.function(lambda grad: mirrored.run(each, (grad,)))
    largest = 65504.0 / replicas
    for _ in range(2):
        step(tf.constant([1.1 * largest, 0.0], tf.float16))
        np.testing.assert_array_equal(strategies.agreed(mirrored, variable), [1, 2])
        assert int(optimizer.iterations.numpy()) == 0
    assert loss_scale.skipped_steps.numpy() == 2
    for slot in strategies.slots(optimizer.inner_optimizer):
        assert not strategies.agreed(mirrored, slot).any()
    step(tf.constant([0.9 * largest, 0.0], tf.float16))
    assert int(optimizer.iterations.numpy()) == 1
    strategies.assert_bit_equal(mirrored, [variable])


# Random runs

RULE = {
    "initial_loss_scale": 2.0**10,
    "increment_period": 3,
    "multiplier": 2.0,
    "backoff_factor": 0.25,
    "hysteresis": 2,
    "hysteresis_reset": ["growth", "backoff"],
    "min_loss_scale": 2.0**-4,
    "max_loss_scale": 2.0**20,
}


class Training:
    """A traced step that many runs can be driven through."""

    def __init__(self, strategy, family):
        self.strategy, self.family = strategy, family
        with strategy.scope():
            self.variable = variable_of(family, [0.0, 0.0])
            self.loss_scale = DynamicLossScale(**RULE)
            self.optimizer = LossScaleOptimizer(
                family.optimizers.SGD(0.25), self.loss_scale
            )
            self.optimizer.build([self.variable])
        self.first = [v.numpy() for v in self.loss_scale.variables]
        self.step = tf.function(lambda added: strategy.run(self.each, (added,)))

    def each(self, added):
        number = strategies.replica()
        grad = strategies.gradient(number, tf.gather(added, number))
        grad *= self.optimizer.scale_loss(tf.constant(1.0))
        self.optimizer.apply_gradients([(grad, self.variable)])

    def run(self, specials):
        """Runs from the beginning, and returns the scale after each step."""
        for variable, value in zip(self.loss_scale.variables, self.first):
            variable.assign(value)
        self.variable.assign([0.0, 0.0])
        self.optimizer.inner_optimizer.iterations.assign(0)
        scales = []
        for added in specials:
            self.step(tf.constant(added))
            scales.append(float(self.loss_scale.numpy()))
        return scales


@pytest.fixture(scope="module")
def trainings():
    return {}


def random_run(number, steps, share):
    """Returns what is added to each replica's gradient in each step."""
    rng = np.random.default_rng(number)
    shape = [steps, len(DEVICES)]
    special = rng.choice(np.float32([np.inf, -np.inf, np.nan]), shape)
    return np.where(rng.random(shape) < share, special, np.float32(0))


@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(number=st.integers(0, 2**32 - 1), share=st.sampled_from([0.01, 0.1, 0.6]))
def test_a_random_run(trainings, mirrored, family, number, share):
    skip_impossible(ON_REPLICAS, family, "loop")
    specials = random_run(number, 50, share)
    training = trainings.get(family.name)
    if training is None:
        training = trainings[family.name] = Training(mirrored, family)
    flags = [bool(np.isfinite(added).all()) for added in specials]
    assert training.run(specials) == reference(RULE, flags)
    assert training.loss_scale.skipped_steps.numpy() == flags.count(False)
    assert int(training.optimizer.iterations.numpy()) == flags.count(True)
    own = [*training.loss_scale.variables, training.variable]
    strategies.assert_bit_equal(mirrored, own)
    total = sum(strategies.gradient(n, 0.0) for n in range(len(DEVICES))).numpy()
    expected = -0.25 * total * flags.count(True)
    np.testing.assert_array_equal(strategies.agreed(mirrored, own[-1]), expected)


# This file once more, in processes of its own


@pytest.mark.slow
@pytest.mark.parametrize("on", ["mirrored:4", "central:4"])
def test_another_strategy_or_more_replicas(on):
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "slow or not slow"]
    command += ["-p", "no:cacheprovider", "--color=no", str(HERE)]
    command += [str(HERE.parent / "test_sharing.py"), "-k"]
    # How many replicas there are matters to the sum, and what a strategy is to all.
    chosen = "sum" if "mirrored" in on else "central or replicas or sum or random"
    answer = subprocess.run(
        [*command, f"({chosen}) and not another"],
        cwd=ROOT,
        env={**os.environ, "LOSSSCALE_TESTS_ON": on},
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout[-3000:]
    assert " passed" in answer.stdout
