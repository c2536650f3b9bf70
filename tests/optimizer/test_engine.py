"""The engine, held by an optimizer that is of no framework.

`dialect` is covered by the tests of each Keras's wrapper.
"""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from exact import heard
from models import compiled
from strategies import last_replica_gets, scope_of

import lossscale
from lossscale import DynamicLossScale, LossScaleEngine
from lossscale.optimizer.engine import EngineOfWrapper, Host

MODES = ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow), "mirrored"]


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
            step = compiled(step, self.mode)
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


def test_gradients_that_overflow_are_named(mode, request):
    run = Run(mode, request, DynamicLossScale(2.0**120))

    def step(gradient):
        grads = run.scaled_gradients(1.0)
        run.apply([grads[0] * gradient])

    run.compiled(step)(1.0, 2.0**100)
    ((name, kind, variable),) = run.engine.nonfinite_gradients()
    assert (name, kind) == (run.weight.name.split(":")[0], "inf")
    assert variable is run.weight
    assert run.engine.nonfinite_loss() is None
    assert run.engine.applied_steps.numpy() == 0


def test_a_bad_loss_is_not_told_with_skip(mode, request):
    run = Run(mode, request, nonfinite_loss="skip")
    step = run.compiled(
        lambda gradient: run.apply(run.scaled_gradients(gradient)) and None
    )
    step(1.0, float("nan"))
    assert float(run.engine.loss_scale) == 1024
    assert run.engine.loss_scale.skipped_steps.numpy() == 1
    np.testing.assert_array_equal(run.weight.numpy(), [1.0, 1.0])


def test_sums_in_float16_leave_out_the_optimizers_own(request):
    run = Run("mirrored", request, communication_dtype="float16")

    def apply(grads, variables):  # they are added up already
        for grad, variable in zip(grads, variables):
            variable.assign_sub(run.optimizer.learning_rate * grad)

    def step(gradient):
        grads = run.scaled_gradients(gradient)
        run.engine.apply(grads, [run.weight], apply)

    step = run.compiled(step)
    step(2.0**-20, 2.0**-21)  # of which float16 holds no sum
    change = 0.25 * (2.0**-20 + 2.0**-21)
    np.testing.assert_array_equal(run.weight.numpy(), np.float32(1 - change))
    step(1.0, 2.0**10)  # times 1024 that is more than float16 holds
    np.testing.assert_array_equal(run.weight.numpy(), np.float32(1 - change))
    assert float(run.engine.loss_scale) == 512


def test_engines_that_share_a_loss_scale_count_one_step(request):
    scale = DynamicLossScale(1024.0, increment_period=2)
    first, second = (Run("graph", request, scale) for _ in range(2))

    @tf.function
    def step(gradient):
        for run, factor in ((first, 1.0), (second, gradient)):
            run.apply(run.scaled_gradients(factor))

    step(tf.constant(1.0))
    assert scale.good_steps.numpy() == 1
    step(tf.constant(float("inf")))
    assert scale.skipped_steps.numpy() == 1
    assert float(scale) == 512
    # Each skips by its own gradients.
    assert first.weight.numpy().tolist() == [0.0, 0.0]
    assert second.weight.numpy().tolist() == [0.5, 0.5]


def test_a_checkpoint_holds_the_loss_scale_and_the_count(tmp_path, request):
    run, other = (Run("eager", request) for _ in range(2))
    step = run.compiled(lambda gradient: run.apply(run.scaled_gradients(gradient)))
    for gradient in (1.0, float("inf"), 1.0):
        step(gradient)
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
    tf.train.Checkpoint(engine=other.engine).restore(path).assert_consumed()
    assert other.engine.applied_steps.numpy() == 2
    assert float(other.engine.loss_scale) == 512


def test_a_count_of_ones_own_is_not_counted_for_it(request):
    mine = tf.Variable(7, dtype=tf.int64)
    run = Run("eager", request)
    run.engine = EngineOfWrapper(Host(lambda: mine), DynamicLossScale(1024.0))
    run.apply(run.scaled_gradients(1.0))
    assert run.engine.applied_steps is mine
    assert mine.numpy() == 7
    run.apply(run.scaled_gradients(float("inf")))
    assert [number for number, _ in run.engine.record.skipped()[1]] == [7]


CHECKS = "`loss_scale` must be one that checks gradients"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"loss_scale": None}, TypeError, "`loss_scale` must not be None"),
        ({"loss_scale": -1.0}, ValueError, "must be"),
        ({"nonfinite_loss": "no"}, ValueError, "`nonfinite_loss` must be"),
        ({"communication_dtype": "int8"}, ValueError, "`communication_dtype` must be"),
        ({"loss_scale": 8.0, "nonfinite_loss": "skip"}, ValueError, CHECKS),
        ({"loss_scale": 8.0, "communication_dtype": "float16"}, ValueError, CHECKS),
    ],
)
def test_bad_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        LossScaleEngine(**arguments)


def test_gradients_of_another_shape_are_refused_before_the_step_is_counted(request):
    run = Run("eager", request)
    run.scaled_gradients(1.0)
    with pytest.raises(ValueError, match="`grads` must have the shapes"):
        run.apply([tf.ones([3])])
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
