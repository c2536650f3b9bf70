"""OpenSeq2Seq's rule, which was LogNormalLossScale in 2.x, as one of your own."""

from __future__ import annotations

import math

import tensorflow as tf

import lossscale


class LogNormal(lossscale.LossScale):
    """Keeps overflows as rare as 1 in 1,000 steps: OpenSeq2Seq's LogMax.

    It assumes that the largest gradients of the steps are log-normally distributed.
    """

    needs_largest = True

    def __init__(self, initial_loss_scale=1.0, standard_deviations=3.09):
        super().__init__(initial_loss_scale)
        self.standard_deviations = standard_deviations
        self.seen_steps = self._add_weight("seen_steps", 0, tf.int64)
        # The variance is a difference of squares: in float32 mere rounding error.
        self.mean = self._add_weight("mean", 0.0, tf.float64)
        self.slow_mean = self._add_weight("slow_mean", 0.0, tf.float64)
        self.slow_square = self._add_weight("slow_square", 0.0, tf.float64)

    def next_state(self, state, is_finite, largest):
        # An overflow counts as one doubling above the largest that the scale allowed.
        largest = tf.where(is_finite, largest, 2.0**17 / state.current_loss_scale)
        x = tf.cast(tf.maximum(largest, 2.0**-126), tf.float64)
        x = tf.math.log(x) / math.log(2.0)
        steps = tf.cast(state.seen_steps + 1, tf.float64)

        def averaged(old, value, beta):
            new = beta * old + (1.0 - beta) * value
            return new, new / (1.0 - tf.pow(tf.constant(beta, tf.float64), steps))

        mean, m = averaged(state.mean, x, 0.99)
        slow_mean, s = averaged(state.slow_mean, x, 0.999)
        slow_square, of_squares = averaged(state.slow_square, x * x, 0.999)
        sigma = tf.sqrt(tf.nn.relu(of_squares - s * s))
        power = 16.0 - (m + self.standard_deviations * sigma)
        power = tf.clip_by_value(power, 0.0, 24.0)  # from 1 to 2**24
        new = {
            "current_loss_scale": tf.cast(2.0**power, tf.float32),
            "seen_steps": state.seen_steps + 1,
            "mean": mean,
            "slow_mean": slow_mean,
            "slow_square": slow_square,
        }
        # Where all gradients are zero, nothing is learned of them.
        is_silent = tf.equal(largest, 0.0)
        return {
            name: tf.where(is_silent, getattr(state, name), value)
            for name, value in new.items()
        }

    def get_config(self):
        names = "initial_loss_scale", "standard_deviations"
        return {name: getattr(self, name) for name in names}


# The limit of each step is drawn at random, around 2**20.
limit = 2.0 ** (20 + 2 * tf.random.stateless_normal([2_000], [1, 1]).numpy())
print(lossscale.simulate(LogNormal(), limit=limit))
