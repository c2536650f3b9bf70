"""Why a step was skipped: which gradients, infinity, NaN or a spike, on any replica."""

import copy

import numpy as np
import pytest
import tensorflow as tf
from exact import Trained, of_loss
from limits import skip_without
from models import assert_same, build, compiled, variable_of
from strategies import last_replica_gets, scope_of

from lossscale import (
    DynamicLossScale,
    LossScaleEngine,
    LossScaleOptimizer,
    SpikeGuard,
)
from lossscale.gradients.check import SMALL
from lossscale.runtime.mode import COMPILED_BY_XLA

INF, NAN = float("inf"), float("nan")
#: A large variable, two small equal ones, one without a gradient, and an empty one.
SHAPES = [[SMALL + 1], [3], [1], [3], [0], [2, 2]]


class Six:
    """An optimizer of six variables, and steps whose gradients are given."""

    def __init__(self, family, mode="graph", strategy=None):
        with scope_of(strategy):
            self.variables = [variable_of(family, tf.ones(shape)) for shape in SHAPES]
            dynamic = DynamicLossScale(8.0, min_loss_scale=2.0**-10)
            self.optimizer = LossScaleOptimizer(family.optimizers.SGD(0.5), dynamic)
        self.change = None
        on_each = lambda *args: strategy.run(self._step, args)  # noqa: E731
        self._run = compiled(on_each if strategy else self._step, mode)

    def step(self, loss=1.0, **special):
        """Takes a step with gradients of ones, of which some end in another value.

        Of several replicas, only the last one has these, and this loss.
        """
        grads = [np.ones(shape, np.float32) for shape in SHAPES]
        for position, value in special.items():
            grads[int(position[1:])].flat[-1] = value
        del grads[2]
        self._run(tf.constant(loss), list(map(tf.constant, grads)))

    def _step(self, loss, grads):
        """Takes one with gradients of this loss: a tape shows it."""
        loss = last_replica_gets(loss, 1.0)
        grads = [last_replica_gets(grad, tf.ones_like(grad)) for grad in grads]
        grads = of_loss(self.optimizer.scale_loss, loss, grads)
        grads.insert(2, None)
        if self.change:
            grads = self.change(self.optimizer.get_unscaled_gradients(grads))
        self.optimizer.apply_gradients(list(zip(grads, self.variables)))

    def told(self):
        """Returns the kinds of the gradients at fault, by position, and of the loss."""
        return at_fault(self.optimizer, self.variables), self.optimizer.nonfinite_loss()


def at_fault(optimizer, variables):
    positions = {id(variable): i for i, variable in enumerate(variables)}
    faults = optimizer.nonfinite_gradients()
    return {positions[id(each.variable)]: each.kind for each in faults}


@pytest.fixture
def six(family):
    return Six(family)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "mode", ["eager", "graph", "replicas", pytest.param("xla", marks=pytest.mark.slow)]
)
def test_each_gradient_at_fault_is_told_and_how(family, mirrored, mode):
    """The optimizer is built in its first step, or before."""
    on_replicas = ("graph", mirrored) if mode == "replicas" else (mode,)
    six = Six(family, *on_replicas)
    if mode != "graph":
        build(six.optimizer, six.variables)
    assert six.told() == ({}, None)
    six.step()
    assert six.told() == ({}, None)
    six.step(g0=INF, g3=NAN, loss=INF)
    assert six.told() == ({0: "inf", 3: "nan"}, "inf")
    six.step()  # a good step leaves what is known of the last skipped one
    assert six.told() == ({0: "inf", 3: "nan"}, "inf")
    six.step(g1=-INF, g5=NAN)
    assert six.told() == ({1: "inf", 5: "nan"}, None)
    six.step(g3=NAN, loss=NAN)
    assert six.told() == ({3: "nan"}, "nan")


def by_norm(grads):
    """An infinite norm makes a NaN of every gradient that is not finite."""
    norm = tf.linalg.global_norm([g for g in grads if g is not None])
    return [None if g is None else g / norm for g in grads]


def by_value(grads):
    """A clipped infinity is a number."""
    return [None if g is None else tf.clip_by_value(g, -1.0, 1.0) for g in grads]


