"""Programs of people who asked in public why their run dies, each written anew.

Each returns a model, its loss, and the data. `test_table` has what each is told.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from lossscale.runtime import keras_versions

ROWS, STEPS = 4, 40
RNG = np.random.default_rng(0)


def sequential(keras, *layers, inputs=8):
    return keras.Sequential([keras.Input((inputs,)), *layers])


def last(keras, *args, **kwargs):
    return keras.layers.Dense(1, *args, dtype="float32", **kwargs)


def features(count=8, size=1.0):
    x = RNG.normal(size=[ROWS * STEPS, count]).astype(np.float32) * size
    return x, x[:, :1] / size


def layer_of(keras, function, **kwargs):
    class Own(keras.layers.Layer):
        def call(self, x):
            return function(x)

    return Own(**kwargs)


def attention_mask(keras):
    """Issue gpt-2 122, flax 982: -1e9 is -inf in float16, and a row is all padding."""

    def masked(x):
        mask = tf.cast(x != 0.0, x.dtype)
        return tf.nn.softmax(x + (1.0 - mask) * tf.cast(-1e9, x.dtype)) * x

    x, y = features()
    x[::ROWS] = 0.0
    return sequential(keras, layer_of(keras, masked), last(keras)), "mse", x, y


def distance_of_equals(keras):
    """Issue tensorflow 12071, finetuner 34: the norm of a zero vector."""
    x, y = features()
    x[::ROWS] = 0.0
    first = keras.layers.Dense(8, use_bias=False, dtype="float32")
    norm = layer_of(
        keras, lambda x: tf.norm(x, axis=-1, keepdims=True), dtype="float32"
    )
    return sequential(keras, first, norm), "mse", x, y * 0 + 1.0


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


def sum_of_squares(keras):
    """Issue dreamer 10: a float16 sum is infinite. A lower loss scale would do."""

    def loss(y, p):
        difference = tf.cast(p, tf.float16) - tf.cast(y, tf.float16)
        return tf.cast(tf.reduce_sum(difference**2), tf.float32)

    x, y = features()
    model = sequential(keras, keras.layers.Dense(64))
    return model, loss, x, np.repeat(y * 0 + 40.0, 64, 1)


def cross_entropy_without_clipping(keras):
    """A forum: -y log p - (1 - y) log(1 - p), and a sigmoid that is 1."""

    def loss(y, p):
        return -y * tf.math.log(p) - (1.0 - y) * tf.math.log(1.0 - p)

    x, y = features(size=400.0)
    return sequential(keras, last(keras, "sigmoid")), loss, x, np.float32(y > 0)


def prices_as_targets(keras):
    """A forum: prices of houses, in units of one, and a float16 output."""
    x, y = features()
    return sequential(keras, keras.layers.Dense(1)), "mse", x, y * 0 + 2e6


def rate_of_one(keras):
    """A forum: it was good in float32 with 1e-3, and now the rate is 1."""
    hidden = [keras.layers.Dense(64) for _ in range(3)]
    return sequential(keras, *hidden, last(keras)), "mse", *features(size=4.0)


def table_with_gaps(keras):
    """Issue keras 2134, 12371: a data set, in which a few cells are missing."""
    x, y = features()
    x[[77, 78], 3] = np.nan
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS)
    return sequential(keras, last(keras)), "mse", dataset, None


def weights_of_padding(keras):
    """A forum: a mean over the words of a batch, and one batch is all padding."""

    def loss(y, p):
        weights = tf.cast(y != 0.0, p.dtype)
        return tf.reduce_sum(weights * (p - y) ** 2) / tf.reduce_sum(weights)

    x, y = features()
    y[40:44] = 0.0
    return sequential(keras, last(keras)), loss, x, y


def cast_in_a_layer(keras):
    """A forum: a layer of one's own casts to float16, and adds squares up in it."""

    def power(x):
        x = tf.cast(x, tf.float16)
        return tf.cast(tf.reduce_sum(x * x, -1, keepdims=True), tf.float32)

    x, y = features(size=300.0)
    layer = layer_of(keras, power, dtype="float32")
    first = keras.layers.Dense(8)
    return sequential(keras, first, layer, last(keras)), "mse", x, y


def variational(keras):
    """A forum: exp of the logarithm of a variance, of inputs that are not scaled."""
    x, y = features(size=30.0)
    first = keras.layers.Dense(8, kernel_initializer="ones")
    model = sequential(keras, first, layer_of(keras, tf.exp), last(keras))
    return model, "mse", x, y
