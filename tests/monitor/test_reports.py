"""Programs of people who asked in public why their run dies: each is told the cause.

Each is written anew from what a report says: the names are those of the reports.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from faulty import told_of
from models import policy_of
from test_table import Row, check

from lossscale import LossScaleMonitor, LossScaleOptimizer
from lossscale.runtime import keras_versions

pytestmark = pytest.mark.slow
ROWS, STEPS = 4, 40
RNG = np.random.default_rng(0)


def sequential(keras, *layers, inputs=8):
    return keras.Sequential([keras.Input((inputs,)), *layers])


def features(count=8, size=1.0):
    x = RNG.normal(size=[ROWS * STEPS, count]).astype(np.float32) * size
    return x, x[:, :1] / size


def dense_as_a_sum(keras):
    """Issue tensorflow 38357: a float16 Dense(1) adds up many large numbers."""
    layer = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(10.0))
    x = np.full([ROWS * STEPS, 512], 16.0, np.float32)
    return sequential(keras, layer, inputs=512), "mse", x, x[:, :1]


def dice(y, p):
    y, p = tf.cast(y, tf.float16), tf.cast(p, tf.float16)
    same, both = tf.reduce_sum(y * p), tf.reduce_sum(y) + tf.reduce_sum(p)
    return tf.cast(1.0 - (2.0 * same + 1.0) / (both + 1.0), tf.float32)


def dice_loss(keras):
    """Issue tensorflow 45568: sums over the pixels of a batch, in float16."""
    x, _ = features()
    y = np.ones([len(x), 20000], np.float32)
    return sequential(keras, keras.layers.Dense(20000, "sigmoid")), dice, x, y


def own_cross_entropy(keras):
    """Issue keras 16552: the logarithm of a float16 softmax."""

    def loss(y, p):
        p = tf.nn.softmax(tf.cast(p, tf.float16) * 16.0)
        y = tf.cast(y, tf.float16)
        return tf.cast(-tf.reduce_sum(y * tf.math.log(p), -1), tf.float32)

    x, _ = features(size=4.0)
    y = np.eye(8, dtype=np.float32)[RNG.integers(0, 8, len(x))]
    return sequential(keras, keras.layers.Dense(8)), loss, x, y


def attention_mask(keras):
    """Issue gpt-2 122, flax 982: -1e9 is -inf in float16, and a row is all padding."""

    class Masked(keras.layers.Layer):
        def call(self, x):
            mask = tf.cast(x != 0.0, x.dtype)
            return tf.nn.softmax(x + (1.0 - mask) * tf.cast(-1e9, x.dtype)) * x

    x, y = features()
    x[::ROWS] = 0.0
    model = sequential(keras, Masked(), keras.layers.Dense(1, dtype="float32"))
    return model, "mse", x, y


def distance_of_equals(keras):
    """Issue tensorflow 12071, finetuner 34: the norm of a zero vector."""

    class Norm(keras.layers.Layer):
        def call(self, x):
            return tf.norm(x, axis=-1, keepdims=True)

    x, y = features()
    x[::ROWS] = 0.0
    first = keras.layers.Dense(8, use_bias=False, dtype="float32")
    return sequential(keras, first, Norm(dtype="float32")), "mse", x, y * 0 + 1.0


def gradient_penalty(keras):
    """Issue tensorflow 48662: the norm of a critic's gradient, zero at first."""

    class Critic(keras.Sequential):
        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    score = tf.reduce_sum(tf.cast(self(x), tf.float32))
                norm = tf.norm(inner.gradient(score, x), axis=-1)
                loss = tf.reduce_mean((norm - 1.0) ** 2)
                scaled = self.optimizer.scale_loss(loss)
            variables = self.trainable_variables
            tensors = [keras_versions.tensor_of(v) for v in variables]
            grads = tape.gradient(scaled, tensors)
            self.optimizer.apply_gradients(zip(grads, variables))
            return {"loss": loss}

    zeros = keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)
    return Critic([keras.Input((8,)), zeros]), "mse", *features()


def deep_residual(keras):
    """Issue keras 11832: the loss falls for some batches, then it is NaN: the rate."""
    x = given = keras.Input((8,))
    for _ in range(8):
        x = keras.layers.add([x, keras.layers.Dense(8)(x)])
    model = keras.Model(given, keras.layers.Dense(1, dtype="float32")(x))
    return model, "mse", *features()


def missing_values(keras):
    """Issue keras 2134, 12371: a table in which a few cells are missing."""
    x, y = features()
    x[[5, 77, 120], 3] = np.nan
    model = sequential(keras, keras.layers.Dense(1, dtype="float32"))
    return model, "mse", x, y


def own_softplus(keras):
    """A forum: log(exp(x) + 1) of pixels up to 255."""

    class Softplus(keras.layers.Layer):
        def call(self, x):
            return tf.math.log(tf.exp(x) + tf.cast(1.0, x.dtype))

    x, y = np.abs(features(size=100.0)[0]), features()[1]
    x[::ROWS] = 255.0
    model = sequential(keras, Softplus(), keras.layers.Dense(1, dtype="float32"))
    return model, "mse", x, y


def nan_when_evaluated(keras):
    """TensorFlowTTS 133, keras 19077: it trains, and evaluates to NaN."""
    x, y = features()
    x[50] = np.inf
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return sequential(keras, *layers), "mse", x, y


def sum_of_squares(keras):
    """Issue dreamer 10: a float16 sum is infinite. A lower loss scale would do."""

    def loss(y, p):
        difference = tf.cast(p, tf.float16) - tf.cast(y, tf.float16)
        return tf.cast(tf.reduce_sum(difference**2), tf.float32)

    x, y = features()
    model = sequential(keras, keras.layers.Dense(64))
    return model, loss, x, np.repeat(y * 0 + 40.0, 64, 1)


IN_16 = "stall activations float16 zero"
BACKWARD = "stall derivative large_gradients float16"
#: A program, its learning rate, and what must be and what may be said.
REPORTS = {
    dense_as_a_sum: (1e-3, IN_16, "negative no_scale_helps"),
    dice_loss: (1e-3, IN_16, "negative no_scale_helps"),
    own_cross_entropy: (1e-3, IN_16, "negative no_scale_helps"),
    attention_mask: (1e-3, IN_16, "negative no_scale_helps"),
    distance_of_equals: (1e-3, "stall derivative large_gradients", ""),
    gradient_penalty: (1e-3, BACKWARD, "learning_rate"),
    deep_residual: (
        0.5,
        "stall learning_rate float16",
        "zero negative no_scale_helps activations derivative high_scale "
        "large_gradients weights batches finite_data",
    ),
    missing_values: (1e-3, "batches rows skip", ""),
    own_softplus: (1e-3, IN_16, "negative no_scale_helps"),
    nan_when_evaluated: (1e-3, "batches rows skip statistics", ""),
    sum_of_squares: (1e-9, "batches finite_data", ""),
}


@pytest.mark.every
@pytest.mark.parametrize("program", REPORTS, ids=lambda program: program.__name__)
def test_each_is_told_its_cause(family, program):
    rate, must, may = REPORTS[program]
    with policy_of(family.keras, "mixed_float16"):
        model, loss, x, y = program(family.keras)
    model.compile(LossScaleOptimizer(family.optimizers.SGD(rate)), loss=loss)
    monitor = LossScaleMonitor(verbose=0)
    said, _ = told_of(model, x, y, monitor, ROWS)
    check(Row({}, must, may), said)
