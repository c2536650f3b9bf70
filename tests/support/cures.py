"""Faults of float16 training, what cures each, and models that follow what is said.

A row of the data is zero, as padding is. So `bad`, the layer at fault, gets a row of
zeros. What a text says is followed literally: each line with a dtype, the small number
that it names, and a floor of the loss scale.
"""

from __future__ import annotations

import re

import numpy as np
import tensorflow as tf
from models import compiled_by, policy_of, seed_all

from lossscale import DynamicLossScale, LossScaleOptimizer

ROWS, FEATURES = 32, 8
_LINE = re.compile(r'\w+\(\.\.\., dtype="float32", name=\'([^\']+)\'\)')
_SMALL = re.compile(r"(?:such as|x \+|1 -|maximum\(x,) (1e-[0-9])")


def total(x):
    return tf.reduce_sum(tf.abs(x), -1, keepdims=True)


def limited(x, small):
    return tf.clip_by_value(x, small - 1, 1 - small) if small else x


#: The fault -> what the layer computes of a tensor and the small number that a text
#: names, 0 as long as it names none. These are not finite in float32 either.
UNCURED = {
    "0/0": lambda x, small: x / (total(x) + small),
    "1/0": lambda x, small: 1e-2 / (tf.abs(x) + small) + x,
    "log(0)": lambda x, small: tf.math.log(tf.abs(x) + small),
    "log1p(-1)": lambda x, small: tf.math.log1p(small - tf.exp(-tf.abs(x))),
    "rsqrt(0)": lambda x, small: x * tf.math.rsqrt(total(x * x) + small),
    "norm": lambda x, small: x / tf.sqrt(tf.reduce_sum(x * x, -1, True) + small),
    "norm'(0)": lambda x, small: x + tf.sqrt(tf.reduce_sum(x * x, -1, True) + small),
    "sqrt'(0)": lambda x, small: tf.sqrt(tf.nn.relu(x) + small) + x,
    "pow'(0)": lambda x, small: (tf.nn.relu(x) + small) ** 0.5 + x,
    "acos'(1)": lambda x, small: tf.acos(limited(1 - tf.tanh(tf.abs(x)), small)) + x,
    "asin'(-1)": lambda x, small: tf.asin(limited(tf.tanh(tf.abs(x)) - 1, small)) + x,
    "atanh(1)": lambda x, small: tf.atanh(limited(1 - tf.tanh(tf.abs(x)), small)) + x,
}
#: These are finite in float32.
CURED = {
    "square": lambda x, _: tf.sqrt(total((x * 1e3) ** 2) + 1.0) * 1e-3 + x,
    "product": lambda x, _: (x + 1) * 3e4 * 3 * 1e-5,
    "exponential": lambda x, _: tf.exp(x * 0 + 12) * 1e-5 + x,
    "softmax": lambda x, _: tf.exp(x * 30) / tf.reduce_sum(tf.exp(x * 30), -1, True),
    "log(1e-8)": lambda x, _: tf.math.log(tf.abs(x) + 1e-8) * 0.1 + x,
    "sqrt'(1e-8)": lambda x, _: tf.sqrt(tf.nn.relu(x) + 1e-8) + x,
    "rsqrt(1e-8)": lambda x, _: x * tf.math.rsqrt(total(x * x) + 1e-8),
    "0/1e-8": lambda x, _: x / (tf.abs(x) + 1e-8) + x,
    "0/0 of what was lost": lambda x, _: x / (total(x) + 1e-20) * 3,
    "log of what was lost": lambda x, _: tf.math.log(total(x)) * 0.1 + x,
}
#: There the layer before returns numbers that are zero in float16.
LOST_BEFORE = ("0/0 of what was lost", "log of what was lost")
#: Those of a loss, of the outputs and the targets, which are 0 where a row is.
LOSSES = {
    "log(0) in the loss": lambda y, x, small: (
        tf.math.log(tf.abs(y) + small) * 1e-3 * x + (y - x) ** 2
    ),
    "sqrt'(0) in the loss": lambda y, x, small: tf.sqrt((x - y) ** 2 + small),
}


class Program:
    """A program that trains a model, and follows what a text says.

    Attributes:
      names: The layers that are made with dtype="float32".
      small: The small number that is added, 0 as long as none was named.
      least: The floor of the loss scale.
    """

    def __init__(self, family, fault, mode="graph"):
        self.family, self.fault, self.mode = family, fault, mode
        self.names, self.small, self.least = set(), 0.0, 1.0
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=[ROWS, FEATURES]).astype("float32")
        self.x[:2] = 0.0
        # At a layer the zero row has an error, so that a gradient comes back.
        self.y = self.x[:, :1] + (0.0 if fault in LOSSES else 1.0)
        if fault in LOST_BEFORE:
            self.x, self.y = self.x[2:], self.y[2:]

    def follow(self, text):
        """Follows a text. Returns whether there is anything new to do."""
        before = (set(self.names), self.small, self.least)
        self.names |= set(_LINE.findall(text))
        self.small = max([self.small, *map(float, _SMALL.findall(text))])
        if "min_loss_scale=2.0**-24" in text:
            self.least = 2.0**-24
        return before != (self.names, self.small, self.least)

    def model(self):
        keras, program = self.family.keras, self
        compute = {**UNCURED, **CURED}.get(self.fault, lambda x, _: x)

        class Layer(keras.layers.Layer):
            def call(self, x):
                return compute(x, program.small)

        class Tiny(keras.layers.Layer):
            def call(self, x):
                return x * 1e-9 if program.fault in LOST_BEFORE else x

        def loss(y, outputs):
            y = tf.cast(y, outputs.dtype)
            return tf.reduce_mean(LOSSES[program.fault](y, outputs, program.small), -1)

        def dtype(name):
            return {"dtype": "float32"} if name in self.names else {}

        dense = keras.layers.Dense
        seed_all(keras)
        with policy_of(keras, "mixed_float16"):
            model = keras.Sequential(
                [
                    keras.Input([FEATURES]),
                    dense(4, use_bias=False, name="before", **dtype("before")),
                    Tiny(name="tiny", **dtype("tiny")),
                    Layer(name="bad", **dtype("bad")),
                    dense(1, use_bias=False, dtype="float32", name="out"),
                ]
            )
        scale = DynamicLossScale(2.0**10, min_loss_scale=self.least)
        optimizer = LossScaleOptimizer(self.family.optimizers.SGD(1e-3), scale)
        chosen = loss if self.fault in LOSSES else "mse"
        model.compile(optimizer, loss=chosen, **compiled_by(self.mode))
        return model

    def trains(self, steps=40):
        """Tells whether most steps are applied, and move the weights before."""
        model = self.model()
        start = model.get_weights()
        x, y = np.tile(self.x, (steps, 1)), np.tile(self.y, (steps, 1))
        model.fit(x, y, batch_size=len(self.x), shuffle=False, verbose=0)
        moved = [np.abs(a - b).max() for a, b in zip(start, model.get_weights())]
        are_finite = all(np.isfinite(each).all() for each in model.get_weights())
        applied = int(model.optimizer.applied_steps.numpy())
        return are_finite and applied > steps / 2 and moved[0] > 0
