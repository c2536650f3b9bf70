"""Branches, loops, functions, and what does nothing to a value."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from between.values import SHAPE


def in_a_loop(g):
    def body(i, total):
        return i + 1, total + g

    return tf.while_loop(lambda i, _: i < 3, body, (0, tf.zeros(SHAPE)))[1]


def halved_until_small(g):
    is_large = lambda x: tf.norm(x) > 1.0  # noqa: E731
    return tf.while_loop(is_large, lambda x: (x / 2,), (g,), maximum_iterations=20)[0]


def in_a_tensor_array(g):
    array = tf.TensorArray(tf.float32, 3)
    for i in range(3):
        array = array.write(i, g[i])
    return array.stack()


@tf.custom_gradient
def backwards_too(g):
    return tf.identity(g), lambda above: above


def halved_in_numpy(g):
    halved = tf.numpy_function(lambda x: x / np.float32(2), [g], tf.float32)
    return tf.ensure_shape(halved, SHAPE)


def same_in_python(g):
    return tf.ensure_shape(tf.py_function(lambda x: x, [g], tf.float32), SHAPE)


def after_an_assertion(g):
    with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(g), SHAPE)]):
        return tf.identity(g)


def gradient_of_square(g):
    with tf.GradientTape() as tape:
        tape.watch(g)
        square = tf.reduce_sum(g * g)
    return tape.gradient(square, g)


CONTROL = {
    "cond(norm > 1)": lambda g: tf.cond(
        tf.norm(g) > 1.0, lambda: g / tf.norm(g), lambda: g
    ),
    "cond of a sign": lambda g: tf.cond(
        tf.reduce_sum(g) > 0.0, lambda: tf.ones(SHAPE), lambda: tf.zeros(SHAPE)
    ),
    "cond clips": lambda g: tf.cond(
        tf.constant(True), lambda: tf.clip_by_value(g, -1.0, 1.0), lambda: g
    ),
    "while adds": in_a_loop,
    "while halves": halved_until_small,
    "map_fn": lambda g: tf.map_fn(lambda x: x * 2.0, g),
    "map_fn clips": lambda g: tf.map_fn(lambda x: tf.clip_by_value(x, -1.0, 1.0), g),
    "scan": lambda g: tf.scan(lambda a, x: a + x, g),
    "vectorized_map": lambda g: tf.vectorized_map(lambda x: x / tf.norm(x), g),
    "switch_case": lambda g: tf.switch_case(
        tf.constant(1), [lambda: g, lambda: g * 2.0]
    ),
    "a function clips": tf.function(
        lambda x: tf.clip_by_value(x, -1.0, 1.0), autograph=False
    ),
    "a function of flags": tf.function(
        lambda x: tf.cast(x > 0.0, tf.float32), autograph=False
    ),
    "tensor array": in_a_tensor_array,
    "recompute_grad": tf.recompute_grad(lambda x: x * 2.0),
    "py_function": same_in_python,
    "numpy_function halves": halved_in_numpy,
    "custom_gradient": backwards_too,
    "stop_gradient": tf.stop_gradient,
    "identity_n": lambda g: tf.identity_n([g, -g])[1],
    "grad_pass_through": tf.grad_pass_through(tf.round),
    "check_numerics": lambda g: tf.debugging.check_numerics(g, "bad"),
    "control_dependencies": after_an_assertion,
    "the gradient of its square": gradient_of_square,
}
