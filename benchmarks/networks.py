"""Small networks of the usual kinds, for whole training steps."""

from __future__ import annotations

import keras
import tensorflow as tf
from workloads import WORKLOADS, Gradients, shared_by

layers = keras.layers
CLASSES = 10


def mlp(width=2000, depth=6):
    """A deep network whose weights outweigh its arithmetic: 24 million, for 8 rows."""
    hidden = [layers.Dense(width, "relu") for _ in range(depth)]
    return [keras.Input([width]), *hidden], tf.random.normal([8, width])


def deep(width=2000, depth=6):
    """The same weights with tanh and 4 rows, and no head."""
    hidden = [layers.Dense(width, "tanh") for _ in range(depth)]
    return [keras.Input([width]), *hidden], tf.random.normal([4, width])


def wide():
    """Eight matrices of 3000 x 3000, for the memory that they take: 288 MB."""
    return deep(3000, 8)


def tiny():
    """Two layers of 16 units, for the cost of a step that computes next to nothing."""
    return mlp(16, 2)


def convnet():
    """Images of 32 x 32 through six convolutions with batch normalization."""
    found = [keras.Input([32, 32, 3])]
    for filters in (32, 64, 128):
        for strides in (1, 2):
            found.append(layers.Conv2D(filters, 3, strides, "same", use_bias=False))
            found += [layers.BatchNormalization(), layers.ReLU()]
    found.append(layers.GlobalAveragePooling2D())
    return found, tf.random.normal([8, 32, 32, 3])


def lstm(width=128, length=32):
    """A recurrent layer over 8 sequences of 32 rows."""
    found = [keras.Input([length, width]), layers.LSTM(width)]
    return found, tf.random.normal([8, length, width])


def embedding(width=64, words=50_000, length=32):
    """A bag of words: an embedding, whose gradients are sparse, and their mean."""
    texts = tf.random.uniform([8, length], maxval=words, dtype=tf.int32)
    found = [keras.Input([length], dtype="int32"), layers.Embedding(words, width)]
    return [*found, layers.GlobalAveragePooling1D()], texts


class Block(layers.Layer):
    """A transformer's block: attention, then two dense layers, each with a skip."""

    def __init__(self, width, heads=4):
        super().__init__()
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.inner = layers.Dense(4 * width, "gelu")
        self.outer = layers.Dense(width)
        self.norms = [layers.LayerNormalization() for _ in range(2)]

    def build(self, shape):
        self.attention.build(shape, shape)
        self.inner.build(shape)
        self.outer.build((*shape[:-1], 4 * shape[-1]))
        for norm in self.norms:
            norm.build(shape)
        super().build(shape)

    def call(self, x):
        """Returns the block's output, in the shape of its input."""
        seen = self.norms[0](x)
        x += self.attention(seen, seen)
        return x + self.outer(self.inner(self.norms[1](x)))


def transformer(width=128, words=20_000, length=32):
    """Two blocks behind an embedding, whose gradients are sparse: 8 short texts."""
    texts = tf.random.uniform([8, length], maxval=words, dtype=tf.int32)
    embedding = layers.Embedding(words, width)
    blocks = [Block(width) for _ in range(2)]
    pooled = layers.GlobalAveragePooling1D()
    return [keras.Input([length], dtype="int32"), embedding, *blocks, pooled], texts


#: No networks: four variables of 100 numbers, and the loss of each step.
FOUR = {"four": 2.0**-8, "four-skipped": float("inf")}
MODELS = {
    "mlp": mlp,
    "deep": deep,
    "wide": wide,
    "convnet": convnet,
    "lstm": lstm,
    "embedding": embedding,
    "transformer": transformer,
    "tiny": tiny,
    **dict.fromkeys(FOUR),
}
#: Networks that have no classes: their outputs are compared with 0.
HEADLESS = ("deep", "wide")


def make(name, dtype):
    """Returns a model's variables, and a function that computes their gradients.

    Args:
      name: One of `MODELS`.
      dtype: A policy of Keras. With "float16" the variables are float16, too.
    """
    if name in FOUR:
        gradients = Gradients(*WORKLOADS["tiny"], loss=FOUR[name])
        return gradients.make_variables(), gradients
    keras.mixed_precision.set_global_policy(dtype)
    found, x = MODELS[name]()
    if name in HEADLESS:
        model = keras.Sequential(found)
        y, loss_of = tf.zeros_like(x), keras.losses.MeanSquaredError()
    else:
        model = keras.Sequential([*found, layers.Dense(CLASSES, dtype="float32")])
        y = tf.random.uniform([len(x)], maxval=CLASSES, dtype=tf.int32)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    variables = model.trainable_variables
    held = shared_by("keras2", variables)

    def gradients(scale_loss):
        with tf.GradientTape() as tape:
            loss = scale_loss(loss_of(y, model(x, training=True)))
        return tape.gradient(loss, held)

    return variables, gradients
