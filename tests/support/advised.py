"""Models that overflow in float16, made so that a report's advice can be followed.

Each builder takes a `Follower`, which makes every layer and every operation: as the
advice says, once there is some.
"""

from __future__ import annotations

import re

import numpy as np
import tensorflow as tf

LINE = re.compile(r'(\w+)\(\.\.\., dtype="float32", name=\'([^\']+)\'\)')


class Follower:
    """Makes layers and operations, and follows the advice that it was told.

    Attributes:
      names: The names of the layers to make in float32.
      casts: The names of operations, or of layers, whose operations' inputs to cast.
    """

    def __init__(self, keras):
        self.keras, self.names, self.casts = keras, set(), set()
        self.is_keras3 = keras.__name__ == "keras" and hasattr(keras, "ops")

    def follow(self, text):
        """Follows all advice in a text. Returns whether anything is new."""
        before = (len(self.names), len(self.casts))
        self.names |= {name for _, name in LINE.findall(text)}
        self.casts |= set(re.findall(r"([\w./]+) is an operation", text))
        self.casts |= set(re.findall(r"`call` of ([\w./]+) \(", text))
        return before != (len(self.names), len(self.casts))

    def dtype(self, name):
        return {"dtype": "float32"} if name in self.names else {}

    def layer(self, kind, *args, name, **kwargs):
        """Returns a layer of the Keras."""
        made = getattr(self.keras.layers, kind)
        return made(*args, name=name, **self.dtype(name), **kwargs)

    def dense(self, name, value=0.1, units=8):
        kernel = self.keras.initializers.Constant(value)
        return self.layer("Dense", units, name=name, kernel_initializer=kernel)

    def own(self, name, call, **parts):
        """Returns a custom layer of some layers, whose `call` is `call(self, x, cast)`.

        `cast` casts what the advice says to cast.
        """

        class Blk(self.keras.layers.Layer):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                for part, layer in parts.items():
                    setattr(self, part, layer)

            def call(block, x):  # noqa: N805
                return call(block, block.cast(x), block.cast)

            def cast(block, x):  # noqa: N805
                is_told = any(each.split("/")[-1] == name for each in self.casts)
                return tf.cast(x, tf.float32) if is_told else x

        return Blk(name=name, **self.dtype(name))

    def given(self, operation, *tensors):
        """Returns the inputs of an operation between layers, cast if so advised."""
        is_told = any(operation in each for each in self.casts)
        if not is_told:
            return tensors
        if self.is_keras3:
            return [self.keras.ops.cast(tensor, "float32") for tensor in tensors]
        return [tf.cast(tensor, tf.float32) for tensor in tensors]

    def model(self, shape, body):
        given = self.keras.Input(shape)
        last = self.keras.layers.Dense(
            1,
            dtype="float32",
            name="head",
            kernel_initializer=self.keras.initializers.Constant(1e-3),
        )
        return self.keras.Model(given, last(body(given)))


def product(f):
    """Two layers' outputs fit, but not their product."""
    g, v, norm = f.dense("g", 100.0), f.dense("v", 100.0), "n"

    def body(x):
        one, other = f.given("multiply", g(x), v(x))
        return f.layer("LayerNormalization", name=norm)(one * other)

    return f.model((6,), body)


def residual(f):
    """A sum of two that fit, but not the sum."""
    hidden = f.dense("hidden", 4000.0, 6)

    def body(x):
        once = hidden(x)
        one, other = f.given("add", once, once)
        return f.layer("LayerNormalization", name="n")(one + other)

    return f.model((6,), body)


def squared(f):
    """A function of Keras or of TensorFlow between the layers."""
    g = f.dense("g", 100.0)
    square = f.keras.ops.square if f.is_keras3 else tf.square

    def body(x):
        return f.layer("LayerNormalization", name="n")(square(*f.given("square", g(x))))

    return f.model((6,), body)


def gate_in_a_block(f):
    """A custom layer whose product overflows, and whose layers do not."""
    block = f.own(
        "blk",
        lambda b, x, cast: b.n(cast(b.g(x)) * cast(b.v(x))),
        g=f.dense("g", 100.0),
        v=f.dense("v", 100.0),
        n=f.layer("LayerNormalization", name="n"),
    )
    return f.model((6,), block)


def layer_in_a_block(f):
    """A custom layer of which one layer overflows, and meets float16 then."""
    block = f.own(
        "blk",
        lambda b, x, cast: b.n(cast(b.g(x)) * cast(b.v(x))),
        g=f.dense("g", 3e4),
        v=f.dense("v", 1e-3),
        n=f.layer("LayerNormalization", name="n"),
    )
    return f.model((6,), block)


def residual_in_a_block(f):
    """A custom layer that adds its input to an output that overflows."""
    block = f.own("blk", lambda b, x, cast: x + cast(b.g(x)), g=f.dense("g", 3e4, 6))
    norm = f.layer("LayerNormalization", name="n")
    return f.model((6,), lambda x: norm(block(x)))


