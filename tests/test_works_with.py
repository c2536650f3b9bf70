"""docs/works-with.md: a test for each row of its table, which has the row's name."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf
from limits import skip_without
from models import (
    assert_same,
    data,
    differ,
    inner_variables,
    regression,
    training_state,
    variable_of,
    with_infinity,
)
from pages import PAGES

from lossscale import DynamicLossScale, LossScaleOptimizer

QUIET = {"batch_size": 16, "verbose": 0, "shuffle": False}
ROWS = {}


def row(words):
    """Names the row of the table that a test holds."""

    def name(test):
        ROWS.setdefault(words, []).append(test.__name__)
        return test

    return name


def both(family, inner, how=None):
    """Returns the same model with a bare optimizer and with a wrapped one."""
    # A power of two: the gradients are those of the bare optimizer, to the last bit.
    wrapped = LossScaleOptimizer(inner(), DynamicLossScale(2.0**10))
    return [regression(family, each, **(how or {})) for each in (inner(), wrapped)]


def assert_works(family, inner, rng, how=None):
    """A good run ends as the bare one, and a skipped step changes nothing.

    The quick tests have each setting in a loop: test_composition.py.
    """
    bare, wrapped = both(family, inner, how)
    x, y = data(rng)
    losses = [
        model.fit(x, y, epochs=2, **QUIET).history["loss"] for model in (bare, wrapped)
    ]
    assert losses[0] == losses[1]
    assert_same(training_state(bare), training_state(wrapped))
    before = training_state(wrapped)
    wrapped.fit(with_infinity(x[:16]), y[:16], **QUIET)
    assert int(wrapped.optimizer.loss_scale.skipped_steps.numpy()) == 1
    assert_same(training_state(wrapped), before)
    wrapped.fit(x, y, **QUIET)
    assert differ(training_state(wrapped), before)


@row("`clipnorm`, `clipvalue`, `global_clipnorm`")
@pytest.mark.slow
@pytest.mark.parametrize("setting", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_clipping_of_the_inner_optimizer(family, rng, setting):
    assert_works(family, lambda: family.optimizers.SGD(0.5, **{setting: 0.01}), rng)


@row("Weight decay")
@pytest.mark.slow
def test_weight_decay(family, rng):
    skip_without("weight_decay", family)
    assert_works(family, lambda: family.optimizers.Adam(0.05, weight_decay=0.1), rng)


@row("Weight averages (`use_ema=True`)")
@pytest.mark.slow
def test_weight_averages(family, rng):
    skip_without("use_ema", family)
    assert_works(family, lambda: family.optimizers.SGD(0.1, use_ema=True), rng)


@row("`gradient_accumulation_steps` (Keras 3)")
@pytest.mark.slow
def test_accumulated_gradients(family, rng):
    skip_without("gradient_accumulation_steps", family)

    def inner():
        return family.optimizers.SGD(0.1, gradient_accumulation_steps=2)

    assert_works(family, inner, rng)
    # The batch that overflows is left out: the update is made of the other two.
    bare, wrapped = both(family, inner)
    x, y = data(rng, 32)
    bare.fit(x, y, **QUIET)
    bad = np.concatenate([x[:16], with_infinity(x[:16]), x[16:]])
    wrapped.fit(bad, np.concatenate([y[:16], y[:16], y[16:]]), **QUIET)
    assert_same(bare.get_weights(), wrapped.get_weights())


@row("Learning rate schedules")
@pytest.mark.slow
def test_schedules_count_applied_steps(family, rng):
    schedules = family.keras.optimizers.schedules
    decay = schedules.ExponentialDecay(0.5, 1, 0.5)
    assert_works(family, lambda: family.optimizers.SGD(decay), rng)


@row("`jit_compile=True`")
@pytest.mark.slow
def test_xla(family, rng):
    skip_without("compile(jit_compile=...)", family)
    assert_works(family, lambda: family.optimizers.SGD(0.1), rng, {"jit_compile": True})


@row("`steps_per_execution`")
@pytest.mark.slow
def test_several_steps_in_one_call(family, rng):
    inner = lambda: family.optimizers.SGD(0.1)  # noqa: E731
    bare, wrapped = both(family, inner, {"steps_per_execution": 4})
    x, y = data(rng)
    bare.fit(np.delete(x, np.s_[16:32], 0), np.delete(y, np.s_[16:32], 0), **QUIET)
    bad = x.copy()
    bad[20] = np.inf  # in the second of four batches
    wrapped.fit(bad, y, **QUIET)
    assert int(wrapped.optimizer.iterations.numpy()) == 3
    assert int(wrapped.optimizer.loss_scale.skipped_steps.numpy()) == 1
    assert_same(bare.get_weights(), wrapped.get_weights())


@row("`run_eagerly=True`")
@pytest.mark.slow
def test_eager_mode(family, rng):
    assert_works(family, lambda: family.optimizers.SGD(0.1), rng, {"run_eagerly": True})


@row("Sparse gradients (`Embedding`)")
def test_sparse_gradients(family):
    keras, weights = family.keras, []
    words = np.array([[0, 3], [3, 5]] * 8)
    for wrap in (
        lambda inner: inner,
        lambda inner: LossScaleOptimizer(inner, "dynamic"),
    ):
        parts = [
            keras.Input((2,)),
            keras.layers.Embedding(8, 4),
            keras.layers.Flatten(),
        ]
        model = keras.Sequential([*parts, keras.layers.Dense(1)])
        shapes = [each.shape for each in model.get_weights()]
        model.set_weights([np.full(shape, 0.25, np.float32) for shape in shapes])
        model.compile(wrap(family.optimizers.SGD(0.5)), loss="mse")
        model.fit(words, np.ones([16, 1]), **QUIET)
        weights.append(model.get_weights())
    assert_same(*weights)
    assert (weights[0][0][[1, 2, 4, 6, 7]] == 0.25).all()
    # Stays sparse: what the inner optimizer is given.
    optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), DynamicLossScale(8.0))
    table = variable_of(family, np.zeros([4, 2], np.float32))
    optimizer.build([table])
    with tf.GradientTape() as tape:
        value = getattr(table, "value", table) if family.name == "keras3" else table
        loss = optimizer.scale_loss(tf.reduce_sum(tf.gather(value, [1, 1])))
    (grad,) = optimizer.get_unscaled_gradients([tape.gradient(loss, value)])
    assert isinstance(grad, tf.IndexedSlices)
    np.testing.assert_array_equal(grad.values.numpy(), np.ones([2, 2]))


@row("Gradients that are `None`")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.filterwarnings("ignore:.*no gradients for")
def test_gradients_that_are_none(family):
    optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), DynamicLossScale(8.0))
    used, unused = (variable_of(family, np.float32(2.0), name=n) for n in "ab")
    optimizer.build([used, unused])
    optimizer.scale_loss(tf.constant(1.0))
    optimizer.apply_gradients([(tf.constant(8.0), used), (None, unused)])
    assert [float(each.numpy()) for each in (used, unused)] == [1.0, 2.0]

    def outcome(optimizer):
        if hasattr(optimizer, "build"):  # legacy optimizers have none
            optimizer.build([used, unused])
        if hasattr(optimizer, "scale_loss"):
            optimizer.scale_loss(tf.constant(1.0))
        try:
            optimizer.apply_gradients([(None, used), (None, unused)])
        except ValueError as error:
            return type(error)
        return None

    bare = outcome(family.optimizers.SGD(1.0))
    assert outcome(LossScaleOptimizer(family.optimizers.SGD(1.0))) == bare
    assert [float(each.numpy()) for each in (used, unused)] == [1.0, 2.0]


@row("Frozen layers")
def test_frozen_layers(family, rng):
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.1))
    model = regression(family, optimizer)
    model.layers[0].trainable = False
    model.compile(optimizer, loss="mse")
    before = model.get_weights()
    model.fit(*data(rng), **QUIET)
    assert_same(model.get_weights()[:2], before[:2])
    assert differ(model.get_weights()[2:], before[2:])


@row("Several optimizers")
def test_several_optimizers(family):
    scale = DynamicLossScale(2.0**10)
    optimizers = [LossScaleOptimizer(family.optimizers.SGD(1.0), scale) for _ in "ab"]
    variables = [variable_of(family, np.float32(2.0), name=name) for name in "ab"]
    for optimizer, variable in zip(optimizers, variables):
        optimizer.build([variable])

    @tf.function
    def step(bad):
        for optimizer in optimizers:
            optimizer.scale_loss(tf.constant(1.0))
        for optimizer, variable, factor in zip(optimizers, variables, (1.0, bad)):
            optimizer.apply_gradients([(2.0**10 * factor, variable)])

    step(tf.constant(np.inf))
    assert [float(each.numpy()) for each in variables] == [1.0, 2.0]
    assert float(scale) == 2.0**9  # one step, one halving


@row("The loss that `fit` reports")
def test_fit_reports_the_unscaled_loss(family, rng):
    bare, wrapped = both(family, lambda: family.optimizers.SGD(0.0))
    x, y = data(rng)
    logs = [model.fit(x, y, **QUIET).history["loss"] for model in (bare, wrapped)]
    assert logs[0] == logs[1]
    assert logs[0][0] == pytest.approx(wrapped.evaluate(x, y, verbose=0), rel=1e-5)


@row("Metrics of a skipped step")
def test_the_metrics_of_a_skipped_step(family, rng):
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.1))
    model = regression(family, optimizer)
    x, y = data(rng)
    y[-1] = np.nan
    logs = model.fit(x, y, **QUIET).history
    assert not np.isfinite(logs["loss"][0])
    assert int(optimizer.loss_scale.skipped_steps.numpy()) == 1
    assert all(np.isfinite(each.numpy()).all() for each in inner_variables(optimizer))


def test_each_row_of_the_page_has_a_test():
    rows = re.findall(r"(?m)^\| (.*?) \| .* \|$", PAGES["works-with"].read_text())
    assert rows[2:] == list(ROWS)
    assert rows[:2] == ["feature", "---"]
