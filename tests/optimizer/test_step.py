"""A step: what it holds is equal on all replicas, and what its graph leaves out."""

from __future__ import annotations

import inspect
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from models import compiled, variable_of
from predicates import nodes_run

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.optimizer import base
from lossscale.optimizer.step import Step

pytestmark = [pytest.mark.compiled_once, pytest.mark.either_keras2]


@pytest.fixture
def steps(monkeypatch):
    """Returns a list of the steps that are made."""
    made = []

    class Kept(Step):
        def run(self, bundle, apply):
            made.append(self)
            return super().run(bundle, apply)

    monkeypatch.setattr(base, "Step", Kept)
    return made


def _tensors_within(value):
    """Returns the tensors that an attribute holds, in a closure too."""
    if inspect.isfunction(value):
        value = [cell.cell_contents for cell in value.__closure__ or ()]
    if isinstance(value, partial):
        value = [value.args, value.keywords]
    return [leaf for leaf in tf.nest.flatten(value) if tf.is_tensor(leaf)]


def _as_told(value):
    """Returns what must be equal: a function's code, and else the value."""
    if inspect.isfunction(value):
        return value.__code__
    return (type(value), vars(value)) if "Replicas" in str(type(value)) else value


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_one_replica_decides_with_is_equal_on_all(
    family, mirrored, steps, unscales, mode
):
    # Where replicas meet, the first one's step runs for all of them.
    with mirrored.scope():
        weights = [variable_of(family, [1.0, 2.0]) for _ in range(2)]
        optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), DynamicLossScale())

    def replica():
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        optimizer.scale_loss(tf.constant(1.0))
        grads = [tf.fill([2], tf.cast(number, tf.float32)), None]
        if unscales:
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(list(zip(grads, weights)))

    def step():
        mirrored.run(replica)

    tf.function(step)() if mode == "graph" else step()
    assert len(steps) >= 2
    first, last = steps[-2:]
    for name, value in vars(first).items():
        assert _as_told(value) == _as_told(vars(last)[name]), name
        assert not _tensors_within(value), name


@pytest.mark.parametrize("unscales", [False, True])
def test_one_replica_divides_once(family, unscales):
    """In the branch that applies, unless the program asked for the quotients."""
    weight = variable_of(family, tf.ones([100, 100]))
    loss_scale = DynamicLossScale(backoff_factor=0.5)  # it multiplies
    optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), loss_scale)

    @tf.function(autograph=False)
    def step():
        grad = optimizer.scale_loss(tf.random.stateless_uniform([100, 100], [1, 2]))
        if unscales:
            (grad,) = optimizer.get_unscaled_gradients([grad])
        optimizer.apply_gradients([(grad, weight)])

    optimizer.build([weight])
    found = nodes_run(step, of="stateless_random_uniform")
    run = [node.name for node in found if node.op == "RealDiv"]
    outside = [name for name in run if "/then/" not in name and "/else/" not in name]
    assert len(outside) == (1 if unscales else 0)
    assert sum("/then/" in name for name in run) == (0 if unscales else 1)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_what_was_unscaled_and_is_not_applied_has_its_say(family, mode):
    weight = variable_of(family, [1.0, 1.0])
    optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), DynamicLossScale())

    def step(other):
        grads = [optimizer.scale_loss(each) for each in (tf.ones([2]), other)]
        first, _ = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients([(first, weight)])

    step = compiled(step, mode)
    for other, left in ((1.0, 0.0), (float("inf"), 0.0), (2.0, -1.0)):
        step(tf.constant([0.0, other]))
        np.testing.assert_array_equal(weight.numpy(), [left, left])


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_a_quick_check_of_then_is_not_the_last_word(family, mode):
    # 2e38 + 2e38 is infinite, and both are finite. What else was unscaled was not, at
    # the second step.
    weight = variable_of(family, [1.0, 1.0])
    loss_scale = DynamicLossScale(1.0)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(2.0**-127), loss_scale)

    def step(other):
        grads = [optimizer.scale_loss(each) for each in (tf.fill([2], 2e38), other)]
        first, _ = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients([(first, weight)])

    step = compiled(step, mode)
    for other, skipped in ((1.0, 0), (float("nan"), 1), (1.0, 1)):
        step(tf.constant([other]))
        assert int(loss_scale.skipped_steps) == skipped


def test_what_was_there_before_clipping_is_not_kept_for_the_branch(family):
    # It would take as much memory again as all gradients.
    weight = variable_of(family, tf.ones([100, 100]))
    optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), DynamicLossScale())
    optimizer.build([weight])
    handed_out = []

    def step():
        grad = optimizer.scale_loss(tf.random.stateless_uniform([100, 100], [1, 2]))
        handed_out[:] = optimizer.get_unscaled_gradients([grad])
        grads, _ = tf.clip_by_global_norm(handed_out, 1.0)
        optimizer.apply_gradients([(grads[0], weight)])

    graph = tf.function(step, autograph=False).get_concrete_function().graph
    *_, branch = (op for op in graph.get_operations() if op.type == "If")
    assert not any(each is handed_out[0] for each in branch.inputs)
