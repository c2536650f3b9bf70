"""An optimizer whose loss scale is a SpikeGuard: what is skipped, kept and told.

Spikes are on the last replica, and in the last of the variables.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from limits import skip_without
from models import assert_same, compiled, data, differ, regression, variable_of
from strategies import agreed, last_replica_gets

import lossscale
from lossscale import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScaleOptimizer,
    SpikeGuard,
)

MODES = ["eager", "graph"]


def guarded(family, guard=None, count=1):
    """Returns optimizers that share a guard, each with two variables of its own."""
    guard = guard or SpikeGuard(DynamicLossScale(64.0), window=3)
    pairs = []
    for _ in range(count):
        optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0, 0.5), guard)
        names = ["first", "last"]
        variables = [variable_of(family, [1.0, 1.0], name=name) for name in names]
        pairs.append((optimizer, variables))
    return guard, pairs


def step_of(optimizer, variables, loop="keras3"):
    """Returns a step whose gradients, unscaled, are what it is called with."""

    def step(first, last):
        grads = [optimizer.scale_loss(each) for each in (first, last)]
        if loop != "keras3":
            grads = optimizer.get_unscaled_gradients(grads)
            grads, _ = tf.clip_by_global_norm(grads, 2.0**-4)
        optimizer.apply_gradients(zip(grads, variables))

    return step


def values(variables):
    return [np.array(variable.numpy()) for variable in variables]


def run(step, largest):
    """Takes a step of which the last variable's gradient is the largest."""
    step(tf.constant([0.25, 0.0]), tf.constant([0.0, -largest]))


@pytest.mark.parametrize("mode", [*MODES, "xla"])
@pytest.mark.parametrize("loop", ["keras2", "keras3"])
def test_a_spike_changes_nothing_and_is_named(family, loop, mode):
    guard, [(optimizer, variables)] = guarded(family)
    step = compiled(step_of(optimizer, variables, loop), mode)
    assert optimizer.last_spike() is None
    for _ in range(4):
        run(step, 1.0)
    before = values(variables)
    run(step, 1024.0)  # clipped, it would be as small as the others
    assert_same(values(variables), before)
    assert int(optimizer.iterations.numpy()) == 4
    assert (int(guard.spikes), int(guard.skipped_steps)) == (1, 0)
    spike = optimizer.last_spike()
    assert spike.variable is variables[1]
    assert "last" in spike.name
    assert (spike.largest, spike.limit) == (1024.0, 2.0)
    shown = f"Spike(name={spike.name!r}, largest=1024.0, limit=2.0, shape=(2,))"
    assert str(spike) == shown
    assert optimizer.nonfinite_gradients() == []
    run(step, 1.0)
    assert differ(values(variables), before)
    run(step, np.inf)
    assert (int(guard.spikes), int(guard.skipped_steps)) == (1, 1)
    assert float(guard) == 32.0
    assert [each.kind for each in optimizer.nonfinite_gradients()] == ["inf"]
    assert optimizer.last_spike() == spike


