"""Replicas train as one: all of them skip a step, or all apply it.

The infinity is on the first replica, the last, all of them or none. Every copy of every
variable stays equal to the last bit, and to what one replica computes unwrapped.

The strategy is MirroredStrategy on two replicas. The last test runs some of this file
once more on four, and with another strategy, in processes of their own. That every loop
trains in every mode is in test_loops_in_every_mode.py.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import benchmark
import numpy as np
import pytest
import strategies
import tensorflow as tf
from impossible import why_not
from installed import DEVICES, ROOT, STRATEGY
from limits import is_older, skip_without
from models import built, compiled, data, regression, variable_of
from strategies import RUN, SHORT_RUN, agreed, assert_right, last_replica_gets

from lossscale import DynamicLossScale, HeadroomLossScale, LossScaleOptimizer
from lossscale.runtime.mode import COMPILED_BY_XLA

HERE = Path(__file__)


#: How training is entered: "fit", or a loop that is driven in some way.
PROGRAMS = {
    "fit": strategies.fit,
    "fit, eager": partial(strategies.fit, run_eagerly=True),
    "loop": strategies.loop,
    "loop, keras2": partial(strategies.loop, way="keras2"),
    "loop, eager": partial(strategies.loop, how=lambda step: step),
}
#: What the optimizers that can leave the aggregation to the caller are told.
UNAGGREGATED = {
    "keras2-legacy": {"experimental_aggregate_gradients": False},
    "keras2-new": {"skip_gradients_aggregation": True},
}


def skip_impossible(family, entry):
    skip_without("adding up over replicas", family)
    if entry == "fit":
        skip_without("fit over replicas", family)
    if why_not(STRATEGY, family.name, entry):
        pytest.skip(f"impossible, see impossible.py: {family.name}, {entry}")


@pytest.mark.peer_defect(1)
@pytest.mark.parametrize(
    "program",
    ["fit", pytest.param("fit, eager", marks=pytest.mark.slow), "loop, keras2"],
)
def test_all_replicas_skip_a_step_or_all_apply_it(mirrored, family, program):
    entry, _, way = program.partition(", ")
    skip_impossible(family, entry)
    run = SHORT_RUN if way == "eager" else RUN  # it starts threads
    seen = PROGRAMS[program](mirrored, family, run)
    if entry == "fit":
        weights = strategies.fit_on_one(family, run)
    else:
        weights = strategies.loop_on_one(family, run, mirrored.num_replicas_in_sync)
    assert_right(seen, run, weights)


@pytest.mark.slow
def test_under_xla_one_device_with_a_strategy_is_as_one_without(family):
    strategy, xla = tf.distribute.OneDeviceStrategy("CPU:0"), COMPILED_BY_XLA
    seen = strategies.loop(strategy, family, RUN, how=tf.function(**xla))
    assert_right(seen, RUN, strategies.loop_on_one(family, RUN, 1))


@pytest.mark.each_version
@pytest.mark.every
@pytest.mark.peer_defect(23)
@pytest.mark.parametrize("program", ["loop", "loop, keras2", "loop, eager"])
def test_replicas_agree_though_the_caller_adds_the_gradients_up(
    mirrored, family, program
):
    skip_impossible(family, "unaggregated")
    drive = partial(PROGRAMS[program], arguments=UNAGGREGATED[family.name])
    seen = drive(mirrored, family, SHORT_RUN)
    assert_right(seen, SHORT_RUN, strategies.loop_on_one(family, SHORT_RUN, 1))


def step_of(strategy, optimizer, variables):
    """Returns a step with scaled gradients of the last replica, and of the others."""

    def replica(of_last, of_others):
        optimizer.scale_loss(tf.constant(1.0))
        grads = map(last_replica_gets, of_last, of_others)
        optimizer.apply_gradients(list(zip(grads, variables)))

    step = tf.function(lambda *pair: strategy.run(replica, pair))
    return lambda *pair: step(*(list(map(tf.constant, each)) for each in pair))


@pytest.mark.smoke
@pytest.mark.peer_defect(25)
@pytest.mark.peer_defect(30)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_only_a_sum_that_overflows_is_skipped(mirrored, family, dtype):
    """Every gradient is finite, and so is each sum of fewer than all."""
    skip_impossible(family, "loop")
    with mirrored.scope():
        variables = [variable_of(family, [1.0, 2.0], dtype) for _ in range(2)]
        loss_scale, inner = DynamicLossScale(1.0), strategies.momentum(family)
        optimizer = LossScaleOptimizer(inner, loss_scale)
        optimizer.build(variables)
    step, ones = step_of(mirrored, optimizer, variables), np.ones([2], dtype)
    share = np.finfo(dtype).max / len(DEVICES)

    def both(*second):
        return [ones, np.array(second, dtype)]

    for _ in range(2):
        step(both(1.1 * share, 0.0), both(1.1 * share, 0.0))
        for variable in variables:
            np.testing.assert_array_equal(agreed(mirrored, variable), [1, 2])
    assert loss_scale.skipped_steps.numpy() == 2
    (fault,) = optimizer.nonfinite_gradients()
    assert (fault.kind, fault.variable) == ("inf", variables[1])
    assert optimizer.nonfinite_loss() is None
    for slot in strategies.slots(optimizer):
        assert not agreed(mirrored, slot).any()
    step(both(0.9 * share, 0.0), both(0.9 * share, 0.0))
    step(both(1.2 * share, 0.0), both(0.0, 1.2 * share))
    if len(DEVICES) == 2:  # of more, the order of the sum decides
        step(both(1.8 * share, 1.8 * share), both(-1.8 * share, -1.8 * share))
    assert int(optimizer.iterations.numpy()) == (3 if len(DEVICES) == 2 else 2)
    assert loss_scale.skipped_steps.numpy() == 2
    strategies.assert_bit_equal(mirrored, variables)


@pytest.mark.smoke
@pytest.mark.peer_defect(24)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_clipping_in_one_run_hides_nothing_from_the_next(family, mirrored, mode):
    with mirrored.scope():
        optimizer, variable = built(family, DynamicLossScale(8.0))

    def differentiate(special):
        optimizer.scale_loss(tf.constant(1.0))
        grads = [last_replica_gets(special, [8.0, 0.0])]
        return tf.clip_by_value(optimizer.get_unscaled_gradients(grads)[0], -1.0, 1.0)

    def apply(grad):
        optimizer.apply_gradients([(grad, variable)])

    def step(special):
        grads = mirrored.run(differentiate, args=(special,))
        mirrored.run(apply, args=(grads,))  # in new threads

    step = compiled(step, mode)
    step(tf.constant([np.inf, 0.0]))
    np.testing.assert_array_equal(agreed(mirrored, variable), [1.0, 2.0])
    assert optimizer.loss_scale.skipped_steps.numpy() == 1
    step(tf.constant([8.0, 0.0]))
    assert int(optimizer.iterations.numpy()) == 1


def test_slots_may_be_created_within_a_step(family, mirrored):
    # A bare Keras 3 optimizer fails here: its slots' initial values belong to a trace.
    with mirrored.scope():
        variable = variable_of(family, [1.0, 2.0])
        optimizer = LossScaleOptimizer(family.optimizers.Adam(0.5), 8.0)
    step_of(mirrored, optimizer, [variable])([[8.0, 0.0]], [[8.0, 0.0]])
    np.testing.assert_allclose(agreed(mirrored, variable), [0.5, 2.0], rtol=1e-5)


#: What Keras 3 does in its own way on replicas, and whether it must fail in a graph.
SETTINGS = {
    "accumulation": ({"gradient_accumulation_steps": 2}, True),
    "ema": ({"use_ema": True, "ema_overwrite_frequency": 2}, (3, 16)),
    "clipnorm": ({"clipnorm": 1.0}, False),
}


@pytest.mark.every
@pytest.mark.peer_defect(13)
@pytest.mark.peer_defect(14)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_keras_does_or_fails_as_bare(family, mirrored, name):
    """In a branch Keras 3 can meet eagerly, and in a graph one from 3.16 on."""
    setting, fails = SETTINGS[name]
    if fails:
        skip_without("gradient accumulation and EMA on replicas", family)
    skip_without("adding up over replicas", family)
    bare, wrapped = (weights_with(family, mirrored, setting, w) for w in (False, True))
    assert wrapped == bare
    eagerly, in_a_graph = bare
    assert eagerly != [1.0, 2.0]
    if fails is True or (fails and is_older(family, fails)):
        assert in_a_graph == "merge_call"


def weights_with(family, mirrored, setting, wrap):
    """Returns a weight after two eager steps, and after one in a graph or its error."""
    with mirrored.scope():
        variable = variable_of(family, [1.0, 2.0])
        optimizer = family.optimizers.SGD(0.5, **setting)
        if wrap:
            optimizer = LossScaleOptimizer(optimizer, DynamicLossScale(8.0))
        if hasattr(optimizer, "build"):
            optimizer.build([variable])

    def each():
        scale = optimizer.scale_loss(1.0) if wrap else 1.0
        grad = last_replica_gets([8.0, 0.0], [0.0, 8.0]) * scale
        optimizer.apply_gradients([(grad, variable)])

    for _ in range(2):
        mirrored.run(each)
    eagerly = agreed(mirrored, variable).tolist()
    try:
        tf.function(mirrored.run)(each)
    except RuntimeError as error:
        return eagerly, "merge_call" if "merge_call" in str(error) else str(error)
    return eagerly, agreed(mirrored, variable).tolist()


@pytest.mark.slow  # XLA and two replicas: it compiles long
@pytest.mark.peer_defect(28)
def test_xla_fails_or_works_as_with_a_bare_optimizer(family, mirrored, rng):
    skip_without("compile(jit_compile=...)", family)
    ends = []
    for wrap in (lambda inner: inner, LossScaleOptimizer):
        with mirrored.scope():
            optimizer = wrap(family.optimizers.SGD(0.1))
            model = regression(family, optimizer, jit_compile=True)
        try:
            model.fit(*data(rng, 8), batch_size=8, verbose=0)
            ends.append("trains")
        except (ValueError, tf.errors.OpError) as error:
            ends.append(type(error))
    bare, wrapped = ends
    assert wrapped == bare


def test_apply_in_cross_replica_context_is_refused(family, mirrored):
    with mirrored.scope():
        optimizer, variable = built(family, DynamicLossScale(8.0))
    with mirrored.scope(), pytest.raises(ValueError, match="in replica context"):
        optimizer.apply_gradients([(tf.constant([1.0, 1.0]), variable)])
    assert optimizer.loss_scale.skipped_steps.numpy() == 0


class TPUStrategyWithoutTPU(tf.distribute.TPUStrategy):
    """What can be had of a TPUStrategy where there is no TPU: its class.

    It runs as OneDeviceStrategy does.
    """

    def __init__(self):
        one = tf.distribute.OneDeviceStrategy("CPU:0")
        extended = type(one.extended)(self, "CPU:0")
        tf.distribute.Strategy.__init__(self, extended)

    def run(self, fn, args=()):
        return tf.distribute.Strategy.run(self, fn, args)


def test_on_a_tpu_no_optimizer_is_made_and_no_gradient_applied(family):
    says = "must not be used with TPUStrategy: TPUs compute in bfloat16"
    optimizer, variable = built(family, DynamicLossScale(8.0))
    strategy, grad = TPUStrategyWithoutTPU(), tf.constant([1.0, 1.0])
    with strategy.scope(), pytest.raises(ValueError, match=says):
        LossScaleOptimizer(family.optimizers.SGD(1.0))
    with pytest.raises(ValueError, match=says):
        strategy.run(lambda: optimizer.apply_gradients([(grad, variable)]))
    np.testing.assert_array_equal(variable.numpy(), [1.0, 2.0])


@pytest.mark.parametrize("loss_scale", [DynamicLossScale, HeadroomLossScale])
@pytest.mark.parametrize("shapes", [[(2,)], [(2,), (3, 4), (5,)]], ids=len)
def test_one_message_is_all_that_crosses_for_our_sake(
    family, mirrored, shapes, loss_scale
):
    """In a step that is not in doubt: counted in the graph, beside the bare step."""
    skip_without("adding up over replicas", family)
    counts = benchmark.count(mirrored, family, shapes, loss_scale)
    assert counts["lossscale"] == counts["bare"] + 1
    assert counts["bare"] >= 1  # the gradients cross, and are seen to


@pytest.mark.slow
@pytest.mark.parametrize("on", ["mirrored:4", "central:4"])
def test_another_strategy_or_more_replicas(on):
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "slow or not slow"]
    command += ["-p", "no:cacheprovider", "--color=no", str(HERE)]
    command += [str(HERE.parent / "test_loops_in_every_mode.py"), "-k"]
    # How many replicas there are matters to the sum, and what a strategy is to all.
    chosen = "sum" if "mirrored" in on else "replicas and (all or agree or shared)"
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
