"""Why a step was skipped: which gradients, infinity, NaN or a spike, on any replica."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from exact import Trained, of_loss
from limits import skip_without
from models import assert_same, build, compiled, differ, variable_of
from strategies import assert_bit_equal, last_replica_gets, scope_of

import lossscale
from lossscale.gradients.check import SMALL
from lossscale.runtime.mode import COMPILED_BY_XLA

INF, NAN = float("inf"), float("nan")
#: A large variable, two small equal ones, one without a gradient, and an empty one.
SHAPES = [[SMALL + 1], [3], [1], [3], [0], [2, 2]]


class Six:
    """An optimizer of six variables, and steps whose gradients are given."""

    def __init__(self, family):
        self.variables = [variable_of(family, tf.ones(shape)) for shape in SHAPES]
        dynamic = lossscale.DynamicLossScale(8.0, min_loss_scale=2.0**-10)
        self.optimizer = lossscale.LossScaleOptimizer(
            family.optimizers.SGD(0.5), dynamic
        )

    def step(self, loss=1.0, change=None, mode="graph", **special):
        """Takes a step with gradients of ones, of which some end in another value.

        A tape shows that they are those of the loss. `change` is called with them once
        they are unscaled.
        """
        grads = [np.ones(shape, np.float32) for shape in SHAPES]
        for position, value in special.items():
            grads[int(position[1:])].flat[-1] = value
        del grads[2]

        def step(loss, grads):
            grads = of_loss(self.optimizer.scale_loss, loss, grads)
            grads.insert(2, None)
            if change:
                grads = change(self.optimizer.get_unscaled_gradients(grads))
            self.optimizer.apply_gradients(zip(grads, self.variables))

        compiled(step, mode)(tf.constant(loss), list(map(tf.constant, grads)))

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
    "mode", ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow)]
)
def test_each_gradient_at_fault_is_told_and_how(six, mode):
    """The optimizer is built in its first step, or before."""
    if mode != "graph":
        build(six.optimizer, six.variables)
    assert six.told() == ({}, None)
    six.step(mode=mode)
    assert six.told() == ({}, None)
    six.step(g0=INF, g3=NAN, loss=INF, mode=mode)
    assert six.told() == ({0: "inf", 3: "nan"}, "inf")
    six.step(mode=mode)  # a good step leaves what is known of the last skipped one
    assert six.told() == ({0: "inf", 3: "nan"}, "inf")
    six.step(g1=-INF, g5=NAN, mode=mode)
    assert six.told() == ({1: "inf", 5: "nan"}, None)
    six.step(g3=NAN, loss=NAN, mode=mode)
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
    six.step(g3=INF, change=clip)
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
    dynamic = lossscale.DynamicLossScale(scale, min_loss_scale=2.0**-10)
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD(1.0), dynamic)
    optimizer.build(variables)

    @tf.function(**COMPILED_BY_XLA)
    def step(grads):
        optimizer.scale_loss(tf.constant(1.0))
        if unscales:
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(zip(grads, variables))

    for bad in range(2):
        dynamic.current_loss_scale.assign(scale)
        step(
            [
                tf.cast(tf.fill([size], number if position == bad else 1.0), dtype)
                for position, size in enumerate(sizes)
            ]
        )
        assert at_fault(optimizer, variables) == {bad: "inf"}
    for variable in variables:
        np.testing.assert_array_equal(np.array(variable.numpy(), np.float32), 1.0)


def test_lists_of_variables_that_are_applied_in_turn(six):
    build(six.optimizer, six.variables)
    bad, good = tf.constant([1.0, 1.0, INF]), tf.ones([3])

    @tf.function
    def step(first, second):
        for grad, variable in ((first, six.variables[1]), (second, six.variables[3])):
            six.optimizer.scale_loss(tf.constant(1.0))
            six.optimizer.apply_gradients([(grad, variable)])

    step(good, bad)
    assert six.told() == ({3: "inf"}, None)
    step(bad, good)
    assert six.told() == ({1: "inf"}, None)
    assert step.experimental_get_tracing_count() == 1  # no variable is made in it


def test_of_lists_that_were_never_built_the_last_fault_is_told():
    engine = lossscale.LossScaleEngine("dynamic")
    variables = [tf.Variable([1.0]) for _ in range(2)]
    for bad in (0, 1, 0):
        for at, variable in enumerate(variables):
            grad = engine.scale_loss(tf.constant([INF if at == bad else 1.0]))
            engine.apply([grad], [variable], lambda *_: None)
        assert at_fault(engine, variables) == {bad: "inf"}


def test_names_are_those_of_keras(family):
    keras = family.keras
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, name="head")])
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD(0.5))
    model.compile(optimizer, "mse")
    x, y = np.ones([4, 2], np.float32), np.ones([4, 1], np.float32)
    y[3] = NAN
    model.fit(x, y, verbose=0)
    found = [(*f.name.split("/")[-2:], f.kind) for f in optimizer.nonfinite_gradients()]
    assert found == [("head", "kernel", "nan"), ("head", "bias", "nan")]
    assert optimizer.nonfinite_loss() == "nan"


def test_it_is_printed_in_lines_without_values(six):
    six.step(g0=INF, g5=NAN)
    found = six.optimizer.nonfinite_gradients()
    lines = [
        f"NonfiniteGradient(name={each.name!r}, kind={kind!r}, shape={shape})"
        for each, kind, shape in zip(found, ("inf", "nan"), ((SMALL + 1,), (2, 2)))
    ]
    assert str(found) == "[" + ",\n ".join(lines) + "]"


def test_copies_and_checkpoints_do_not_hold_it(six, family, tmp_path):
    six.step(g0=INF)
    path = str(tmp_path / "checkpoint")
    tf.train.Checkpoint(optimizer=six.optimizer).write(path)
    keys = [key for key, _ in tf.train.list_variables(path)]
    assert any("consecutive_skipped_steps" in key for key in keys)
    assert not any("record" in key or "nonfinite" in key for key in keys)
    skip_without("copying", family)
    assert copy.deepcopy(six.optimizer).nonfinite_gradients() == []
    assert six.told() == ({0: "inf"}, None)


def test_what_is_bad_on_the_last_replica_alone_is_told(family, mirrored):
    with mirrored.scope():
        six = Six(family)
        six.optimizer.build(six.variables)

    def each(last_only):
        grads = [tf.ones(variable.shape) for variable in six.variables]
        grads[1] *= last_replica_gets(last_only, 1.0)
        loss = last_replica_gets(last_only, 1.0)
        grads = of_loss(six.optimizer.scale_loss, loss, grads)
        six.optimizer.apply_gradients(zip(grads, six.variables))

    step = tf.function(lambda last_only: mirrored.run(each, args=(last_only,)))
    step(tf.constant(1.0))
    assert six.told() == ({}, None)
    for value, kind in ((NAN, "nan"), (INF, "inf")):
        step(tf.constant(value))
        assert six.told() == ({1: kind}, kind)


@pytest.mark.smoke
@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("on", ["one replica", "two"])
def test_a_spike_changes_nothing_and_is_named(family, mirrored, unscales, on):
    """It is in the last of the variables and, on two replicas, on the last of them."""
    if on == "two":
        skip_without("adding up over replicas", family)
    with scope_of(mirrored if on == "two" else None):
        guard = lossscale.SpikeGuard(window=3)
        scale = lossscale.DynamicLossScale(64.0)
        trained = Trained(family, scale, (2, 2), guard=guard)
    optimizer = trained.optimizer

    def step(largest):
        first, last = trained.scaled(1.0)
        grads = [0.25 * first, -last_replica_gets(largest, 0.125) * last]
        if unscales:
            grads = optimizer.get_unscaled_gradients(grads)
            grads, _ = tf.clip_by_global_norm(grads, 2.0**-4)
        trained.apply(grads)

    run = tf.function(partial(mirrored.run, step) if on == "two" else step)

    def take(largest):
        size = tf.constant(largest)
        run((size,) if on == "two" else size)

    def values():
        return [np.array(variable.numpy()) for variable in trained.variables]

    assert optimizer.last_spike() is None
    for _ in range(4):
        take(1.0)
    before = values()
    take(1024.0)  # clipped, it would be as small as the others
    assert_same(values(), before)
    assert int(optimizer.iterations.numpy()) == 4
    assert (int(guard.spikes.numpy()), int(scale.skipped_steps.numpy())) == (1, 0)
    spike = optimizer.last_spike()
    assert spike.variable is trained.variables[1]
    assert "v1" in spike.name
    assert (spike.largest, spike.limit) == (1024.0, 2.0)
    shown = f"Spike(name={spike.name!r}, largest=1024.0, limit=2.0, shape=(2,))"
    assert str(spike) == shown
    assert optimizer.nonfinite_gradients() == []
    take(1.0)
    assert differ(values(), before)
    take(INF)
    assert (int(guard.spikes.numpy()), int(scale.skipped_steps.numpy())) == (1, 1)
    assert float(scale.numpy()) == 32.0
    assert [each.kind for each in optimizer.nonfinite_gradients()] == ["inf"]
    assert optimizer.last_spike() == spike
    if on == "two":
        assert_bit_equal(mirrored, trained.variables)
