"""Models that overflow in float16, made so that a report's advice can be followed.

Each builder takes a `Maker`, which makes every layer and every operation: as the advice
says, once there is some.
"""

import re

import numpy as np
import tensorflow as tf
from models import has_ops, policy_of

from lossscale import DynamicLossScale, LossScaleOptimizer

FLAT, ROWS = (6,), (4, 6)
LINE = re.compile(r'(\w+)\(\.\.\., dtype="float32", name=\'([^\']+)\'\)')


class Maker:
    """Makes layers and operations, and follows the advice that it was told.

    Attributes:
      keras: The Keras.
      is_hot: Whether the layer "hot" overflows.
      names: The names of the layers to make in float32.
      casts: The names of operations, or of layers, whose operations' inputs to cast.
    """

    def __init__(self, keras):
        self.keras, self.is_hot = keras, True
        self.names, self.casts = set(), set()

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
        return made(*args, name=name, **{**kwargs, **self.dtype(name)})

    def dense(self, name, value=0.1, units=8, **kwargs):
        kernel = self.keras.initializers.Constant(value)
        return self.layer(
            "Dense", units, name=name, kernel_initializer=kernel, **kwargs
        )

    def hot(self, units=8):
        return self.dense("hot", 3e4 if self.is_hot else 0.1, units)

    def head(self):
        return self.dense("head", 1e-3, units=1, dtype="float32")

    def norm(self):
        return self.layer("LayerNormalization", name="n")

    def pool(self):
        return self.layer("GlobalAveragePooling1D", name="pool")

    def own(self, name, call, **parts):
        """Returns a custom layer of the layers `parts`.

        It computes `call(x, cast, **parts)`. `cast` casts what the advice says to cast.
        """

        class Blk(self.keras.layers.Layer):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                for part, layer in parts.items():
                    setattr(self, part, layer)

            def call(block, x):  # noqa: N805
                return call(block.cast(x), block.cast, **parts)

            def cast(block, x):  # noqa: N805
                is_told = any(each.split("/")[-1] == name for each in self.casts)
                return tf.cast(x, tf.float32) if is_told else x

        return Blk(name=name, **self.dtype(name))

    def given(self, operation, *tensors):
        """Returns the inputs of an operation between layers, cast if so advised."""
        if not any(operation in each for each in self.casts):
            return tensors
        cast = self.keras.ops.cast if has_ops(self.keras) else tf.cast
        return [cast(tensor, "float32") for tensor in tensors]

    def model(self, shape, *parts):
        """Returns a functional model of layers and functions, one after the other."""
        given = x = self.keras.Input(shape)
        for part in (*parts, self.head()):
            x = part(x)
        return self.keras.Model(given, x)


def attention(m):
    """Attention whose logits overflow."""
    kernel = m.keras.initializers.Constant(300.0 if m.is_hot else 0.1)
    layer = m.layer("MultiHeadAttention", 2, 4, name="hot", kernel_initializer=kernel)
    return m.model(ROWS, lambda x: layer(x, x), m.norm(), m.pool())


def normalized(m):
    """A norm in float16 whose sum of squares overflows: its output is 0 then."""

    def call(x, _):
        x *= 2000.0 if m.is_hot else 1.0
        return x * tf.math.rsqrt(tf.reduce_mean(x**2, -1, keepdims=True) + 0.01)

    return m.model(FLAT, m.dense("a"), m.own("hot", call))


