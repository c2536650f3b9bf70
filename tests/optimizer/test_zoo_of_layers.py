"""Layers and expressions in a small network: `fit` trains as the bare optimizer.

A group of them is in one network, each in a branch of its own, between two layers
without a bias, whose gradient is scaled whatever the layer does. What is on the way
forward is a factor of the weights' gradients, so that a wrong rule divides one twice,
or never. The gradient of each expression is linear in what comes back: what is not, as
a custom gradient that clips, trains otherwise when it is scaled.
"""

import numpy as np
import pytest
import tensorflow as tf
from exact import heard
from installed import families
from models import compiled_by, has_ops, seed_all

from lossscale import LossScaleOptimizer

PLAIN = {"use_bias": False}
#: Input's shape -> layers, and what each is called with. Layers of one kind compute
#: alike: one of them is here, and none that is a single operation below.
LAYERS = {
    (4,): """
Dense(3, "relu", **PLAIN)(x)
EinsumDense("ab,bc->ac", 3)(x)
SpectralNormalization(layers.Dense(3, **PLAIN))(x)
Dropout(0.5, seed=3)(x)
Embedding(8, 3)(layers.Discretization([0.2, 0.5])(x))
""",
    (6, 3): """
Masking(0.0)(x)
TimeDistributed(layers.Dense(3, **PLAIN))(x)
LayerNormalization()(x)
GRU(3, **PLAIN)(x)
LSTM(3, **PLAIN)(x)
RNN(layers.SimpleRNNCell(3, **PLAIN))(x)
Dot(2)([x, x])
AdditiveAttention()([x, x])
MultiHeadAttention(2, 3, **PLAIN)(x, x)
""",
    # Images, of which some are drawn anew in each step.
    (6, 6, 3): """
BatchNormalization()(x)
Conv2D(2, 3, padding="same", **PLAIN)(x)
RandomFlip(seed=3)(x)
RandomRotation(0.2, seed=3)(x)
""",
}
#: Nothing is trained before it.
FIRST = {"Embedding"}
#: What the newest Keras 2 cannot train: its own check takes no InputSpec.
FAIL_IN_KERAS_2 = {"SpectralNormalization"}


FEATURES = 4  # of a batch of floats, which each expression takes
MATRIX = np.eye(FEATURES, dtype=np.float32)[::-1] + np.float32(0.25)
KEEP = np.array([1, 0, 1, 1], np.float32)
zeros = tf.zeros_like


def of_width(result):
    """Returns a result whose width TensorFlow has lost."""
    return tf.reshape(result, [-1, FEATURES])


def impute(x):
    return tf.where(tf.math.is_nan(x), zeros(x), x)


@tf.function
def _function(x):
    total = zeros(x)
    for i in tf.range(3):
        if i > 0:
            total += x
    return total


def _scattered_where(x):
    places = tf.where(x > 0)
    kept = tf.tensor_scatter_nd_update(zeros(x), places, tf.gather_nd(x, places))
    return of_width(kept)


def _partitioned(x):
    numbers = tf.cast(x[:, 0] > 0, tf.int32)
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), numbers, 2)
    parts = tf.dynamic_partition(x, numbers, 2)
    return of_width(tf.dynamic_stitch(places, [parts[0], 2.0 * parts[1]]))


def _with_gradient(backward, forward=tf.identity):
    """Returns a function with a backward pass of its own."""

    @tf.custom_gradient
    def function(x):
        return forward(x), lambda upstream: backward(x, upstream)

    return function


