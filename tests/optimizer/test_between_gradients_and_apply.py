"""Twenty expressions of the table in `between.py`, trained: right, or told.

`provenance/test_expressions.py` has the kind of each expression. Here gradients that
are scaled, unscaled, or divided by hand are changed and applied. Each weight is trained
with SGD(1.0), so what was subtracted from it is the gradient as it was applied.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from between import GRADIENT, TABLE, WEIGHT, bare, call, rows
from exact import S, gradients, heard
from models import variable_of

from lossscale import DynamicLossScale, LossScaleOptimizer

ROWS = [
    *("g * w", "g / other", "tf.add_n([g, 2.0 * g])", "tf.gather(g, [2, 0, 1])"),
    *("tf.concat([g, -2.0 * g], 0)", "tf.minimum(g, tf.reduce_mean(g))"),
    *("tf.where(tf.math.is_finite(g), g, 0.0)", "ternary(g)", "tf.sign(g)"),
    *("tf.argsort(g)", "tf.where(g > 0.0, 1.0, -1.0)", "g / (tf.norm(g) + 1e-7)"),
    *("newton_schulz(g)", "g * g", "tf.linalg.inv(g)", "g + 1.0", "tf.round(g)"),
    *("tf.where(g > 0.1, g, 0.0)", "tf.clip_by_norm(g, 1.0)", "tf.nn.softmax(g)"),
]


class Trained:
    """An optimizer with its own loss scale, and its weight."""

    def __init__(self, family, expression):
        scale = DynamicLossScale(S, 1000)
        self.optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), scale)
        self.weight = variable_of(family, WEIGHT)
        self.optimizer.build([self.weight])
        self.expression, self.told = expression, None

    def step(self, gradient, state):
        with heard() as self.told:
            grads = gradients(self.optimizer.scale_loss, gradient, [self.weight])
            if state == "unscaled":
                grads = self.optimizer.get_unscaled_gradients(grads)
            elif state == "by hand":
                grads = [grads[0] / self.optimizer.loss_scale]
            weight = tf.convert_to_tensor(self.weight)
            grad = call(self.expression, grads[0], weight)
            self.optimizer.apply_gradients([(grad, self.weight)])

    def is_right(self, wanted):
        subtracted = WEIGHT - np.array(self.weight.numpy())
        size = np.max(np.abs(wanted)) + np.max(np.abs(WEIGHT))
        return np.allclose(subtracted, wanted, rtol=2e-3, atol=2e-6 * size)


@pytest.mark.parametrize("state", ["scaled", "unscaled", "by hand"])
def test_what_is_applied_is_right_or_one_warning_says_that_it_is_not(family, state):
    every = [Trained(family, expression) for expression in ROWS]

    @tf.function(autograph=False)
    def step(gradient):
        for trained in every:
            trained.step(gradient, state)

    step(tf.constant(GRADIENT))
    kinds = rows(TABLE)
    for trained in every:
        kind = "unscaled" if state != "scaled" else kinds[trained.expression]
        is_seen = kind in {"scaled", "unscaled"}
        assert len(trained.told) == (not is_seen), trained.expression
        is_right = trained.is_right(bare(trained.expression, GRADIENT))
        assert is_right or not is_seen, trained.expression


def test_an_overflow_is_seen_whatever_is_made_of_unscaled_gradients(family):
    every = [Trained(family, expression) for expression in ROWS]
    every = [each for each in every if "inv" not in each.expression]  # it raises

    @tf.function(autograph=False)
    def step(gradient):
        for trained in every:
            trained.step(gradient, "unscaled")

    gradient = GRADIENT.copy()
    gradient[-1, -1] = np.inf
    step(tf.constant(gradient))
    for trained in every:
        assert trained.is_right(np.zeros_like(WEIGHT)), trained.expression
        assert float(trained.optimizer.loss_scale.numpy()) == S / 2
