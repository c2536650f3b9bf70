"""Puts the functions between `tape.gradient` and `apply_gradients`: what comes of it?

Each trains a weight of its own with SGD(1.0), so what was subtracted from the weight is
the gradient as it was applied. Building a step takes most of the time: many functions
are in one graph, and where an infinity is looked for, in one step.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from exact import S
from models import variable_of

from between import WITH_WEIGHT, bare, call
from between.values import GRADIENT, WEIGHT, overflowed
from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleOptimizer,
    LossScaleWarning,
)

STATES = ["unscaled", "scaled", "by hand"]
INFINITIES = [np.inf, -np.inf]
#: How many functions are in one graph.
_CHUNK = 32


class Outcome(NamedTuple):
    """What came of one function.

    Attributes:
      is_right: Whether the weight moved by what it makes of the true gradient.
      warnings: How many warnings of ours there were.
    """

    is_right: bool
    warnings: int


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


def raises(name, infinity):
    """Tells whether a function cannot be called with an infinity."""
    try:
        bare(name, overflowed(infinity))
    except Exception:
        return True
    return False


def hides(name):
    """Tells whether a function may make a finite result of an infinity."""
    return any(
        raises(name, each) or np.all(np.isfinite(bare(name, overflowed(each))))
        for each in INFINITIES
    )


def chunks(every):
    return [every[at : at + _CHUNK] for at in range(0, len(every), _CHUNK)]


def applied(family, state, mode, every):
    """Returns the outcome of each function, from the step of a fixed loss scale."""
    found = {}
    for chunk in chunks(every):
        found.update(_applied(family, state, mode, chunk))
    return found


def _applied(family, state, mode, every):
    loss_scale, weights, told = FixedLossScale(S), {}, {}
    optimizers = {}
    for name in every:
        optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), loss_scale)
        weights[name] = variable_of(family, start_of(name))
        optimizer.build([weights[name]])
        optimizers[name] = optimizer

    def steps(gradient):
        for name, optimizer in optimizers.items():
            weight = weights[name]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                grad = changed_gradient(optimizer, weight, gradient, state, name)
                optimizer.apply_gradients([(grad, weight)])
            told[name] = sum(issubclass(w.category, LossScaleWarning) for w in caught)

    steps = tf.function(steps, autograph=False) if mode == "graph" else steps
    steps(tf.constant(GRADIENT))
    return {
        name: Outcome(_is_right(name, weight), told[name])
        for name, weight in weights.items()
    }


def _is_right(name, weight):
    subtracted = start_of(name) - np.array(weight.numpy())
    wanted = bare(name, GRADIENT)
    size = np.max(np.abs(wanted))
    return np.allclose(subtracted, wanted, rtol=2e-3, atol=2e-5 * size)


class Together:
    """Many functions in one step, each with a weight and an unscaling of its own."""

    def __init__(self, family, every):
        self.loss_scale, self.names = DynamicLossScale(S, 1000), every
        self.optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), self.loss_scale)
        self.weights = [variable_of(family, start_of(name)) for name in every]
        self.optimizer.build(self.weights)
        self.run = tf.function(self.step, autograph=False)

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


def broken_once_unscaled(family, every):
    """Returns a line for each function that comes out wrong, and each missed infinity.

    Nothing is to be said of what was unscaled.
    """
    found = []
    for chunk in chunks(every):
        together = Together(family, chunk)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            together.run(tf.constant(np.stack([GRADIENT] * len(chunk))))
        ours = [w for w in caught if issubclass(w.category, LossScaleWarning)]
        found += [f"told of: {w.message}" for w in ours]
        for name, weight in zip(chunk, together.weights):
            if not _is_right(name, weight):
                found.append(f"wrong: {name}")
        for at, name in enumerate(chunk):
            if hides(name) and any(together.is_missed(at, i) for i in INFINITIES):
                found.append(f"missed: {name}")
    return found
