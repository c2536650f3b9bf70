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
from driving import EAGER_REPLICAS, MODES, drive
from impossible import why_not
from installed import DEVICES, ROOT, STRATEGY
from limits import skip_without
from models import variable_of
from strategies import RUN, SCALE, SHORT_RUN, applied, assert_right, rule

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.runtime.mode import COMPILED_BY_XLA

ON_REPLICAS = STRATEGY
HERE = Path(__file__)


ONE_DEVICE = pytest.param("one-device", marks=pytest.mark.slow)


@pytest.fixture(params=["none", ONE_DEVICE, ON_REPLICAS])
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


#: What the optimizers that can leave the aggregation to the caller are told.
UNAGGREGATED = {
    "keras2-legacy": {"experimental_aggregate_gradients": False},
    "keras2-new": {"skip_gradients_aggregation": True},
}


@pytest.mark.each_version
@pytest.mark.every
@pytest.mark.peer_defect(23)
@pytest.mark.parametrize("way", ["keras3-in-scope", "keras2-out-of-scope", "eager"])
def test_strategy_run_without_the_optimizers_aggregation(mirrored, family, way):
    skip_impossible(ON_REPLICAS, family, "unaggregated")
    run, arguments = run_for(ON_REPLICAS, way == "eager"), UNAGGREGATED[family.name]
    seen = strategies.loop(mirrored, family, run, arguments=arguments, **WAYS[way])
    assert_right(seen, run, strategies.loop_on_one(family, run, 1))


@pytest.mark.peer_defect(22)
@pytest.mark.parametrize("mode", [mode for mode in MODES if "replica" in mode])
def test_update(place, strategy, mode):
    flags = applied(run_for(place, mode in EAGER_REPLICAS))
    strategy = strategy or tf.distribute.get_strategy()
    found = drive(lambda: DynamicLossScale(**SCALE), flags, mode, strategy)
    assert found == ([scale for scale, *_ in rule(flags)], flags)


@pytest.mark.peer_defect(30)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("way", ["keras2", "keras3"])
def test_an_overflow_of_the_sum_moves_nothing(mirrored, family, dtype, way):
    """Of gradients that are finite in every partial sum but the whole one."""
    if why_not(ON_REPLICAS, family.name, "loop"):
        pytest.skip("impossible, see impossible.py")
    with mirrored.scope():
        variables = [variable_of(family, [1.0, 2.0], dtype) for _ in range(2)]
        loss_scale = DynamicLossScale(1.0)
        optimizer = LossScaleOptimizer(strategies.momentum(family), loss_scale)
        optimizer.build(variables)

    def each(grad):
        one = tf.cast(optimizer.scale_loss(tf.constant(1.0)), dtype)
        grads = [one * tf.ones([2], dtype), grad * one]
        if way == "keras2":
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(list(zip(grads, variables)))

    step = tf.function(lambda grad: mirrored.run(each, (grad,)))
    largest = np.finfo(dtype).max / len(DEVICES)
    for _ in range(2):
        step(tf.constant([1.1 * largest, 0.0], dtype))
        for variable in variables:
            np.testing.assert_array_equal(strategies.agreed(mirrored, variable), [1, 2])
        assert int(optimizer.iterations.numpy()) == 0
    assert loss_scale.skipped_steps.numpy() == 2
    (fault,) = optimizer.nonfinite_gradients()
    assert (fault.kind, fault.variable) == ("inf", variables[1])
    assert optimizer.nonfinite_loss() is None
    for slot in strategies.slots(optimizer):
        assert not strategies.agreed(mirrored, slot).any()
    step(tf.constant([0.9 * largest, 0.0], dtype))
    assert int(optimizer.iterations.numpy()) == 1
    strategies.assert_bit_equal(mirrored, variables)


# This file once more, in processes of its own


@pytest.mark.slow
@pytest.mark.parametrize("on", ["mirrored:4", "central:4"])
def test_another_strategy_or_more_replicas(on):
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "slow or not slow"]
    command += ["-p", "no:cacheprovider", "--color=no", str(HERE)]
    command += [str(HERE.parent / "test_sharing.py"), "-k"]
    # How many replicas there are matters to the sum, and what a strategy is to all.
    chosen = "sum" if "mirrored" in on else "central or replicas or sum"
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