def own_model(f):
    """A model whose `call` multiplies."""

    class Own(f.keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.g, self.v = f.dense("g", 100.0), f.dense("v", 100.0)
            self.n = f.layer("LayerNormalization", name="n")
            self.last = f.keras.layers.Dense(1, dtype="float32", name="head")

        def call(self, x):
            one, other = self.g(x), self.v(x)
            if "own" in f.casts:
                one, other = tf.cast(one, tf.float32), tf.cast(other, tf.float32)
            return self.last(self.n(one * other))

    return Own()


def own_norm(f):
    """A custom layer without layers, which overflows inside."""
    norm = f.own(
        "norm",
        lambda _, x, __: x * tf.math.rsqrt(tf.reduce_sum((x * 2000) ** 2) + 0.01),
    )
    first = f.dense("a")
    return f.model((6,), lambda x: norm(first(x)))


def each_step(f):
    """A layer for each time step."""
    each = f.layer("TimeDistributed", f.dense("hot", 3e4), name="each")
    norm = f.layer("LayerNormalization", name="n")
    pool = f.layer("GlobalAveragePooling1D", name="pool")
    return f.model((4, 6), lambda x: pool(norm(each(x))))


def state(f):
    """A recurrent layer that overflows in its own state."""
    rnn = f.layer(
        "SimpleRNN",
        4,
        name="rnn",
        activation="linear",
        recurrent_initializer=f.keras.initializers.Constant(50.0),
        kernel_initializer=f.keras.initializers.Constant(1.0),
    )
    norm = f.layer("LayerNormalization", name="n")
    return f.model((4, 6), lambda x: norm(rnn(x)))


def stacked(f):
    """The same in the first of two stacked cells."""
    constant = f.keras.initializers.Constant
    hot = {"activation": "linear", "recurrent_initializer": constant(100.0)}
    hot = {**hot, "kernel_initializer": constant(100.0)}
    cells = [f.layer("SimpleRNNCell", 4, name="one", **hot)]
    cells += [f.layer("SimpleRNNCell", 4, name="two")]
    stack = f.layer("StackedRNNCells", cells, name="stack")
    rnn = f.layer("RNN", stack, name="rnn")
    norm = f.layer("LayerNormalization", name="n")
    return f.model((4, 6), lambda x: norm(rnn(x)))


def both_ways(f):
    """The same, forwards and backwards."""
    rnn = f.layer(
        "SimpleRNN",
        4,
        name="rnn",
        activation="linear",
        recurrent_initializer=f.keras.initializers.Constant(50.0),
        kernel_initializer=f.keras.initializers.Constant(1.0),
    )
    both = f.layer("Bidirectional", rnn, name="both")
    norm = f.layer("LayerNormalization", name="n")
    return f.model((4, 6), lambda x: norm(both(x)))


def own_cell(f):
    """A cell of the user's own around a layer that overflows."""

    class Cell(f.keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.state_size = self.output_size = 4
            self.inner = f.dense("hot", 3e4, 4)

        def build(self, shape):
            self.inner.build(shape)
            super().build(shape)

        def call(self, x, states):
            found = self.inner(x) + states[0]
            return found, [found]

    cell = Cell(name="cell", **f.dtype("cell"))
    rnn = f.layer("RNN", cell, name="rnn")
    norm = f.layer("LayerNormalization", name="n")
    return f.model((4, 6), lambda x: norm(rnn(x)))


def attention(f):
    """Attention whose logits overflow."""
    kernel = f.keras.initializers.Constant(50.0)
    layer = f.layer("MultiHeadAttention", 2, 4, name="hot", kernel_initializer=kernel)
    pool = f.layer("GlobalAveragePooling1D", name="pool")
    norm = f.layer("LayerNormalization", name="n")
    return f.model((4, 6), lambda x: pool(norm(layer(x, x))))


def batch_norm(f):
    """A normalization of what a layer in float32 returns, beyond float16."""
    hot = f.dense("hot", 3e4)
    norm = f.layer("BatchNormalization", name="n")
    return f.model((6,), lambda x: norm(hot(x)))


def chain(f):
    """One layer that overflows, and others that pass its outputs on."""
    layers = [f.dense("a"), f.dense("hot", 3e4), f.layer("ReLU", name="relu")]
    layers += [f.dense("next", 1e-3), f.layer("Dropout", 0.1, name="drop")]

    def body(x):
        for layer in layers:
            x = layer(x)
        return x

    return f.model((6,), body)


MODELS = {
    make.__name__: make
    for make in (
        *(product, residual, squared, gate_in_a_block, layer_in_a_block),
        *(residual_in_a_block, own_model, own_norm, each_step, state, both_ways),
        *(stacked, own_cell, attention, batch_norm, chain),
    )
}
_ROWS_WANTED = {"each_step", "state", "stacked", "both_ways", "own_cell"}
_ROWS_WANTED |= {"attention"}


def data_for(name, rows=8):
    x = np.random.default_rng(1).uniform(1, 3, [rows, 6]).astype(np.float32)
    x = np.repeat(x[:, None], 4, axis=1) if name in _ROWS_WANTED else x
    return x, np.ones([rows, 1], np.float32)
