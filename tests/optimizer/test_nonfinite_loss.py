"""nonfinite_loss: a loss that was not finite itself tells the loss scale nothing.

A loss and its gradients are given from outside, so that each can be bad by itself. A
tape makes them, so it is seen that they belong together.
"""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import tensorflow as tf
from every_loss_scale import CASES
from exact import heard, of_loss
from guards import PAGE as GUARD
from limits import skip_without
from models import (
    assert_same,
    compiled,
    data,
    optimizer_state,
    regression,
    scale_state,
    variable_of,
)
from strategies import last_replica_gets

import lossscale
from lossscale import DynamicLossScale, LossScaleManager, LossScaleOptimizer

INF, NAN = float("inf"), float("nan")
MODES = ["eager", "graph", "xla"]
XLA_LATER = ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow)]
#: The largest gradients of good steps, so that some loss scales see them grow.
GOOD = [0.5, 0.25, 0.5, 0.125, 0.5, 0.5, 0.25, 0.5]
COUNTERS = ("skipped_steps", "consecutive_skipped_steps", "last_step_finite")


class OwnUpdate(DynamicLossScale):
    """One that is given the gradients."""

    def update(self, grads):
        return super().update(grads)


class OwnManager(LossScaleManager):
    """A user's own manager."""

    def __init__(self):
        super().__init__()
        self.value = tf.Variable(64.0)

    def get_loss_scale(self):
        return tf.convert_to_tensor(self.value)

    def update_loss_scale(self, finite_grads):
        change = tf.where(finite_grads, 1.0, -8.0)
        return self.value.assign_add(change, read_value=False)


#: Of a class whose rule is told nothing one case is enough, and one that searches.
ALIKE = {"fixed", "dynamic-hysteresis", "dynamic-cooldown", "dynamic-tolerance"}
EVERY = {
    **{name: make for name, make in CASES.items() if name not in ALIKE},
    "own-update": lambda: OwnUpdate(64.0, 2),
    "own-manager": lambda: lossscale.get(OwnManager()),
}


class Trained:
    """An optimizer, two variables, and a step that is given losses and gradients."""

    def __init__(self, family, loss_scale, mode="graph", how="skip", **kwargs):
        # Of powers of two all sums are exact.
        inner = family.optimizers.SGD(2.0**-4, momentum=0.5)
        self.optimizer = LossScaleOptimizer(
            inner, loss_scale, nonfinite_loss=how, **kwargs
        )
        self.variables = [variable_of(family, [8.0, 8.0]) for _ in range(2)]
        self.optimizer.build(self.variables)
        self.optimizer.iterations  # noqa: B018 - Keras 2 makes it when it is asked for
        self.run = compiled(self.step, mode)

    def step(self, loss, grads):
        self.apply(self.scaled(loss, grads))

    def scaled(self, loss, grads):
        """Returns the gradients of the scaled loss."""
        return of_loss(self.optimizer.scale_loss, loss, grads)

    def apply(self, grads):
        self.optimizer.apply_gradients(list(zip(grads, self.variables)))

    def __call__(self, loss=1.0, largest=0.5):
        grads = [tf.constant([largest, 0.25]), tf.constant([0.125, 0.0625])]
        self.run(tf.constant(loss), grads)

    def rule(self):
        """Returns the values of the rule's own variables, by position."""
        scale = self.optimizer.loss_scale
        names = [*COUNTERS, "ignored_loss_steps"]  # None without nonfinite_loss="skip"
        counters = {id(getattr(scale, name, None)) for name in names}
        found = [v for v in scale.variables if id(v) not in counters]
        manager = getattr(scale, "manager", None)
        found += [] if manager is None else manager.variables
        return [v.numpy().tolist() for v in found]

    def counted(self):
        scale = self.optimizer.loss_scale
        return [getattr(scale, name).numpy().item() for name in COUNTERS]

    def trained(self):
        state = optimizer_state(self.optimizer, self.variables)
        return [*(v.numpy() for v in self.variables), *state]


