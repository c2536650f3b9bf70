"""Puts the functions between `tape.gradient` and `apply_gradients`: what comes of it?

Each trains a weight of its own with SGD(1.0), so what was subtracted from the weight is
the gradient as it was applied. Building a step takes most of the time: a loss scale
that checks nothing has a small one, and many weights of one optimizer have one step.
"""

from __future__ import annotations

import gc
import warnings
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from exact import S
from models import variable_of

from between import CRASHES, WITH_WEIGHT, bare, call, names
from between.values import GRADIENT, WEIGHT, overflowed
from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleOptimizer,
    LossScaleWarning,
)
from lossscale.runtime import callbacks
from lossscale.runtime.mode import COMPILED_BY_XLA

STATES = ["unscaled", "scaled", "by hand"]
INFINITIES = [np.inf, -np.inf]
#: How many functions are in one graph.
_CHUNK = 32


class Outcome(NamedTuple):
    """What came of one function.

    Attributes:
      is_right: Whether the weight moved by what it makes of the true gradient.
      warnings: The texts of our warnings.
      missed: The infinities whose step was applied.
      raised: What was raised, empty without it.
    """

    is_right: bool
    warnings: list
    missed: list
    raised: str = ""


class Case:
    """One function, with an optimizer and a weight of its own."""

    def __init__(self, family, name, state, loss_scale):
        self.name, self.state = name, state
        self.optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), loss_scale)
        self.start = start_of(name)
        self.weight = variable_of(family, self.start)
        self.optimizer.build([self.weight])

    def step(self, gradient):
        changed = changed_gradient(
            self.optimizer, self.weight, gradient, self.state, self.name
        )
        self.optimizer.apply_gradients([(changed, self.weight)])

    def is_right(self):
        subtracted = self.start - np.array(self.weight.numpy())
        wanted = expected(self.name)
        size = np.max(np.abs(wanted))
        return np.allclose(subtracted, wanted, rtol=2e-3, atol=2e-5 * size)

    def is_missed(self, run, infinity):
        """Takes a step with an infinity. Tells whether it was applied."""
        skipped = self.optimizer.loss_scale.skipped_steps
        before = int(skipped.numpy())
        self.weight.assign(self.start)
        try:
            run(tf.constant(overflowed(infinity)))
        except Exception:
            if raises(self.name, infinity):
                return False
            raise
        is_skipped = int(skipped.numpy()) == before + 1
        if is_skipped:
            np.testing.assert_array_equal(self.weight.numpy(), self.start)
        return not is_skipped


def infinities_of(name):
    return [] if name in CRASHES else INFINITIES


def start_of(name):
    """Returns where a weight begins: at 0 nothing is lost when it is subtracted."""
    return WEIGHT if name in WITH_WEIGHT else np.zeros_like(WEIGHT)


