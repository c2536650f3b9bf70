"""A term that is added to a scaled loss: `provenance/warnings.py`."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from exact import START, S, Trained, heard

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer


class Program:
    """What the lines of a training step are made of."""

    def __init__(self, family):
        self.trained = Trained(family)
        self.trained.build()
        self.optimizer = self.trained.optimizer
        self.scale, self.S = self.optimizer.scale_loss, self.optimizer.loss_scale
        self.other = LossScaleOptimizer(family.optimizers.SGD(), DynamicLossScale(S))
        self.fixed = FixedLossScale(S)
        self.total = tf.Variable(0.0, trainable=False)
        #: As a function returns it, of which nothing is known.
        self.of_a_function = tf.function(lambda w: self.scale(tf.reduce_sum(w)))

    @property
    def w(self):
        return tf.convert_to_tensor(self.trained.variables[0])

    @property
    def loss(self):
        return 0.5 * tf.reduce_sum(self.w)

    @property
    def penalty(self):
        return 0.25 * tf.reduce_sum(self.w**2)

    def accumulated(self):
        self.total.assign_add(self.scale(self.loss))
        return self.scale(self.loss) + self.total

    def in_a_branch(self, x):
        return tf.cond(x > 0.0, lambda: self.scale(self.loss), lambda: self.w[0])


LOST = {
    "a penalty": lambda p, _: p.scale(p.loss) + p.penalty,
    "a penalty before": lambda p, _: p.penalty + p.scale(p.loss),
    "a difference": lambda p, _: p.scale(p.loss) - p.penalty,
    "a list": lambda p, _: tf.add_n([p.scale(p.loss), p.penalty]),
    "two sums": lambda p, _: p.scale(p.loss) + 1.0 + (p.penalty + 3.0),
    "of data": lambda p, x: p.scale(p.loss) + tf.reduce_mean((p.w * x) ** 2),
    "of a row": lambda p, _: p.scale(p.loss) + tf.gather(p.w, [1])[0],
    "two targets": lambda p, _: [p.scale(p.loss), p.penalty],
}
RIGHT = {
    "scaled together": lambda p, _: p.scale(p.loss + p.penalty),
    "scaled beside": lambda p, _: p.scale(p.loss) + p.scale(p.penalty),
    "times S": lambda p, _: p.scale(p.loss) + p.S * p.penalty,
    "zero": lambda p, _: p.scale(p.loss) + 0.0 * p.penalty,
    "zeros": lambda p, _: p.scale(p.loss) + tf.reduce_sum(tf.zeros_like(p.w)),
    "a number": lambda p, _: p.scale(p.loss) + 3.0,
    "data": lambda p, x: p.scale(p.loss) + x,
    "noise": lambda p, _: p.scale(p.loss) + tf.random.normal([]),
    "no gradient": lambda p, _: p.scale(p.loss) + tf.stop_gradient(p.penalty),
    "a position": lambda p, _: p.scale(p.loss) + tf.cast(tf.argmax(p.w), tf.float32),
    "an accumulator": lambda p, _: p.accumulated(),
    "a variable": lambda p, _: p.scale(p.loss) + p.total,
    "another's loss": lambda p, _: p.scale(p.loss) + p.other.scale_loss(p.loss),
    "a function's": lambda p, _: p.scale(p.loss) + p.of_a_function(p.w),
    "a branch's": lambda p, x: p.scale(p.loss) + p.in_a_branch(x),
}


def told(family, program, before=id):
    p = Program(family)
    before(p)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = program(p, x)
        weight = p.trained.variables[0]
        weight = getattr(weight, "value", weight) if family.name == "keras3" else weight
        p.trained.apply([tape.gradient(loss, weight)])

    with heard() as messages:
        for _ in range(2):
            step(tf.constant(0.5))
    return [each for each in messages if ": A term that depends" in each]


@pytest.mark.parametrize("what", LOST)
def test_what_is_lost_is_told_once(family, what):
    assert len(told(family, LOST[what])) == 1


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_right_is_not_told(family, what):
    assert not told(family, RIGHT[what])


def test_a_term_times_the_number_is_not_told(family):
    penalties = []
    assert not told(
        family,
        lambda p, _: p.scale(p.loss) + penalties[0] * p.penalty,
        before=lambda p: penalties.append(float(p.S)),
    )


def test_decay_that_is_added_to_scaled_gradients_is_told(family):
    trained = Trained(family)
    trained.build()

    @tf.function
    def step():
        (grad,) = trained.scaled(0.5)
        trained.apply([grad + 0.5 * tf.convert_to_tensor(trained.variables[0])])

    with heard() as messages:
        step()
    assert len(messages) == 1
    np.testing.assert_equal(trained.subtracted(), 0.5 + 0.5 * START / S)


def test_eager_mode_names_a_penalty_too_and_what_to_write(family):
    p = Program(family)
    weight = p.trained.variables[0]
    weight = getattr(weight, "value", weight) if family.name == "keras3" else weight
    with tf.GradientTape() as tape:
        loss = p.scale(p.loss) + p.penalty
    with heard() as messages:
        p.trained.apply([tape.gradient(loss, weight)])
    (message,) = messages
    assert "a number such as a penalty was added" in message
    assert "optimizer.scale_loss(loss + penalty)" in message
