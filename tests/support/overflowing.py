"""Models that overflow in float16, made so that a report's advice can be followed.

Each builder takes a `Follower`, which makes every layer and every operation: as the
advice says, once there is some.
"""

from __future__ import annotations

import re

import numpy as np
import tensorflow as tf
from models import policy_of

from lossscale import LossScaleOptimizer

LINE = re.compile(r'(\w+)\(\.\.\., dtype="float32", name=\'([^\']+)\'\)')


class Follower:
    """Makes layers and operations, and follows the advice that it was told.

    Attributes:
      is_hot: Whether anything overflows.
      names: The names of the layers to make in float32.
      casts: The names of operations, or of layers, whose operations' inputs to cast.
    """

    def __init__(self, keras, is_hot=True):
        self.keras, self.names, self.casts = keras, set(), set()
        self.is_hot = is_hot
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
        kernel = self.keras.initializers.Constant(value if self.is_hot else 0.1)
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

    def norm(self, kind="LayerNormalization"):
        return self.layer(kind, name="n")

    def pool(self):
        return self.layer("GlobalAveragePooling1D", name="pool")

    def model(self, shape, *steps):
        """Returns a model of layers, or functions of layers, and a head."""
        x = given = self.keras.Input(shape)
        for step in steps:
            x = step(x)
        kernel = self.keras.initializers.Constant(1e-3)
        last = self.keras.layers.Dense(
            1, dtype="float32", name="head", kernel_initializer=kernel
        )
        return self.keras.Model(given, last(x))


def product(f):
    """Two layers' outputs fit, but not their product."""
    g, v = f.dense("g", 100.0), f.dense("v", 100.0)

    def multiplied(x):
        one, other = f.given("multiply", g(x), v(x))
        return one * other

    return f.model((6,), multiplied, f.norm())


def residual(f):
    """A sum of two that fit, but not the sum."""

    def doubled(x):
        one, other = f.given("add", x, x)
        return one + other

    return f.model((6,), f.dense("hidden", 4000.0, 6), doubled, f.norm())


def squared(f):
    """A function of Keras or of TensorFlow between the layers."""
    square = f.keras.ops.square if f.is_keras3 else tf.square

    def step(x):
        return square(*f.given("square", x))

    return f.model((6,), f.dense("g", 100.0), step, f.norm())


def _block(f, g, v):
    """A custom layer of three, of which it multiplies the outputs of two."""

    def call(block, x, cast):
        return block.n(cast(block.g(x)) * cast(block.v(x)))

    parts = {"g": f.dense("g", g), "v": f.dense("v", v), "n": f.norm()}
    return f.model((6,), f.own("blk", call, **parts))


def gate_in_a_block(f):
    """A custom layer whose product overflows, and whose layers do not."""
    return _block(f, 100.0, 100.0)


def layer_in_a_block(f):
    """A custom layer of which one layer overflows, and meets float16 then."""
    return _block(f, 3e4, 1e-3)


def residual_in_a_block(f):
    """A custom layer that adds its input to an output that overflows."""
    block = f.own("blk", lambda b, x, cast: x + cast(b.g(x)), g=f.dense("g", 3e4, 6))
    return f.model((6,), block, f.norm())