@pytest.mark.parametrize("loop", ["keras2", "keras3"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_spike_on_the_last_replica_is_skipped_on_all(family, mirrored, loop, mode):
    skip_without("adding up over replicas", family)
    with mirrored.scope():
        guard, [(optimizer, variables)] = guarded(family)

    def replica(largest):
        grad = last_replica_gets([0.0, -largest], [0.0, 0.125])
        step_of(optimizer, variables, loop)(tf.constant([0.25, 0.0]), grad)

    step = compiled(lambda largest: mirrored.run(replica, args=(largest,)), mode)
    for _ in range(3):
        step(tf.constant(1.0))
    before = values(variables)
    step(tf.constant(1024.0))
    for variable, old in zip(variables, before):
        np.testing.assert_array_equal(agreed(mirrored, variable), old)
    assert int(optimizer.iterations.numpy()) == 3
    assert int(guard.spikes.numpy()) == 1
    spike = optimizer.last_spike()
    assert spike.variable is variables[1]
    assert (spike.largest, spike.limit) == (1024.0, 2.0)
    step(tf.constant(1.0))
    assert int(optimizer.iterations.numpy()) == 4


@pytest.mark.parametrize("mode", MODES)
def test_optimizers_that_share_a_guard(family, mode):
    guard, pairs = guarded(family, count=2)
    steps = [step_of(*pair) for pair in pairs]

    def step(one, other):
        for each, factor in zip(steps, (one, other)):
            each(tf.constant([0.25, 0.0]), tf.stack([0.0, factor]))

    step = compiled(step, mode)
    for _ in range(3):
        step(tf.constant(1.0), tf.constant(0.5))
    assert guard.recent.numpy().tolist() == [1.0] * 3  # one entry for each step
    applied = lambda: [int(o.iterations.numpy()) for o, _ in pairs]  # noqa: E731
    step(tf.constant(99.0), tf.constant(0.5))  # each skips by its own gradients
    assert applied() == [3, 4]
    step(tf.constant(1.0), tf.constant(99.0))
    assert applied() == [4, 4]
    assert (int(guard.spikes), int(guard.above_in_a_row)) == (2, 2)
    assert guard.recent.numpy().tolist() == [1.0] * 3
    assert (int(guard.loss_scale.good_steps), float(guard)) == (3, 64.0)
    step(tf.constant(99.0), tf.constant(np.inf))  # an overflow is an overflow
    assert applied() == [4, 4]
    assert (int(guard.spikes), int(guard.skipped_steps)) == (2, 1)
    assert float(guard) == 32.0
    step(tf.constant(1.0), tf.constant(0.5))
    assert applied() == [5, 5]
    assert int(guard.above_in_a_row) == 0


def test_lists_of_variables_in_turn(family):
    guard = SpikeGuard(1, window=2)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), guard)
    variables = [variable_of(family, [1.0], name=name) for name in ("one", "two")]
    if family.name == "keras3":
        optimizer.build(variables)

    def step(variable, size):
        grads = optimizer.get_unscaled_gradients([optimizer.scale_loss(size)])
        optimizer.apply_gradients([(grads[0], variable)])

    for _ in range(2):
        step(variables[0], tf.constant([1.0]))
    step(variables[0], tf.constant([50.0]))
    assert optimizer.last_spike().variable is variables[0]
    step(variables[1], tf.constant([70.0]))
    spike = optimizer.last_spike()
    assert (spike.variable is variables[1], spike.largest) == (True, 70.0)


def spiky(rng):
    """Returns data of which one batch of sixteen has wrong targets."""
    x, y = data(rng, 256)
    y[160:176] += 1e4
    return x, y


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_fit(family, rng, policy):
    x, y = spiky(rng)
    guard = SpikeGuard("dynamic" if policy == "mixed_float16" else 1, window=8)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(2.0**-8), guard)
    model = regression(family, optimizer, policy)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    skipped = int(guard.spikes.numpy()) + int(guard.skipped_steps.numpy())
    assert skipped >= 2  # in float16 an overflow comes before some of them
    assert int(optimizer.iterations.numpy()) == 32 - skipped
    assert policy == "mixed_float16" or optimizer.last_spike().largest > 100
    assert max(np.abs(weight).max() for weight in model.get_weights()) < 10


def state_by_name(optimizer):
    return {v.name: v.numpy().tolist() for v in optimizer.loss_scale.variables}


@pytest.mark.parametrize("suffix", ["keras", "h5"])
def test_files_of_keras_hold_both_states(family, rng, tmp_path, suffix):
    feature = {"keras": "an optimizer in a .keras file"}.get(suffix)
    skip_without(feature or "an optimizer in an .h5 file", family)
    x, y = spiky(rng)
    guard = SpikeGuard(DynamicLossScale(64.0, 7), 5.0, 8, 2, min_ratio=3.0)
    optimizer = LossScaleOptimizer(family.optimizers.Adam(2.0**-8), guard)
    model = regression(family, optimizer)
    model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    assert int(guard.spikes.numpy()) == 1
    path = str(tmp_path / f"model.{suffix}")
    model.save(path)
    again = family.keras.models.load_model(path)
    assert again.optimizer.loss_scale.get_config() == guard.get_config()
    assert state_by_name(again.optimizer) == state_by_name(optimizer)
    for each in (model, again):
        each.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    assert state_by_name(again.optimizer) == state_by_name(optimizer)
    assert_same(again.get_weights(), model.get_weights())


def test_the_gradients_are_read_as_often_as_by_one_that_looks(family):
    def reductions(loss_scale):
        _, [(optimizer, variables)] = guarded(family, loss_scale)
        step = tf.function(step_of(optimizer, variables))
        grads = [tf.constant([0.25, 0.0]), tf.constant([0.0, 1.0])]
        graph = step.get_concrete_function(*grads).graph
        kinds = [op.type for op in graph.get_operations()]  # outside of branches
        return kinds.count("Max"), kinds.count("Min")

    looking = reductions(HeadroomLossScale())
    assert reductions(SpikeGuard()) == looking
    assert reductions(lossscale.DynamicLossScale()) < looking
