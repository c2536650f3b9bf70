"""An optimizer with a SpikeGuard: what is skipped, kept and told.

Spikes are on the last replica, and in the last of the variables.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from exact import Trained
from limits import skip_without
from models import assert_same, compiled, data, differ, regression
from strategies import agreed, last_replica_gets

from lossscale import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScaleOptimizer,
    SpikeGuard,
)

MODES = ["eager", "graph"]


def guarded(family, loss_scale=None, window=3, sizes=(2, 2), **options):
    """Returns an optimizer of two variables, and its guard."""
    guard = options.setdefault("guard", SpikeGuard(window=window))
    scale = DynamicLossScale(64.0) if loss_scale is None else loss_scale
    return Trained(family, scale, sizes, **options), guard


def step_of(trained, unscales=False):
    """Returns a step that is called with the largest gradient: the last one's."""

    def step(largest):
        first, last = trained.scaled(1.0)
        grads = [0.25 * first, -largest * last]
        if unscales:
            grads = trained.optimizer.get_unscaled_gradients(grads)
            grads, _ = tf.clip_by_global_norm(grads, 2.0**-4)
        trained.apply(grads)

    return step


def values(trained):
    return [np.array(variable.numpy()) for variable in trained.variables]


@pytest.mark.smoke
@pytest.mark.parametrize("mode", [*MODES, pytest.param("xla", marks=pytest.mark.slow)])
@pytest.mark.parametrize("unscales", [True, False])
def test_a_spike_changes_nothing_and_is_named(family, unscales, mode):
    trained, guard = guarded(family)
    optimizer, step = trained.optimizer, compiled(step_of(trained, unscales), mode)
    assert optimizer.last_spike() is None
    for _ in range(4):
        step(tf.constant(1.0))
    before = values(trained)
    step(tf.constant(1024.0))  # clipped, it would be as small as the others
    assert_same(values(trained), before)
    assert int(optimizer.iterations.numpy()) == 4
    assert (int(guard.spikes), int(optimizer.loss_scale.skipped_steps)) == (1, 0)
    spike = optimizer.last_spike()
    assert spike.variable is trained.variables[1]
    assert "v1" in spike.name
    assert (spike.largest, spike.limit) == (1024.0, 2.0)
    shown = f"Spike(name={spike.name!r}, largest=1024.0, limit=2.0, shape=(2,))"
    assert str(spike) == shown
    assert optimizer.nonfinite_gradients() == []
    step(tf.constant(1.0))
    assert differ(values(trained), before)
    step(tf.constant(np.inf))
    assert (int(guard.spikes), int(optimizer.loss_scale.skipped_steps)) == (1, 1)
    assert float(optimizer.loss_scale) == 32.0
    assert [each.kind for each in optimizer.nonfinite_gradients()] == ["inf"]
    assert optimizer.last_spike() == spike


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_spike_on_the_last_replica_is_skipped_on_all(
    family, mirrored, unscales, mode
):
    skip_without("adding up over replicas", family)
    with mirrored.scope():
        trained, guard = guarded(family)

    def replica(largest):
        step_of(trained, unscales)(last_replica_gets(largest, 0.125))

    step = compiled(lambda largest: mirrored.run(replica, args=(largest,)), mode)
    for _ in range(3):
        step(tf.constant(1.0))
    before = values(trained)
    step(tf.constant(1024.0))
    assert_same([agreed(mirrored, variable) for variable in trained.variables], before)
    assert int(trained.optimizer.iterations.numpy()) == 3
    assert int(guard.spikes.numpy()) == 1
    spike = trained.optimizer.last_spike()
    assert spike.variable is trained.variables[1]
    assert (spike.largest, spike.limit) == (1024.0, 2.0)
    step(tf.constant(1.0))
    assert int(trained.optimizer.iterations.numpy()) == 4


@pytest.mark.slow
def test_lists_of_variables_in_turn(family):
    trained, _ = guarded(family, 1, 2, (1, 1))
    if family.name == "keras3":
        trained.build()
    optimizer, variables = trained.optimizer, trained.variables

    def step(at, size):
        grads = optimizer.get_unscaled_gradients([trained.scaled(size)[at]])
        optimizer.apply_gradients([(grads[0], variables[at])])

    for _ in range(2):
        step(0, 1.0)
    step(0, 50.0)
    assert optimizer.last_spike().variable is variables[0]
    step(1, 70.0)
    spike = optimizer.last_spike()
    assert (spike.variable is variables[1], spike.largest) == (True, 70.0)


def spiky(rng):
    """Returns data of which one batch of sixteen has wrong targets."""
    x, y = data(rng, 256)
    y[160:176] += 1e4
    return x, y


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_fit(family, rng, policy):
    x, y = spiky(rng)
    guard, scale = SpikeGuard(window=8), "dynamic" if policy == "mixed_float16" else 1
    inner = family.optimizers.SGD(2.0**-8)
    optimizer = LossScaleOptimizer(inner, scale, guard=guard)
    model = regression(family, optimizer, policy)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    skipped = int(guard.spikes.numpy())
    skipped += int(optimizer.loss_scale.skipped_steps.numpy())
    assert skipped >= 2  # in float16 an overflow comes before some of them
    assert int(optimizer.iterations.numpy()) == 32 - skipped
    assert policy == "mixed_float16" or optimizer.last_spike().largest > 100
    assert max(np.abs(weight).max() for weight in model.get_weights()) < 10


@pytest.mark.slow
def test_the_gradients_are_read_as_often_as_by_one_that_looks(family):
    def reductions(loss_scale, guard=None):
        trained, _ = guarded(family, loss_scale, guard=guard)
        step = tf.function(step_of(trained))
        graph = step.get_concrete_function(tf.constant(1.0)).graph
        kinds = [op.type for op in graph.get_operations()]  # outside of branches
        return kinds.count("Max"), kinds.count("Min")

    looking = reductions(HeadroomLossScale())
    assert reductions(DynamicLossScale(), SpikeGuard()) == looking
    assert reductions(HeadroomLossScale(), SpikeGuard()) == looking
    assert reductions(DynamicLossScale()) < looking
