"""Guards of a user's, and an engine that one of them guards, in every mode."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from models import compiled

from lossscale import Guard, LossScaleEngine


class Judges(Guard):
    """Its verdict is what a function of the largest gradient returns."""

    left_out_as = "mine"

    def __init__(self, verdict=lambda _: (True, {})):
        super().__init__()
        self.verdict = verdict
        self.asked = self._add_weight("asked", 0, tf.int64)

    def judge(self, state, largest):
        verdict = self.verdict(largest)
        if isinstance(verdict, tuple) and verdict[1:] == ({},):
            return verdict[0], {"asked": state.asked + 1}
        return verdict

    def get_config(self):
        return {}


def tiny(largest):
    """Leaves small steps out."""
    return largest >= 0.5, {}


def large(largest):
    """Leaves large steps out."""
    return largest < 8.0, {}


class Guarded:
    """An engine of one variable, and its steps."""

    def __init__(self, loss_scale, guard, mode="eager"):
        self.engine = LossScaleEngine(loss_scale, guard=guard)
        self.variable = tf.Variable([0.0, 0.0])
        self.step = compiled(self._step, mode)

    def _step(self, largest):
        scaled = self.engine.scale_loss(tf.constant(1.0))
        grad = tf.stack([scaled, -largest * scaled])
        grad = tf.where(tf.range(2) == 0, 0.0, grad)

        def add(grads, variables):
            return variables[0].assign_add(grads[0])

        self.engine.apply([grad], [self.variable], add)

    def __call__(self, largest):
        """Takes a step. Returns whether it was applied."""
        before = int(self.engine.applied_steps.numpy())
        self.step(tf.constant(largest, tf.float32))
        return int(self.engine.applied_steps.numpy()) > before

    def state(self):
        variables = self.engine._state_variables()
        return [np.array(v.numpy()).tolist() for v in [*variables, self.variable]]