@pytest.fixture(params=EVERY.values(), ids=EVERY)
def make(request):
    return request.param


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_the_rule_is_told_nothing_and_the_step_is_counted(family, make, mode, bad):
    trained, without = (Trained(family, make(), mode) for _ in range(2))
    for number, largest in enumerate(GOOD):
        trained(largest=largest)
        without(largest=largest)
        if number in {2, 3, 6}:
            before, good = trained.rule(), trained.trained()
            skipped, in_a_row, _ = trained.counted()
            trained(bad, NAN)
            assert trained.rule() == before
            assert_same(trained.trained(), good)
            assert trained.counted() == [skipped + 1, in_a_row + 1, False]
    # As if these steps had not been, to the bit.
    assert trained.rule() == without.rule()
    assert_same(trained.trained(), without.trained())
    assert trained.counted()[0] == 3 + without.counted()[0]


@pytest.mark.parametrize("mode", XLA_LATER)
def test_an_overflow_is_told_and_by_default_a_bad_loss(family, make, mode):
    skips, told, told_of_losses = (
        Trained(family, make(), mode, how) for how in ("skip", "backoff", "backoff")
    )
    for largest in (0.5, INF, 0.5, NAN, 0.25):
        skips(largest=largest)
        told(largest=largest)
        told_of_losses(1.0 if np.isfinite(largest) else largest, largest)
    assert told_of_losses.rule() == told.rule()
    if mode == "xla":  # it may round a float64 otherwise where the rule is in a branch
        for one, other in zip(skips.rule(), told.rule()):
            np.testing.assert_allclose(one, other, rtol=1e-14)
    else:
        assert skips.rule() == told.rule()
    assert skips.counted() == told.counted() == told_of_losses.counted()
    assert_same(skips.trained(), told.trained())


@pytest.mark.parametrize("mode", XLA_LATER)
@pytest.mark.parametrize("unscales", [True, False])
def test_accumulation_in_a_loop(family, mode, unscales):
    trained = Trained(family, DynamicLossScale(64.0))

    def step(losses, grads):
        sums = [tf.zeros_like(grad) for grad in grads]
        for loss in tf.unstack(losses):
            new = trained.scaled(loss, [loss * grad for grad in grads])
            if unscales:
                new = trained.optimizer.get_unscaled_gradients(new)
            sums = [one + other for one, other in zip(sums, new)]
        trained.apply(sums)

    trained.run = compiled(step, mode)
    trained([1.0, INF, 2.0, 1.0])
    assert float(trained.optimizer.loss_scale) == 64.0
    assert trained.counted() == [1, 1, False]
    trained([1.0, 1.0, 2.0, 1.0], INF)
    assert float(trained.optimizer.loss_scale) == 32.0


def test_a_loss_that_is_out_of_sight_is_an_overflow(family):
    trained = Trained(family, DynamicLossScale(64.0))

    @tf.function
    def scaled(loss, grad):
        return [grad * trained.optimizer.scale_loss(loss)]

    tf.function(trained.apply)(scaled(tf.constant(NAN), tf.ones([2])))
    assert float(trained.optimizer.loss_scale) == 32.0


def on_replicas(mirrored, trained, mode="graph"):
    """Returns a step with a loss of the last replica, and a factor of all the others.

    The gradients are of the loss.
    """

    def each(loss, grad, factor):
        loss = last_replica_gets(loss, 1.0)
        trained.step(loss, [grad * loss * last_replica_gets(1.0, factor)])

    step = compiled(lambda *args: mirrored.run(each, args=args), mode)
    return lambda loss, grad=0.5, factor=1.0: step(
        *map(tf.constant, (loss, [grad, grad / 2], factor))
    )


def reasons(trained):
    """Returns why steps were skipped."""
    return [why for _, why in trained.optimizer.engine.record.skipped()[1]]


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_on_the_last_replica(family, mirrored, mode, dtype):
    with mirrored.scope():
        options = {} if dtype is None else {"communication_dtype": dtype}
        trained = Trained(family, DynamicLossScale(64.0, 2), **options)
    step = on_replicas(mirrored, trained, mode)
    step(1.0)
    before, weights = trained.rule(), trained.trained()
    for bad in (NAN, INF):
        step(bad)
    assert trained.rule() == before
    assert trained.counted() == [2, 2, False]
    assert_same(trained.trained(), weights)
    assert trained.optimizer.nonfinite_loss() == "inf"
    assert reasons(trained) == ["nan", "inf"]
    step(1.0)  # the second good step
    assert float(trained.optimizer.loss_scale) == 128.0
    step(1.0, INF)  # an overflow on all
    assert float(trained.optimizer.loss_scale) == 64.0
    # A bad loss on the last replica, and an overflow of a good one on the first. A sum
    # in float16 does not show it.
    step(NAN, factor=INF)
    assert float(trained.optimizer.loss_scale) == (32.0 if dtype is None else 64.0)
    assert reasons(trained)[-1] == ("gradients" if dtype is None else "nan")