def cell(m):
    """A layer within the cell of a recurrent one, which a loop calls."""

    class Cell(m.keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.state_size = self.output_size = 4
            self.inner = m.hot(4)

        def build(self, shape):
            self.inner.build(shape)
            super().build(shape)

        def call(self, x, states):
            found = self.inner(x) + states[0]
            return found, [found]

    made = Cell(name="cell", **m.dtype("cell"))
    return m.model(ROWS, m.layer("RNN", made, name="rnn"), m.norm())


def gated(m):
    """Two branches, multiplied: the gate alone overflows."""
    gate, value = m.hot(), m.dense("value")
    multiply = m.layer("Multiply", name="multiply")
    return m.model(FLAT, lambda x: multiply([gate(x), value(x)]))


def subclassed(m):
    """A model whose `call` has operations between the layers."""

    class Subclassed(m.keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = m.dense("a"), m.hot()
            self.drop, self.last = m.layer("Dropout", 0.1, name="d"), m.head()

        def call(self, x, training=None):
            hidden = tf.nn.relu(self.second(tf.abs(self.first(x)) + 2))
            return self.last(self.drop(hidden, training=training))

    return Subclassed()


def nested(m):
    """A model within a model."""
    return m.model(FLAT, m.keras.Sequential([m.dense("a"), m.hot()], name="encoder"))


def shared(m):
    """A layer that is called twice, and overflows the second time."""
    hot, add = m.hot(), m.layer("Add", name="add")
    return m.model(FLAT, lambda x: add([hot(x * 1e-5), hot(x)]))


def masked(m):
    """Attention by hand with a mask of -1e9: -inf in float16, which is meant to be."""

    def masking(x, _):
        below = tf.linalg.band_part(tf.ones_like(x[:, :4, :4]), -1, 0)
        return tf.where(below > 0, tf.zeros_like(below), tf.cast(-1e9, x.dtype))

    def attending(given, _):
        x, mask = given
        logits = tf.matmul(x, x, transpose_b=True) / 8
        return tf.matmul(tf.nn.softmax(logits + mask), x)

    mask, attend = m.own("mask", masking), m.own("attention", attending)
    return m.model(ROWS, lambda x: attend([x, mask(x)]), m.hot(6), m.pool())


def dictionary(m):
    """A model of which the inputs have names."""
    given = {name: m.keras.Input(FLAT, name=name) for name in ("left", "right")}
    found = m.dense("a")(given["left"]), m.hot()(given["right"])
    return m.keras.Model(given, m.head()(m.layer("Add", name="add")(found)))


def product(m):
    """Two layers' outputs fit, but not their product."""
    g, v = m.dense("g", 100.0), m.dense("v", 100.0)

    def multiplied(x):
        one, other = m.given("multiply", g(x), v(x))
        return one * other

    return m.model(FLAT, multiplied, m.norm())


def gate_in_a_block(m, gate=100.0, value=100.0):
    """A custom layer whose product overflows, and whose layers do not."""
    block = m.own(
        "blk",
        lambda x, cast, g, v, n: n(cast(g(x)) * cast(v(x))),
        g=m.dense("g", gate),
        v=m.dense("v", value),
        n=m.norm(),
    )
    return m.model(FLAT, block)


def layer_in_a_block(m):
    """A custom layer of which one layer overflows, and meets float16 then."""
    return gate_in_a_block(m, 3e4, 1e-3)


def state(m):
    """A recurrent layer that overflows in its own state."""
    constant = m.keras.initializers.Constant
    starts = {"recurrent_initializer": constant(50.0), "kernel_initializer": "ones"}
    layer = m.layer("SimpleRNN", 4, name="rnn", activation="linear", **starts)
    return m.model(ROWS, layer, m.norm())


def batch_norm(m):
    """A normalization of what a layer in float32 returns, beyond float16."""
    return m.model(FLAT, m.hot(), m.layer("BatchNormalization", name="n"))


_HOT = (attention, normalized, cell, gated, subclassed, nested)
_HOT = (*_HOT, shared, masked, dictionary)
_OTHERS = (product, gate_in_a_block, layer_in_a_block, state, batch_norm)
MODELS = {make.__name__: make for make in (*_HOT, *_OTHERS)}
#: The whole path of the layer "hot", of the models that are hot or not.
HOT = {make.__name__: "hot" for make in _HOT}
HOT.update(nested="encoder/hot", cell="rnn/cell/hot")
_ROWS_WANTED = {"state", "cell", "attention", "masked"}


def data_for(name):
    """Returns a model's inputs and its targets."""
    x = np.random.default_rng(1).uniform(1, 3, [8, *FLAT]).astype(np.float32)
    if name in _ROWS_WANTED:
        x = np.repeat(x[:, None], ROWS[0], axis=1)
    inputs = {"left": x, "right": x} if name == "dictionary" else x
    return inputs, np.ones([8, 1], np.float32)


def made(family, name, policy="mixed_float16", maker=None):
    """Returns a compiled model, its inputs and its targets."""
    with policy_of(family.keras, policy):
        model = MODELS[name](maker or Maker(family.keras))
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.0), DynamicLossScale(1.0))
    model.compile(optimizer, loss="mse")
    return model, *data_for(name)