def own_model(f):
    """A model whose `call` multiplies."""

    class Own(f.keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.g, self.v = f.dense("g", 100.0), f.dense("v", 100.0)
            self.n = f.norm()
            self.last = f.keras.layers.Dense(1, dtype="float32", name="head")

        def call(self, x):
            one, other = self.g(x), self.v(x)
            if "own" in f.casts:
                one, other = tf.cast(one, tf.float32), tf.cast(other, tf.float32)
            return self.last(self.n(one * other))

    return Own()


def own_norm(f):
    """A custom layer without layers, which overflows inside: its output is 0 then."""
    factor = 2000 if f.is_hot else 1

    def call(_, x, __):
        return x * tf.math.rsqrt(tf.reduce_sum((x * factor) ** 2) + 0.01)

    return f.model((6,), f.dense("a"), f.own("hot", call))


def each_step(f):
    """A layer for each time step."""
    each = f.layer("TimeDistributed", f.dense("hot", 3e4), name="each")
    return f.model((4, 6), each, f.norm(), f.pool())


def _hot_loop(f, kind="SimpleRNN", name="rnn", first=1.0, again=50.0):
    constant = f.keras.initializers.Constant
    kernels = {"recurrent_initializer": constant(again)}
    kernels["kernel_initializer"] = constant(first)
    return f.layer(kind, 4, name=name, activation="linear", **kernels)


def state(f):
    """A recurrent layer that overflows in its own state."""
    return f.model((4, 6), _hot_loop(f), f.norm())


def stacked(f):
    """The same in the first of two stacked cells."""
    cells = [_hot_loop(f, "SimpleRNNCell", "one", 100.0, 100.0)]
    cells += [f.layer("SimpleRNNCell", 4, name="two")]
    stack = f.layer("StackedRNNCells", cells, name="stack")
    return f.model((4, 6), f.layer("RNN", stack, name="rnn"), f.norm())


def both_ways(f):
    """The same as `state`, forwards and backwards."""
    both = f.layer("Bidirectional", _hot_loop(f), name="both")
    return f.model((4, 6), both, f.norm())


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
    return f.model((4, 6), f.layer("RNN", cell, name="rnn"), f.norm())


def attention(f):
    """Attention whose logits overflow."""
    kernel = f.keras.initializers.Constant(300.0 if f.is_hot else 0.1)
    layer = f.layer("MultiHeadAttention", 2, 4, name="hot", kernel_initializer=kernel)
    return f.model((4, 6), lambda x: layer(x, x), f.norm(), f.pool())


def batch_norm(f):
    """A normalization of what a layer in float32 returns, beyond float16."""
    return f.model((6,), f.dense("hot", 3e4), f.norm("BatchNormalization"))


def chain(f):
    """One layer that overflows, and others that pass its outputs on."""
    layers = [f.dense("a"), f.dense("hot", 3e4), f.layer("ReLU", name="relu")]
    layers += [f.dense("next", 1e-3), f.layer("Dropout", 0.1, name="drop")]
    return f.model((6,), *layers)


def gated(f):
    """Two branches, multiplied: the gate alone overflows."""
    gate, value = f.dense("hot", 3e4), f.dense("value")
    multiply = f.layer("Multiply", name="multiply")
    return f.model((6,), lambda x: multiply([gate(x), value(x)]))


def subclassed(f):
    """A model whose `call` has operations between the layers."""

    class Subclassed(f.keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = f.dense("a"), f.dense("hot", 3e4)
            self.drop, self.last = f.keras.layers.Dropout(0.1), f.dense("b", units=1)

        def call(self, x, training=None):
            hidden = tf.nn.relu(self.second(tf.abs(self.first(x)) + 2))
            return self.last(self.drop(hidden, training=training))

    return Subclassed()


def nested(f):
    """A model within a model."""
    layers = [f.dense("a"), f.dense("hot", 3e4)]
    return f.model((6,), f.keras.Sequential(layers, name="encoder"))


def shared(f):
    """A layer that is called twice, and overflows the second time."""
    hot, add = f.dense("hot", 3e4), f.layer("Add", name="add")
    return f.model((6,), lambda x: add([hot(x * 1e-5), hot(x)]))


def masked(f):
    """Attention by hand with a mask of -inf, which is meant to be."""

    class Mask(f.keras.layers.Layer):
        def call(self, x):
            below = tf.linalg.band_part(tf.ones_like(x[:, :4, :4]), -1, 0)
            return tf.where(below > 0, tf.zeros_like(below), tf.math.log(below * 0))

    class Attention(f.keras.layers.Layer):
        def call(self, given):
            x, mask = given
            logits = tf.matmul(x, x, transpose_b=True) / 8
            return tf.matmul(tf.nn.softmax(logits + mask), x)

    mask, seen = Mask(name="mask"), Attention(name="attention")
    hot = f.dense("hot", 3e4, 6)
    return f.model((4, 6), lambda x: seen([x, mask(x)]), hot, f.pool())


def dictionary(f):
    """A model of which the inputs have names."""
    given = {name: f.keras.Input((6,), name=name) for name in ("left", "right")}
    both = f.dense("a")(given["left"]), f.dense("hot", 3e4)(given["right"])
    return f.keras.Model(given, f.dense("head", 1e-3, 1)(f.keras.layers.Add()(both)))


MODELS = {
    make.__name__: make
    for make in (
        *(product, residual, squared, gate_in_a_block, layer_in_a_block),
        *(residual_in_a_block, own_model, own_norm, each_step, state, both_ways),
        *(stacked, own_cell, attention, batch_norm, chain),
    )
}
#: Those in which a layer of this name overflows, unless `is_hot` is False.
HOT = {
    make.__name__: make
    for make in (
        *(chain, gated, subclassed, nested, shared, each_step, own_cell),
        *(attention, masked, own_norm, dictionary),
    )
}
#: The whole path of the hot layer, where it is within another.
PATHS = {"nested": "encoder/hot", "each_step": "each/hot", "own_cell": "rnn/cell/hot"}
_ROWS_WANTED = {"each_step", "state", "stacked", "both_ways", "own_cell", "attention"}
_ROWS_WANTED |= {"masked"}


def data_for(name, rows=8):
    """Returns a model's inputs and its targets."""
    x = np.random.default_rng(1).uniform(1, 3, [rows, 6]).astype(np.float32)
    x = np.repeat(x[:, None], 4, axis=1) if name in _ROWS_WANTED else x
    inputs = {"left": x, "right": x} if name == "dictionary" else x
    return inputs, np.ones([rows, 1], np.float32)


def made(family, name, is_hot=True, policy="mixed_float16", scale=16.0, follower=None):
    """Returns a compiled model, and its data."""
    with policy_of(family.keras, policy):
        follower = follower or Follower(family.keras, is_hot)
        model = {**MODELS, **HOT}[name](follower)
    model.compile(LossScaleOptimizer(family.optimizers.SGD(0.0), scale), loss="mse")
    return model, *data_for(name)
