"""LossScaleOptimizer with whatever else of Keras is used with an optimizer.

Loss scales are powers of two, so that scaling and unscaling are exact: training must be
bit-equal to the bare optimizer's. A step that overflowed must change nothing at all,
and the steps after it must be what they would have been without it.
"""

import functools
import inspect
import re

import numpy as np
import pytest
import tensorflow as tf
from installed import families
from limits import LIMITS, skip_without
from models import (
    assert_same,
    compiled,
    data,
    delegating,
    differ,
    optimizer_state,
    regression,
    variable_of,
)

from lossscale import DynamicLossScale, LossScaleOptimizer

#: Classes in a module of optimizers that are none: bases, wrappers, a table.
NO_OPTIMIZERS = {"Optimizer", "LossScaleOptimizer", "OptimizerMap"}


def every_optimizer():
    """Returns a parameter for each optimizer of each Keras that is installed."""
    return [
        pytest.param(family, name, id=f"{family.name}-{name}")
        for family in families()
        for name in sorted(set(dir(family.optimizers)) - NO_OPTIMIZERS)
        if inspect.isclass(getattr(family.optimizers, name))
    ]


class Training:
    """Three variables, trained by given gradients: no model, and no loss."""

    def __init__(self, family, optimizer):
        self.optimizer = optimizer
        rng = np.random.default_rng(5)
        self.variables = [
            variable_of(family, rng.normal(size=shape).astype(np.float32), name=name)
            for name, shape in {"kernel": (4, 3), "bias": (3,), "table": (5, 2)}.items()
        ]
        if hasattr(optimizer, "build"):  # as `fit` does
            optimizer.build(self.variables)
        self._step = compiled(self._apply, "graph")

    def _apply(self, kernel, bias, rows):
        scale_loss = getattr(self.optimizer, "scale_loss", tf.identity)
        loss_scale = scale_loss(tf.constant(1.0))
        # An embedding's gradient, in which a row comes twice.
        rows = tf.IndexedSlices(
            rows * loss_scale, tf.constant([1, 3, 1]), tf.constant([5, 2])
        )
        grads = [kernel * loss_scale, bias * loss_scale, rows]
        self.optimizer.apply_gradients(list(zip(grads, self.variables)))

    def step(self, number, bad=False):
        normal = np.random.default_rng(number).normal
        *dense, rows = (normal(size=shape) for shape in [(4, 3), (3,), (3, 2)])
        rows[-1, -1] = np.inf if bad else rows[-1, -1]
        self._step(*(tf.constant(grad, tf.float32) for grad in (*dense, rows)))

    def state(self):
        weights = [np.array(variable.numpy()) for variable in self.variables]
        return weights + optimizer_state(self.optimizer, self.variables)


def assert_wrapped_is_bare(family, make):
    """Three steps, one that overflows, and one more. Returns the bare training."""
    bare = Training(family, make())
    loss_scale = DynamicLossScale(2.0**12, 2)  # it grows on the way
    wrapped = Training(family, LossScaleOptimizer(make(), loss_scale))
    for number in range(3):
        bare.step(number)
        wrapped.step(number)
        assert_same(wrapped.state(), bare.state())
    assert float(loss_scale) == 2.0**13
    before = wrapped.state()
    wrapped.step(3, bad=True)
    assert loss_scale.skipped_steps.numpy() == 1
    assert_same(wrapped.state(), before)
    bare.step(4)
    wrapped.step(4)
    assert differ(wrapped.state(), before)
    assert_same(wrapped.state(), bare.state())
    return bare


@pytest.mark.each_version
@pytest.mark.every
@pytest.mark.parametrize(("family", "name"), every_optimizer())
def test_every_optimizer_of_every_keras(family, name):
    optimizers = family.optimizers

    def make():
        if name == "MultiOptimizer":  # it cannot be made without arguments
            sgd, others = optimizers.SGD(0.1, momentum=0.5), {"b.*": optimizers.Adam()}
            return optimizers.MultiOptimizer(optimizers.OptimizerMap(sgd, others))
        return getattr(optimizers, name)()

    assert_wrapped_is_bare(family, make)


#: Arguments that optimizers of a Keras share. limits.py knows which of them lack one.
SETTINGS = [
    {"learning_rate": "halved at every step"},
    {"clipnorm": 0.5},
    {"global_clipnorm": 0.5},
    {"clipvalue": 0.25},
    {"weight_decay": 0.5},
    {"use_ema": True, "ema_momentum": 0.5},
    {"use_ema": True, "ema_overwrite_frequency": 2},
    {"gradient_accumulation_steps": 2},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: [*setting][-1])
def test_settings_of_the_inner_optimizer(family, setting):
    for feature in {*setting} & {*LIMITS}:
        skip_without(feature, family)
    given = {"learning_rate": 0.1, **setting}
    if "learning_rate" in setting:
        schedules = family.keras.optimizers.schedules
        given["learning_rate"] = schedules.ExponentialDecay(0.1, 1, 0.5)
    # SGD, as Adam is the same for any multiple of a gradient.
    make = functools.partial(family.optimizers.SGD, momentum=0.5, **given)
    bare = assert_wrapped_is_bare(family, make)
    plain = Training(family, family.optimizers.SGD(0.1, momentum=0.5))
    for number in (0, 1, 2, 4):
        plain.step(number)
    ours, theirs = bare.state(), plain.state()
    assert len(ours) != len(theirs) or differ(ours, theirs)  # the setting did something


@pytest.mark.parametrize("name", ["epsilon", "amsgrad", "beta_1"])
def test_no_setting_of_the_inner_optimizer_is_lost_on_the_wrapper(family, name):
    optimizer = LossScaleOptimizer(family.optimizers.Adam(0.1))
    if hasattr(optimizer, name):  # Keras 2's legacy wrapper hands hyperparameters on
        setattr(optimizer, name, 0.5)
        assert float(np.array(getattr(optimizer.inner_optimizer, name))) == 0.5
        return
    message = f"`{name}` must be set on the inner optimizer, got 0.5"
    with pytest.raises(AttributeError, match=re.escape(message)):
        setattr(optimizer, name, 0.5)
    assert not hasattr(optimizer, name)
    setattr(optimizer.inner_optimizer, name, 0.5)  # what the message says
    optimizer.my_own_note = "mine"
    assert optimizer.my_own_note == "mine"


def test_an_optimizer_of_the_users_own_that_delegates(family, rng):
    batch, weights = data(rng, 16), []
    for wrap in (lambda inner: inner, lambda inner: LossScaleOptimizer(inner, 8)):
        optimizer = wrap(delegating(family, family.optimizers.SGD(2.0**-6)))
        model = regression(family, optimizer, run_eagerly=True)
        for _ in range(2):
            model.train_on_batch(*batch)
        weights.append(model.get_weights())
    assert_same(*weights)
