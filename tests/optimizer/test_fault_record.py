"""A skipped step's faults: which gradients, infinity or NaN, on whichever replica."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import tensorflow as tf
from exact import of_loss
from limits import skip_without
from models import compiled, variable_of
from strategies import last_replica_gets

import lossscale
from lossscale.gradients.check import SMALL
from lossscale.runtime import keras_versions
from lossscale.runtime.mode import COMPILED_BY_XLA

INF, NAN = float("inf"), float("nan")


#: A large variable, two small equal ones, one without a gradient, and an empty one.
SHAPES = [[SMALL + 1], [3], [1], [3], [0], [2, 2]]


def gradients(**special):
    """Returns gradients of ones, of which some end in a value that is given."""
    grads = [np.ones(shape, np.float32) for shape in SHAPES]
    grads[2] = None
    for position, value in special.items():
        grads[int(position[1:])].flat[-1] = value
    return grads


def optimizer_of_six(family, built=True):
    """Returns an optimizer and the variables of `gradients`."""
    variables = [variable_of(family, tf.ones(shape)) for shape in SHAPES]
    dynamic = lossscale.DynamicLossScale(8.0, min_loss_scale=2.0**-10)
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD(0.5), dynamic)
    if built:
        optimizer.build(variables)
        optimizer.iterations  # noqa: B018 - Keras 2 makes it when it is asked for
    return optimizer, variables


def stepper(optimizer, variables, mode="eager", clip=None, are_scaled=True):
    """Returns a function that takes a step with a loss and gradients from outside.

    If these are the true ones, they are seen to be those of the loss.
    """

    def step(loss, grads):
        if are_scaled:
            optimizer.scale_loss(loss)
        else:
            grads = of_loss(optimizer.scale_loss, loss, grads)
        grads = list(grads)
        grads.insert(2, None)
        if clip:
            grads = clip(optimizer.get_unscaled_gradients(grads))
        optimizer.apply_gradients(zip(grads, variables))

    run = compiled(step, mode)

    def given(grads, loss=1.0):
        run(tf.constant(loss), [tf.constant(g) for g in grads if g is not None])

    return given


def seen(optimizer, variables):
    """Returns the positions of the gradients at fault, with their kinds."""
    positions = {id(variable): i for i, variable in enumerate(variables)}
    return {
        positions[id(each.variable)]: each.kind
        for each in optimizer.nonfinite_gradients()
    }


@pytest.mark.smoke
@pytest.mark.parametrize(
    "mode", ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow)]
)
def test_each_gradient_at_fault_is_told_and_how(family, mode):
    optimizer, variables = optimizer_of_six(family)
    step = stepper(optimizer, variables, mode, are_scaled=False)

    def told():
        return seen(optimizer, variables), optimizer.nonfinite_loss()

    assert told() == ({}, None)
    step(gradients())
    assert told() == ({}, None)
    step(gradients(g0=INF, g3=NAN), loss=INF)
    assert told() == ({0: "inf", 3: "nan"}, "inf")
    step(gradients())  # a good step leaves what is known of the last skipped one
    assert told() == ({0: "inf", 3: "nan"}, "inf")
    step(gradients(g1=-INF, g5=NAN))
    assert told() == ({1: "inf", 5: "nan"}, None)
    step(gradients(g3=NAN), loss=NAN)
    assert told() == ({3: "nan"}, "nan")
    optimizer.loss_scale.current_loss_scale.assign(0.25)
    step = stepper(optimizer, variables, mode)
    step(gradients(g5=3e38))  # it overflows when it is divided
    assert seen(optimizer, variables) == {5: "inf"}


def by_norm(grads):
    """An infinite norm makes a NaN of every gradient that is not finite."""
    norm = tf.linalg.global_norm([g for g in grads if g is not None])
    return [None if g is None else g / norm for g in grads]


def by_value(grads):
    """A clipped infinity is a number."""
    return [None if g is None else tf.clip_by_value(g, -1.0, 1.0) for g in grads]


@pytest.mark.parametrize(
    ("clip", "mode"),
    [(by_norm, "graph"), pytest.param(by_value, "xla", marks=pytest.mark.slow)],
)
def test_what_is_clipped_is_told_as_it_was(family, clip, mode):
    optimizer, variables = optimizer_of_six(family)
    step = stepper(optimizer, variables, mode, clip)
    step(gradients(g3=INF))
    assert seen(optimizer, variables) == {3: "inf"}


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize(
    ("dtype", "number", "scale"),
    [("float16", 6e4, 0.5), ("bfloat16", 3.3895e38, 0.9975)],
)
def test_overflow_made_by_rounding_is_told(family, dtype, number, scale, unscales):
    sizes = (3, SMALL + 1)
    variables = [variable_of(family, np.ones([size]), dtype) for size in sizes]
    dynamic = lossscale.DynamicLossScale(scale, min_loss_scale=0.5)
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD(1.0), dynamic)
    optimizer.build(variables)

    @tf.function(**COMPILED_BY_XLA)
    def step(grads):
        optimizer.scale_loss(tf.constant(1.0))
        if unscales:
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(zip(grads, variables))

    for bad in range(2):
        step(
            [
                tf.cast(tf.fill([size], number if position == bad else 1.0), dtype)
                for position, size in enumerate(sizes)
            ]
        )
        assert seen(optimizer, variables) == {bad: "inf"}
    for variable in variables:
        np.testing.assert_array_equal(np.array(variable.numpy(), np.float32), 1.0)


def test_lists_of_variables_that_are_applied_in_turn(family):
    optimizer, variables = optimizer_of_six(family)
    bad, good = tf.constant([1.0, 1.0, INF]), tf.ones([3])

    @tf.function
    def step(first, second):
        for grad, variable in ((first, variables[1]), (second, variables[3])):
            optimizer.scale_loss(tf.constant(1.0))
            optimizer.apply_gradients([(grad, variable)])

    step(good, bad)
    assert seen(optimizer, variables) == {3: "inf"}
    step(bad, good)
    assert seen(optimizer, variables) == {1: "inf"}
    assert step.experimental_get_tracing_count() == 1  # no variable is made in it


def test_without_being_built(family):
    optimizer, variables = optimizer_of_six(family, built=False)
    step = stepper(optimizer, variables, "graph")
    step(gradients(g3=NAN, g5=INF))
    assert seen(optimizer, variables) == {3: "nan", 5: "inf"}


def test_names_are_those_of_keras(family):
    keras = family.keras
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1, name="head")])
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD(0.5))
    model.compile(optimizer, "mse")
    x, y = np.ones([4, 2], np.float32), np.ones([4, 1], np.float32)
    y[3] = NAN
    model.fit(x, y, verbose=0)
    names = [each.name for each in optimizer.nonfinite_gradients()]
    assert [name.split("/")[-2:] for name in names] == [
        ["head", "kernel"],
        ["head", "bias"],
    ]
    assert {each.kind for each in optimizer.nonfinite_gradients()} == {"nan"}
    assert optimizer.nonfinite_loss() == "nan"


def test_it_is_printed_in_lines_without_values(family):
    optimizer, variables = optimizer_of_six(family)
    stepper(optimizer, variables)(gradients(_0=INF, _5=NAN))
    found = optimizer.nonfinite_gradients()
    lines = [
        f"NonfiniteGradient(name={each.name!r}, kind={kind!r}, shape={shape})"
        for each, kind, shape in zip(found, ("inf", "nan"), ((SMALL + 1,), (2, 2)))
    ]
    assert str(found) == "[" + ",\n ".join(lines) + "]"


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_on_the_last_replica(family, mirrored, mode):
    with mirrored.scope():
        optimizer, variables = optimizer_of_six(family)

    def each(last_only):
        grads = [tf.ones(variable.shape) for variable in variables]
        grads[1] *= last_replica_gets(last_only, 1.0)
        loss = last_replica_gets(last_only, 1.0)
        grads = of_loss(optimizer.scale_loss, loss, grads)
        optimizer.apply_gradients(zip(grads, variables))

    step = compiled(lambda last_only: mirrored.run(each, args=(last_only,)), mode)
    step(tf.constant(1.0))
    assert seen(optimizer, variables) == {}
    for value, kind in ((NAN, "nan"), (INF, "inf")):
        step(tf.constant(value))
        assert seen(optimizer, variables) == {1: kind}
        assert optimizer.nonfinite_loss() == kind


def test_a_training_step_can_be_exported(family, tmp_path):
    """It holds the record, which no checkpoint does."""
    optimizer, variables = optimizer_of_six(family)
    module = tf.Module()
    module.optimizer = optimizer
    module.weights = [keras_versions.tensor_of(variable) for variable in variables]

    @tf.function(input_signature=[tf.TensorSpec([3])])
    def train(grad):
        optimizer.scale_loss(tf.constant(1.0))
        grads = [tf.ones(variable.shape) for variable in variables]
        grads[3] = grad
        optimizer.apply_gradients(zip(grads, variables))
        return tf.identity(module.weights[3])

    module.train = train
    before = train(tf.ones([3])).numpy()
    tf.saved_model.save(module, str(tmp_path / "saved"))
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    np.testing.assert_array_equal(loaded.train(tf.constant([1.0, 1.0, INF])), before)
    np.testing.assert_array_equal(loaded.train(tf.ones([3])), before - 0.125)

    path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "checkpoint"))
    keys = [key for key, _ in tf.train.list_variables(path)]
    assert any("consecutive_skipped_steps" in key for key in keys)
    assert not any("record" in key or "nonfinite" in key for key in keys)


def test_a_copy_begins_anew(family):
    skip_without("copying", family)
    optimizer, variables = optimizer_of_six(family)
    stepper(optimizer, variables)(gradients(g1=INF))
    assert copy.deepcopy(optimizer).nonfinite_gradients() == []
    assert seen(optimizer, variables) == {1: "inf"}
