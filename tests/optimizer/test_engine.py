"""The engine, held by an optimizer that is of no framework.

In a graph, and on replicas: scales/test_guard.py takes steps of one in every mode, and
test_cut_runs.py goes on from its checkpoint.
"""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from exact import heard
from strategies import last_replica_gets, scope_of

import lossscale
from lossscale import DynamicLossScale, LossScaleEngine
from lossscale.optimizer.engine import EngineOfWrapper, Host

MODES = ["graph", "mirrored"]


class SGD:
    """A framework that nobody has heard of, in six lines."""

    def __init__(self, learning_rate):
        self.learning_rate = learning_rate

    def apply(self, grads, variables):
        context = tf.distribute.get_replica_context()
        for grad, variable in zip(context.all_reduce("SUM", grads), variables):
            variable.assign_sub(self.learning_rate * grad)


class Run:
    """A loop around an engine. The true gradient of each weight is `gradient`."""

    def __init__(self, mode, request, loss_scale=None, **options):
        mirrored = request.getfixturevalue("mirrored") if mode == "mirrored" else None
        self.strategy = mirrored or tf.distribute.get_strategy()
        self.replicas, self.mode = self.strategy.num_replicas_in_sync, mode
        self.optimizer = SGD(0.5 / self.replicas)
        with scope_of(mirrored):
            scale = DynamicLossScale(1024.0) if loss_scale is None else loss_scale
            self.engine = LossScaleEngine(scale, **options)
            same = tf.VariableAggregation.ONLY_FIRST_REPLICA
            self.weight = tf.Variable([1.0, 1.0], aggregation=same)

    def compiled(self, step):
        """Returns a function of a number for each replica, which runs `step`."""
        if self.mode != "mirrored":
            step = tf.function(step)
            return lambda *numbers: step(tf.constant(numbers[-1]))

        def of_replica(first, last):
            step(last_replica_gets(last, first))

        run = tf.function(lambda *pair: self.strategy.run(of_replica, pair))
        return lambda *pair: run(*map(tf.constant, pair))

    def scaled_gradients(self, gradient):
        with tf.GradientTape() as tape:
            loss = self.engine.scale_loss(tf.reduce_sum(self.weight) * gradient)
        return tape.gradient(loss, [self.weight])

    def apply(self, grads):
        return self.engine.apply(grads, [self.weight], self.optimizer.apply)


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.mark.parametrize("unscales", [False, True], ids=["scaled", "unscaled"])
def test_an_overflow_on_the_last_replica_skips_the_step_on_all(mode, request, unscales):
    run = Run(mode, request)
    engine = run.engine

    def step(gradient):
        grads = run.scaled_gradients(gradient)
        if unscales:
            grads = engine.unscale(grads)
            grads = [tf.clip_by_value(grad, -1.0, 1.0) for grad in grads]
        run.apply(grads)

    step = run.compiled(step)
    step(1.0, 1.0)
    np.testing.assert_array_equal(run.weight.numpy(), [0.5, 0.5])
    step(1.0, float("inf"))
    np.testing.assert_array_equal(run.weight.numpy(), [0.5, 0.5])
    assert float(engine.loss_scale) == 512
    assert engine.loss_scale.skipped_steps.numpy() == 1
    assert engine.nonfinite_loss() == "inf"
    step(1.0, 1.0)
    np.testing.assert_array_equal(run.weight.numpy(), [0.0, 0.0])
    assert engine.applied_steps.numpy() == 2
    numbers = [number for number, _ in engine.record.skipped()[1]]
    assert numbers == [1]


