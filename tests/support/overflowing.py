"""Models of every kind in which one layer overflows in float16, "hot", or none."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple

import numpy as np
import tensorflow as tf
from models import policy_of

from lossscale import LossScaleOptimizer

FLAT, ROWS = (6,), (4, 6)


class Parts(NamedTuple):
    """What a model is made of: the Keras, and whether its hot layer overflows."""

    keras: Any
    is_hot: bool

    def dense(self, units, name, **kwargs):
        """Returns a layer, which overflows if it is the hot one."""
        big = name == "hot" and self.is_hot
        kernel = self.keras.initializers.Constant(3e4 if big else 0.1)
        layer = self.keras.layers.Dense
        return layer(units, name=name, kernel_initializer=kernel, **kwargs)

    def head(self, tensor):
        """Returns a model's output."""
        return self.keras.layers.Dense(1, dtype="float32", name="head")(tensor)

    def model(self, shape, body):
        """Returns a functional model."""
        given = self.keras.Input(shape)
        return self.keras.Model(given, self.head(body(given)))


def sequential(parts):
    """The plainest model."""
    layers = [parts.dense(8, "a"), parts.dense(8, "hot"), parts.keras.layers.ReLU()]
    return parts.keras.Sequential([parts.keras.Input(FLAT), *layers])


def gated(parts):
    """Two branches, multiplied: the gate alone overflows."""
    gate, value = parts.dense(8, "hot"), parts.dense(8, "value")
    multiply = parts.keras.layers.Multiply()
    return parts.model(FLAT, lambda x: multiply([gate(x), value(x)]))


def subclassed(parts):
    """A model whose `call` has operations between the layers."""

    class Subclassed(parts.keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = parts.dense(8, "a"), parts.dense(8, "hot")
            self.drop, self.last = parts.keras.layers.Dropout(0.1), parts.dense(1, "b")

        def call(self, x, training=None):
            hidden = tf.nn.relu(self.second(tf.abs(self.first(x)) + 2))
            return self.last(self.drop(hidden, training=training))

    return Subclassed()


def nested(parts):
    """A model within a model."""
    inner = parts.keras.Sequential(
        [parts.dense(8, "a"), parts.dense(8, "hot")], name="encoder"
    )
    return parts.model(FLAT, inner)


def shared(parts):
    """A layer that is called twice, and overflows the second time."""
    hot, add = parts.dense(8, "hot"), parts.keras.layers.Add()
    return parts.model(FLAT, lambda x: add([hot(x * 1e-5), hot(x)]))


def recurrent(parts):
    """A layer for each time step between two recurrent ones."""
    layers = parts.keras.layers
    kernel = parts.keras.initializers.Constant(0.1)
    first = layers.GRU(6, return_sequences=True, kernel_initializer=kernel)
    last = layers.LSTM(4)
    each = layers.TimeDistributed(parts.dense(8, "hot"), name="each")
    return parts.model(ROWS, lambda x: last(each(first(x))))


def cell(parts):
    """A layer within the cell of a recurrent one, which a loop calls."""

    class Cell(parts.keras.layers.Layer):
        def __init__(self):
            super().__init__(name="cell")
            self.state_size = self.output_size = 4
            self.inner = parts.dense(4, "hot")

        def build(self, shape):
            self.inner.build(shape)
            super().build(shape)

        def call(self, x, states):
            found = self.inner(x) + states[0]
            return found, [found]

    return parts.model(ROWS, parts.keras.layers.RNN(Cell(), name="rnn"))


def attention(parts):
    """Attention whose logits overflow."""
    kernel = 300.0 if parts.is_hot else 0.1
    layer = parts.keras.layers.MultiHeadAttention(
        2, 4, name="hot", kernel_initializer=parts.keras.initializers.Constant(kernel)
    )
    pooled = parts.keras.layers.GlobalAveragePooling1D()
    return parts.model(ROWS, lambda x: pooled(layer(x, x)))


def masked(parts):
    """Attention by hand with a mask of -inf, which is meant to be."""

    class Mask(parts.keras.layers.Layer):
        def call(self, x):
            below = tf.linalg.band_part(tf.ones_like(x[:, :4, :4]), -1, 0)
            return tf.where(below > 0, tf.zeros_like(below), tf.math.log(below * 0))

    class Attention(parts.keras.layers.Layer):
        def call(self, given):
            x, mask = given
            logits = tf.matmul(x, x, transpose_b=True) / 8
            return tf.matmul(tf.nn.softmax(logits + mask), x)

    mask, seen = Mask(name="mask"), Attention(name="attention")
    hot, pooled = parts.dense(6, "hot"), parts.keras.layers.GlobalAveragePooling1D()
    return parts.model(ROWS, lambda x: pooled(hot(seen([x, mask(x)]))))


def normalized(parts):
    """A norm in float16 whose sum of squares overflows: its output is 0 then."""

    class Norm(parts.keras.layers.Layer):
        def call(self, x):
            x *= 2000.0 if parts.is_hot else 1.0
            square = tf.reduce_mean(tf.square(x), -1, keepdims=True)
            return x * tf.math.rsqrt(square + 0.01)

    first, norm = parts.dense(8, "a"), Norm(name="hot")
    return parts.model(FLAT, lambda x: norm(first(x)))


def dictionary(parts):
    """A model of which the inputs have names."""
    given = {name: parts.keras.Input(FLAT, name=name) for name in ("left", "right")}
    found = parts.dense(8, "a")(given["left"]), parts.dense(8, "hot")(given["right"])
    return parts.keras.Model(given, parts.head(parts.keras.layers.Add()(found)))


MODELS: Dict[str, Callable[[Parts], Any]] = {
    make.__name__: make
    for make in (
        *(sequential, gated, subclassed, nested, shared, recurrent, cell),
        *(attention, masked, normalized, dictionary),
    )
}
#: The whole path of the hot layer, where it is within another.
PATHS = {
    "nested": "encoder/hot",
    "recurrent": "each/hot",
    "cell": "rnn/cell/hot",
}


def data_for(name):
    """Returns a model's inputs and its targets."""
    x = np.random.default_rng(1).uniform(1, 3, [8, *FLAT]).astype(np.float32)
    if name in ("recurrent", "cell", "attention", "masked"):
        x = np.repeat(x[:, None], ROWS[0], axis=1)
    inputs = {"left": x, "right": x} if name == "dictionary" else x
    return inputs, np.ones([8, 8 if name == "sequential" else 1], np.float32)


def made(family, name, is_hot, policy="mixed_float16"):
    """Returns a compiled model, and its data."""
    with policy_of(family.keras, policy):
        model = MODELS[name](Parts(family.keras, is_hot))
    optimizer = LossScaleOptimizer(family.optimizers.SGD(2.0**-20), 16.0)
    model.compile(optimizer, loss="mse")
    return model, *data_for(name)