def changed_gradient(optimizer, weight, gradient, state, name):
    """Returns what a function makes of the gradient of a weight's loss."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(gradient * tf.convert_to_tensor(weight))
        scaled = optimizer.scale_loss(loss)
    is_plain = isinstance(weight, tf.Variable)
    grad = tape.gradient(scaled, weight if is_plain else weight.value)
    if state == "unscaled":
        (grad,) = optimizer.get_unscaled_gradients([grad])
    elif state == "by hand":
        grad = grad / optimizer.loss_scale
    return call(name, grad, tf.convert_to_tensor(weight))


@lru_cache(maxsize=None)
def expected(name):
    return bare(name, GRADIENT)


@lru_cache(maxsize=None)
def raises(name, infinity):
    """Tells whether a function cannot be called with an infinity."""
    try:
        bare(name, overflowed(infinity))
    except Exception:
        return True
    return False


@lru_cache(maxsize=None)
def compiles(name):
    """Tells whether XLA compiles a function, on its own."""
    try:
        built(lambda g: call(name, g, tf.constant(WEIGHT)), "xla")(
            tf.constant(GRADIENT)
        )
    except Exception:
        return False
    return True


@lru_cache(maxsize=None)
def hiding():
    """Returns the functions that make a finite result of an infinity."""
    every = [name for name in names() if name not in CRASHES]
    return [name for name in every if any(_hides(name, each) for each in INFINITIES)]


def _hides(name, infinity):
    return raises(name, infinity) or np.all(
        np.isfinite(bare(name, overflowed(infinity)))
    )


def built(function, mode):
    """Returns a function as it is, or as a graph, as far as AutoGraph is not needed."""
    if mode == "eager":
        return function
    options = COMPILED_BY_XLA if mode == "xla" else {}
    return tf.function(function, autograph=False, **options)


def in_mode(every, mode):
    return [name for name in every if mode != "xla" or compiles(name)]


def chunks(every):
    return [every[at : at + _CHUNK] for at in range(0, len(every), _CHUNK)]


def ours(caught):
    return [str(w.message) for w in caught if issubclass(w.category, LossScaleWarning)]


def applied(family, state, mode, every=None):
    """Returns the outcome of each function, from the step of a fixed loss scale."""
    found = {}
    for chunk in chunks(in_mode(every or names(), mode)):
        loss_scale = FixedLossScale(S)
        cases = [Case(family, name, state, loss_scale) for name in chunk]
        told = steps_in_one_graph(cases, mode)
        for case in cases:
            found[case.name] = Outcome(case.is_right(), told[case.name], [])
    return found


def steps_in_one_graph(cases, mode):
    """Takes a step of each case. Returns what is warned of, by name."""
    told = {}

    def steps(gradient):
        for case in cases:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                case.step(gradient)
            told[case.name] = ours(caught)

    built(steps, mode)(tf.constant(GRADIENT))
    return told


def one_by_one(family, state, mode, every):
    """Returns the outcome of each function, from steps of a dynamic loss scale."""
    found = {}
    for at, name in enumerate(in_mode(every, mode)):
        callbacks._listening.clear()  # else all before it hear what this one does
        if at % _CHUNK == 0:
            gc.collect()
        case = Case(family, name, state, DynamicLossScale(S, 1000))
        run = built(case.step, mode)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(tf.constant(GRADIENT))
            is_right = case.is_right()
            missed = [each for each in infinities_of(name) if case.is_missed(run, each)]
        found[name] = Outcome(is_right, ours(caught), missed)
    return found


class Together:
    """Many functions in one step, each with a weight and an unscaling of its own."""

    def __init__(self, family, every, mode):
        self.loss_scale, self.names = DynamicLossScale(S, 1000), every
        self.optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), self.loss_scale)
        self.weights = [variable_of(family, start_of(name)) for name in every]
        self.optimizer.build(self.weights)
        self.run = built(self.step, mode)

    def step(self, gradients):
        grads = [
            changed_gradient(self.optimizer, weight, gradients[at], "unscaled", name)
            for at, (name, weight) in enumerate(zip(self.names, self.weights))
        ]
        self.optimizer.apply_gradients(list(zip(grads, self.weights)))

    def is_missed(self, at, infinity):
        """Tells whether a step is applied though one function's gradient overflowed."""
        gradients = np.stack([GRADIENT] * len(self.names))
        gradients[at] = overflowed(infinity)
        self.loss_scale.current_loss_scale.assign(S)
        before = int(self.loss_scale.skipped_steps.numpy())
        try:
            self.run(tf.constant(gradients))
        except Exception:
            if raises(self.names[at], infinity):
                return False
            raise
        return int(self.loss_scale.skipped_steps.numpy()) == before


def missed_together(family, mode, every):
    """Returns the functions whose infinities were applied after they were unscaled."""
    return [
        name
        for chunk in chunks(in_mode(every, mode))
        for together in [Together(family, chunk, mode)]
        for at, name in enumerate(chunk)
        if any(together.is_missed(at, each) for each in infinities_of(name))
    ]