@pytest.mark.parametrize("mode", XLA_LATER)
@pytest.mark.parametrize(
    "case",
    [
        "dynamic",
        "page",
    ],
)
def test_optimizers_that_share_a_loss_scale(family, mode, case):
    """Of a step: an overflow of either is told, else a bad loss of either is not."""
    scale = EVERY[case]()
    both = [Trained(family, scale) for _ in range(2)]

    def step(losses, factors):
        for one, loss, factor in zip(both, tf.unstack(losses), tf.unstack(factors)):
            one.step(loss, [factor * tf.constant([0.5, 0.25])])

    step = compiled(step, mode)
    alone = Trained(family, EVERY[case]())  # told of each step as a whole

    def take(losses, factors, told):
        step(tf.constant(losses), tf.constant(factors))
        if told is not None:
            alone(1.0, 0.5 if told else INF)
        assert both[0].rule() == alone.rule(), (losses, factors)

    take([1.0, 1.0], [1.0, 1.0], True)
    take([NAN, 1.0], [NAN, 1.0], None)
    take([1.0, NAN], [1.0, NAN], None)
    take([NAN, NAN], [NAN, NAN], None)
    take([NAN, 1.0], [NAN, INF], False)
    take([1.0, NAN], [INF, NAN], False)
    take([1.0, 1.0], [1.0, 1.0], True)
    assert both[0].counted()[:2] == [5, 0]
    iterations = [int(one.optimizer.iterations.numpy()) for one in both]
    assert iterations == [3, 3]


def test_batches_that_keras_accumulates(family):
    skip_without("gradient_accumulation_steps", family)
    x, y = data(np.random.default_rng(7), 48)
    bad = range(20, 24)
    without = [np.delete(each, bad, 0) for each in (x, y)]
    y[bad] = np.nan
    models = []
    for inputs, targets in ((x, y), without):
        inner = family.optimizers.SGD(2.0**-8, gradient_accumulation_steps=3)
        scale = DynamicLossScale(64.0, 5)
        optimizer = LossScaleOptimizer(inner, scale, nonfinite_loss="skip")
        models.append(regression(family, optimizer, run_eagerly=True))
        models[-1].fit(inputs, targets, 4, verbose=0, shuffle=False)
    states = [scale_state(model.optimizer) for model in models]
    assert [state.pop("skipped_steps") for state in states] == [1, 0]
    assert [state.pop("ignored_loss_steps") for state in states] == [1, 0]
    assert states[0] == states[1]
    assert_same(*(model.get_weights() for model in models))


# In fit: a row of NaN in each epoch


def row_of_nan(family, optimizer, epochs, with_row=True, callbacks=()):
    """Returns a model that was fit to 50 rows, a step each, one of them NaN."""
    x, y = data(np.random.default_rng(7), 50)
    y[17] = np.nan
    if not with_row:
        x, y = np.delete(x, 17, 0), np.delete(y, 17, 0)
    model = regression(family, optimizer)
    model.fit(x, y, 1, epochs, verbose=0, shuffle=False, callbacks=list(callbacks))
    return model


def scale_of(family, how):
    scale = DynamicLossScale(2.0**10, 40)
    inner = family.optimizers.SGD(2.0**-10)
    return LossScaleOptimizer(inner, scale, nonfinite_loss=how)


def own_wrapper(family):
    """Returns Keras's own wrapper, with the settings of `scale_of`."""
    inner = family.optimizers.SGD(2.0**-10)
    return family.keras.mixed_precision.LossScaleOptimizer(
        inner, initial_scale=2.0**10, dynamic_growth_steps=40
    )