@pytest.mark.parametrize("clip", [by_norm, by_value])
def test_what_is_clipped_is_told_as_it_was(six, clip):
    six.change = clip
    six.step(g3=INF)
    assert six.told() == ({3: "inf"}, None)


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize(
    ("dtype", "number", "scale"),
    [
        ("float32", 3e38, 0.25),
        ("float16", 6e4, 0.5),
        ("bfloat16", 3.3895e38, 0.9975),
    ],
)
def test_an_overflow_that_the_division_makes_is_told(
    family, dtype, number, scale, unscales
):
    sizes = (3, SMALL + 1)
    variables = [variable_of(family, np.ones([size]), dtype) for size in sizes]
    dynamic = DynamicLossScale(scale, min_loss_scale=2.0**-10)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), dynamic)
    optimizer.build(variables)

    @tf.function(**COMPILED_BY_XLA)
    def step(*values):
        optimizer.scale_loss(tf.constant(1.0))
        grads = [tf.fill([n], tf.cast(v, dtype)) for n, v in zip(sizes, values)]
        if unscales:
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(zip(grads, variables))

    for bad in range(2):
        dynamic.current_loss_scale.assign(scale)
        step(*(tf.constant(number if at == bad else 1.0) for at in range(2)))
        assert at_fault(optimizer, variables) == {bad: "inf"}
    for variable in variables:
        np.testing.assert_array_equal(np.array(variable.numpy(), np.float32), 1.0)


@pytest.mark.parametrize("is_built", [True, False])
def test_of_lists_that_are_applied_in_turn_the_last_fault_is_told(is_built):
    engine, variables = LossScaleEngine(), [tf.Variable(1.0) for _ in range(2)]
    if is_built:
        engine.build(variables)

    @tf.function
    def step(grads):
        for grad, variable in zip(tf.unstack(grads), variables):
            engine.apply([engine.scale_loss(grad)], [variable], lambda *_: None)

    for bad in (0, 1, 0):
        step(tf.constant([INF if at == bad else 1.0 for at in range(2)]))
        assert at_fault(engine, variables) == {bad: "inf"}
    if is_built:
        assert step.experimental_get_tracing_count() == 1  # no variable is made in it


def test_it_is_printed_in_lines_without_values(six):
    six.step(g0=INF, g5=NAN)
    found = six.optimizer.nonfinite_gradients()
    lines = [
        f"NonfiniteGradient(name={each.name!r}, kind={kind!r}, shape={shape})"
        for each, kind, shape in zip(found, ("inf", "nan"), ((SMALL + 1,), (2, 2)))
    ]
    assert str(found) == "[" + ",\n ".join(lines) + "]"


def test_copies_do_not_hold_it(six, family):
    skip_without("copying", family)
    six.step(g0=INF)
    assert copy.deepcopy(six.optimizer).nonfinite_gradients() == []
    assert six.told() == ({0: "inf"}, None)


@pytest.mark.smoke
@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("on", ["one replica", "two"])
def test_a_spike_is_named_and_changes_nothing(family, mirrored, unscales, on):
    """It is in the last of the variables and, on two replicas, on the last of them."""
    if on == "two":
        skip_without("adding up over replicas", family)
    with scope_of(mirrored if on == "two" else None):
        guard, scale = SpikeGuard(window=3), DynamicLossScale(64.0)
        trained = Trained(family, scale, (2, 2), guard=guard)
    optimizer = trained.optimizer

    def step(largest):
        first, last = trained.scaled(1.0)
        grads = [0.25 * first, -last_replica_gets(largest, 0.125) * last]
        if unscales:  # clipped, a spike is as small as the others
            grads = optimizer.get_unscaled_gradients(grads)
            grads, _ = tf.clip_by_global_norm(grads, 2.0**-4)
        trained.apply(grads)

    on_each = lambda largest: mirrored.run(step, (largest,))  # noqa: E731
    take = tf.function(on_each if on == "two" else step)
    assert optimizer.last_spike() is None
    for _ in range(4):
        take(tf.constant(1.0))
    before = [np.array(variable.numpy()) for variable in trained.variables]
    take(tf.constant(1024.0))
    assert_same([variable.numpy() for variable in trained.variables], before)
    assert int(optimizer.iterations.numpy()) == 4
    spike = optimizer.last_spike()
    assert spike.variable is trained.variables[1]
    assert "v1" in spike.name
    assert (spike.largest, spike.limit) == (1024.0, 2.0)
    shown = f"Spike(name={spike.name!r}, largest=1024.0, limit=2.0, shape=(2,))"
    assert str(spike) == shown
    assert optimizer.nonfinite_gradients() == []
    take(tf.constant(INF))
    assert (int(guard.spikes.numpy()), int(scale.skipped_steps.numpy())) == (1, 1)
    assert float(scale.numpy()) == 32.0
    assert [each.kind for each in optimizer.nonfinite_gradients()] == ["inf"]
    assert optimizer.last_spike() == spike