@pytest.mark.parametrize("how", ["backoff", "skip"])
def test_what_was_not_finite_is_named_and_a_bad_loss_told_unless_skipped(
    mode, request, how
):
    run = Run(mode, request, DynamicLossScale(2.0**120), nonfinite_loss=how)
    loss_scale = run.engine.loss_scale

    def step(gradient, bad):
        (grad,) = run.scaled_gradients(bad)
        run.apply([grad * gradient])

    of_gradients = run.compiled(lambda gradient: step(gradient, 1.0))
    of_gradients(1.0, 2.0**100)
    ((name, kind, variable),) = run.engine.nonfinite_gradients()
    assert (name, kind) == (run.weight.name.split(":")[0], "inf")
    assert variable is run.weight
    assert run.engine.nonfinite_loss() is None
    assert float(loss_scale) == 2.0**119
    of_loss = run.compiled(lambda gradient: step(1.0, gradient))
    of_loss(1.0, float("nan"))
    assert run.engine.nonfinite_loss() == "nan"
    assert float(loss_scale) == (2.0**118 if how == "backoff" else 2.0**119)
    assert loss_scale.skipped_steps.numpy() == 2
    assert run.engine.applied_steps.numpy() == 0
    np.testing.assert_array_equal(run.weight.numpy(), [1.0, 1.0])


def test_the_names_in_a_checkpoint(tmp_path, request):
    run = Run("graph", request)
    path = tf.train.Checkpoint(engine=run.engine).save(str(tmp_path / "here"))
    names = [name.split("/.ATTR")[0] for name, _ in tf.train.list_variables(path)]
    assert sorted(name for name in names if name.startswith("engine/")) == [
        "engine/applied_steps",
        "engine/loss_scale/bad_steps",
        "engine/loss_scale/consecutive_skipped_steps",
        "engine/loss_scale/current_loss_scale",
        "engine/loss_scale/good_steps",
        "engine/loss_scale/last_step_finite",
        "engine/loss_scale/skipped_steps",
    ]


def test_a_count_of_ones_own_is_not_counted_for_it(request):
    mine = tf.Variable(7, dtype=tf.int64)
    run = Run("graph", request)
    run.engine = EngineOfWrapper(Host(lambda: mine), DynamicLossScale(1024.0))
    run.apply(run.scaled_gradients(1.0))
    assert run.engine.applied_steps is mine
    assert mine.numpy() == 7
    run.apply(run.scaled_gradients(float("inf")))
    assert [number for number, _ in run.engine.record.skipped()[1]] == [7]


def test_bad_arguments_are_refused():
    for name, value, error in (
        ("loss_scale", None, TypeError),
        ("loss_scale", -1.0, ValueError),
        ("communication_dtype", "int8", ValueError),
    ):
        with pytest.raises(error, match=f"`{name}` must "):
            LossScaleEngine(**{name: value})


def test_gradients_of_another_shape_are_refused_before_the_step_is_counted(request):
    run = Run("graph", request)
    rows = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([0, 1]), tf.constant([2]))
    for grad in (tf.ones([3]), rows):
        run.scaled_gradients(1.0)
        with pytest.raises(ValueError, match="`grads` must have the shapes"):
            run.apply([grad])
    assert run.engine.loss_scale.good_steps.numpy() == 0


def test_neither_the_engine_nor_what_it_stands_on_knows_a_keras():
    room = Path(lossscale.optimizer.__file__).parent
    for module in ("engine", "step", "pending", "sharing", "reduction"):
        nodes = ast.walk(ast.parse((room / f"{module}.py").read_text()))
        code = [getattr(node, "id", getattr(node, "attr", "")) for node in nodes]
        named = [
            each
            for each in code
            if "keras" in each.lower() and each != "keras_versions"
        ]
        assert not named, module


def test_a_warning_begins_with_the_engine_and_its_first_variable():
    weights = [tf.Variable([1.0], name=name) for name in ("first", "second")]
    engine = LossScaleEngine()
    with heard() as told:
        engine.apply([tf.constant([1.0])] * 2, weights, lambda *_: None)
    (message,) = told
    begins = "LossScaleEngine for 'first' and others: The loss was never scaled"
    assert message.startswith(begins)