def test_with_skip_a_row_of_nan_costs_nothing(family):
    epochs = 1
    callbacks = [lossscale.LossScaleMonitor(verbose=0)]
    with heard() as messages:
        found = row_of_nan(
            family, scale_of(family, "skip"), epochs, callbacks=callbacks
        )
    expected = row_of_nan(family, scale_of(family, "skip"), epochs, with_row=False)
    scales = [float(each.optimizer.loss_scale) for each in (found, expected)]
    assert scales[0] == scales[1] > 2.0**10
    assert_same(found.get_weights(), expected.get_weights())
    assert messages == [
        f"Epoch {number}: 1 step was skipped because the loss (mean_squared_error) was "
        "NaN before it was scaled, at batch 17, counted from 0. These rows of the data "
        "hold inf or NaN, counted from 0: 17. Look at these rows, and repair them or "
        "leave them out."
        for number in range(1, epochs + 1)
    ]


# The argument


def test_it_is_in_a_config_only_if_set(family):
    keras = family.keras
    for how in ("backoff", "skip"):
        optimizer = scale_of(family, how)
        config = json.loads(json.dumps(optimizer.get_config()))
        assert config.get("nonfinite_loss") == (None if how == "backoff" else "skip")
        again = LossScaleOptimizer.from_config(config)
        assert again.get_config() == optimizer.get_config()
        assert ("nonfinite_loss='skip'" in repr(again)) == (how == "skip")
        as_keras = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
        assert as_keras.engine.skips_losses == (how == "skip")
    skip_without("copying", family)
    assert copy.deepcopy(scale_of(family, "skip")).engine.skips_losses


@pytest.mark.parametrize("value", ["ignore", None, True, 1, "Skip"])
def test_nothing_else_is_accepted(family, value):
    inner = family.optimizers.SGD(0.1)
    message = "`nonfinite_loss` must be one of 'backoff', 'skip', got"
    with pytest.raises(ValueError, match=message):
        LossScaleOptimizer(inner, nonfinite_loss=value)
    LossScaleOptimizer(inner)  # nothing was left on it


def test_a_loss_scale_that_checks_nothing_is_refused(family):
    with pytest.raises(ValueError, match="`loss_scale` must be one that checks gradie"):
        LossScaleOptimizer(family.optimizers.SGD(0.1), 128.0, nonfinite_loss="skip")


def test_from_keras_takes_it(family):
    ours = LossScaleOptimizer.from_keras(own_wrapper(family), nonfinite_loss="skip")
    assert ours.engine.skips_losses


# Beside a guard


@pytest.mark.parametrize("mode", XLA_LATER)
def test_beside_a_guard_each_reason_is_told_apart(family, mode):
    scale, guard = DynamicLossScale(64.0, 2), GUARD.SkipsZeros()
    trained = Trained(family, scale, mode, guard=guard)
    zeros = [tf.zeros([2]), tf.zeros([2])]
    trained()
    before = trained.trained()
    trained.run(tf.constant(1.0), zeros)
    assert_same(trained.trained(), before)
    assert (float(scale), int(scale.good_steps.numpy())) == (64.0, 1)
    assert trained.counted() == [0, 0, True]
    assert int(guard.zeros.numpy()) == 1
    trained()
    assert float(scale) == 128.0
    trained(NAN, NAN)
    assert float(scale) == 128.0
    assert int(scale.ignored_loss_steps.numpy()) == 1
    trained(1.0, INF)
    assert float(scale) == 64.0
    assert reasons(trained) == ["left out", "nan", "gradients"]


def test_the_monitor_says_what_it_is_called(family, capsys):
    optimizer = LossScaleOptimizer(
        family.optimizers.SGD(2.0**-8),
        DynamicLossScale(64.0),
        guard=GUARD.SkipsZeros(),
    )
    model = regression(family, optimizer, run_eagerly=True)
    x, y = data(np.random.default_rng(7), 32)
    weights = np.ones([32])
    weights[8:12] = 0.0  # the third of eight batches weighs nothing
    with heard() as messages:
        model.fit(
            *(x, y, 4),
            sample_weight=weights,
            shuffle=False,
            verbose=0,
            callbacks=[lossscale.LossScaleMonitor()],
        )
    message = "Epoch 1: Steps were skipped as all zero, at batch 2, counted from 0."
    assert messages == [message]
    assert "Steps left out as all zero: 1." in capsys.readouterr().out