def _slope(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(x**3 / 8.0)
    return tape.gradient(y, x)


#: What expressions are about -> functions of a batch of shape `[rows, FEATURES]`.
GROUPS = {
    "imputes": [  # for batches that hold a NaN
        impute,
        lambda x: tf.where(
            tf.math.is_nan(x), tf.reduce_mean(impute(x), 0, keepdims=True), x
        ),
    ],
    "masks": [
        lambda x: tf.where(x > 0, x, zeros(x)),
        lambda x: tf.where(x > 0, x, x * 0.0),
        lambda x: tf.maximum(x, zeros(x)),
        lambda x: x * tf.cast(x > 0, x.dtype),
        lambda x: tf.concat([x, zeros(x)], 1),
        lambda x: tf.math.divide_no_nan(x, tf.nn.relu(x) + 0.5 * KEEP),
        lambda x: x + (x - x),
        lambda x: x + tf.nn.relu(zeros(x) @ MATRIX),
    ],
    "moves": [
        lambda x: of_width(tf.sparse.to_dense(tf.sparse.from_dense(x))),
        _scattered_where,
        _partitioned,
        lambda x: tf.gather(x, [3, 0, 0], axis=1),
    ],
    "gradients": [
        lambda x: x + tf.stop_gradient(tf.round(x) - x),  # straight through
        _with_gradient(lambda _, upstream: upstream, tf.sign),
        _with_gradient(lambda _, upstream: -upstream),
        tf.recompute_grad(impute),
        lambda x: x + _slope(x),
        lambda x: tf.quantization.fake_quant_with_min_max_args(x, -2, 2),
    ],
    "loops": [
        lambda x: tf.while_loop(
            lambda i, _: i < 3.0, lambda i, y: (i + 1.0, y + x * i), (0.0, zeros(x))
        )[1],
        lambda x: tf.transpose(
            tf.scan(lambda state, each: tf.tanh(state + each), tf.transpose(x))
        ),
        _function,
        lambda x: tf.cond(tf.reduce_sum(x) > -1e9, lambda: x, lambda: zeros(x)),
    ],
    "mathematics": [
        lambda x: tf.math.angle(tf.complex(x, tf.ones_like(x))),
        lambda x: tf.abs(tf.signal.fft(tf.complex(x, 0.5 * x))),
        lambda x: tf.sqrt(x * x + 1.0),
        lambda x: (1.0 + x * x) ** tf.tanh(x),
        lambda x: x / tf.norm(x),
        lambda x: tf.nn.softmax(x @ tf.transpose(x)) @ x,
        lambda x: tf.cast(tf.cast(x, tf.float16), tf.float32),
        lambda x: (
            x * tf.cast(tf.random.stateless_uniform([FEATURES], [1, 2]) > 0.3, x.dtype)
        ),
    ],
}


def of_layers(keras, shape, inputs):
    """Yields the outputs of each layer for such inputs."""
    layers = keras.layers
    for row in LAYERS[shape].strip().split("\n"):
        name = row.partition("(")[0]
        if has_ops(keras) or name not in FAIL_IN_KERAS_2:
            x = inputs if name in FIRST else layers.Dense(shape[-1], **PLAIN)(inputs)
            names = {"layers": layers, "PLAIN": PLAIN, "x": x}
            x = eval(f"layers.{row}", names)  # noqa: S307 - a row above
            yield layers.Dense(1, **PLAIN)(layers.Flatten()(x))


def of_expressions(keras, group, inputs):
    """Yields the outputs of two layers behind each expression of a group."""

    class Expression(keras.layers.Layer):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def call(self, x):
            return self.function(x)

    for function in GROUPS[group]:
        x = inputs
        for width in (FEATURES, 1):
            x = keras.layers.Dense(width, **PLAIN)(Expression(function)(x))
        yield x


def fitted(family, group, wrap):
    """Returns a network's weights before and after `fit`, and our warnings."""
    seed_all(family.keras)  # initial weights, and masks that are drawn
    rng, keras = np.random.default_rng(5), family.keras
    if group in GROUPS:
        x, branches = rng.normal(size=(12, FEATURES)) / 2, of_expressions
        x[1, 2] = 0.0
        x[2, 1] = np.nan if group == "imputes" else x[2, 1]
    else:
        x, branches = rng.uniform(0.1, 0.9, (12, *group)), of_layers
    x, inputs = x.astype(np.float32), keras.Input(x.shape[1:], batch_size=6)
    outputs = [*branches(keras, group, inputs)]
    model = keras.Model(inputs, keras.layers.Concatenate()(outputs))

    def numbers():  # no counters
        weights = [np.array(weight) for weight in model.get_weights()]
        return [weight for weight in weights if weight.dtype.kind == "f"]

    before = numbers()
    optimizer = family.optimizers.SGD(2.0**-4)
    optimizer = LossScaleOptimizer(optimizer) if wrap else optimizer
    model.compile(optimizer, "mse", **compiled_by("graph"))
    y = rng.normal(size=(12, 1)).astype(np.float32)
    with heard() as ours:
        model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
    return before, numbers(), ours


def each_of_some():
    """Returns parameters: all networks of the first Keras, of others every fourth.

    What TensorFlow computes for them is the same.
    """
    for number, family in enumerate(families()):
        for group in [*GROUPS, *LAYERS][:: 4 if number else 1]:
            name = "x".join(map(str, group)) if group in LAYERS else group
            yield pytest.param(family, group, id=f"{family.name}-{name}")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "group"), each_of_some())
def test_trains_as_the_bare_optimizer(family, group):
    *bare, _ = fitted(family, group, wrap=False)
    assert any(not np.array_equal(*pair) for pair in zip(*bare))
    *ours, warned = fitted(family, group, wrap=True)
    assert not warned, warned[0]
    for weights in zip(ours, bare):
        for one, other in zip(*weights):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
