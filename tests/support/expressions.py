"""Forward expressions: what a layer's `call` may do to a batch.

Each maps a float32 batch of shape `[rows, FEATURES]` to one, of any width that is known
before it is called. Zeros, masks, copies, loops and complex numbers on the way forward
are factors of the weights' gradients, so a wrong rule for any of them is a gradient
that is divided twice, or never. The gradient of each is linear in what comes back:
what is not, as a custom gradient that clips, trains otherwise when it is scaled.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

FEATURES = 4
MATRIX = np.eye(FEATURES, dtype=np.float32)[::-1] + np.float32(0.25)
KEEP = np.array([1, 0, 1, 1], np.float32)


def zeros(x):
    return tf.zeros_like(x)


def of_width(x, result):
    """Returns a result whose width TensorFlow has lost, with the one of `x`."""
    return tf.reshape(result, [-1, x.shape[-1]])


def impute(x):
    return tf.where(tf.math.is_nan(x), zeros(x), x)


#: Expressions that are there for batches that hold a NaN.
IMPUTES = {
    "where-isnan-zeros_like": impute,
    "imputed-by-the-mean": lambda x: tf.where(
        tf.math.is_nan(x), tf.reduce_mean(impute(x), 0, keepdims=True), x
    ),
}

MASKS = {
    "times-ones_like": lambda x: x * tf.ones_like(x),
    "plus-zeros_like": lambda x: x + zeros(x),
    "where-zeros_like": lambda x: tf.where(x > 0, x, zeros(x)),
    "where-zero-times": lambda x: tf.where(x > 0, x, x * 0.0),
    "maximum-zeros_like": lambda x: tf.maximum(x, zeros(x)),
    "mask-by-cast": lambda x: x * tf.cast(x > 0, x.dtype),
    "concat-zeros_like": lambda x: tf.concat([x, zeros(x)], 1),
    "divide_no_nan": lambda x: tf.math.divide_no_nan(x, tf.nn.relu(x) + 0.5 * KEEP),
    "a-difference-that-is-zero": lambda x: x + (x - x),
    "zeros_like-through-layers": lambda x: x + tf.nn.relu(zeros(x) @ MATRIX),
}


def _loop(x):
    def body(i, total):
        return i + 1, total + x * tf.cast(i, x.dtype)

    # XLA wants to know how often at most, to go back.
    return tf.while_loop(lambda i, _: i < 3, body, (0, zeros(x)), maximum_iterations=4)[
        1
    ]


def _recurrence(x):
    columns, start = tf.transpose(x), tf.zeros_like(x[:, 0])
    states = tf.scan(lambda state, each: tf.tanh(state + each), columns, start)
    return tf.transpose(states)


@tf.function
def _function(x):
    total = tf.zeros_like(x)
    for i in tf.range(3):
        if i > 0:
            total += x
    return total


LOOPS = {
    "while-from-zeros_like": _loop,
    "scan-from-zeros_like": _recurrence,
    "cond-zeros_like": lambda x: tf.cond(
        tf.reduce_sum(x) > -1e9, lambda: x, lambda: zeros(x)
    ),
    "function": _function,
}


COMPLEX = {
    "abs-complex": lambda x: tf.abs(tf.complex(x, x)),
    "angle": lambda x: tf.math.angle(tf.complex(x, tf.ones_like(x))),
    "fft-abs": lambda x: tf.abs(tf.signal.fft(tf.complex(x, 0.5 * x))),
}


def _scattered_where(x):
    places = tf.where(x > 0)
    kept = tf.tensor_scatter_nd_update(zeros(x), places, tf.gather_nd(x, places))
    return of_width(x, kept)


def _partitioned(x):
    numbers = tf.cast(x[:, 0] > 0, tf.int32)
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), numbers, 2)
    parts = tf.dynamic_partition(x, numbers, 2)
    return of_width(x, tf.dynamic_stitch(places, [parts[0], 2.0 * parts[1]]))


def _boolean_mask(x):
    kept = tf.boolean_mask(tf.concat([x, x], 0), tf.range(2 * tf.shape(x)[0]) % 2 < 1)
    return of_width(x, kept)


MOVES = {
    "sparse-to_dense": lambda x: of_width(
        x, tf.sparse.to_dense(tf.sparse.from_dense(x))
    ),
    "tensor_scatter_nd_update-zeros_like": _scattered_where,
    "boolean_mask": _boolean_mask,
    "dynamic_stitch": _partitioned,
    "gather": lambda x: tf.gather(x, [3, 0, 0], axis=1),
}


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


GRADIENTS = {
    "straight-through": lambda x: x + tf.stop_gradient(tf.round(x) - x),
    "straight-through-custom": _with_gradient(lambda _, upstream: upstream, tf.sign),
    "gradient-reversal": _with_gradient(lambda _, upstream: -upstream),
    "recompute-impute": tf.recompute_grad(impute),
    "gradient-in-the-network": lambda x: x + _slope(x),
    "clip_by_value": lambda x: tf.clip_by_value(x, -1.0, 1.0),
    "fake_quant": lambda x: tf.quantization.fake_quant_with_min_max_args(x, -2, 2),
}


MATHEMATICS = {
    "sqrt": lambda x: tf.sqrt(x * x + 1.0),
    "pow-pow": lambda x: (1.0 + x * x) ** tf.tanh(x),
    "abs-sign": lambda x: tf.abs(x) * tf.sign(x),
    "l2_normalize": lambda x: tf.nn.l2_normalize(x, 1),
    "divided-by-norm": lambda x: x / tf.norm(x),
    "attention": lambda x: tf.nn.softmax(x @ tf.transpose(x)) @ x,
    "cast-float16": lambda x: tf.cast(tf.cast(x, tf.float16), tf.float32),
    "random-dropout": lambda x: (
        x * tf.cast(tf.random.stateless_uniform([FEATURES], [1, 2]) > 0.3, x.dtype)
    ),
    "checked": lambda x: tf.debugging.check_numerics(x, "not finite"),
}

#: What the expressions are about -> name -> a function of a batch.
GROUPS = {
    "imputes": IMPUTES,
    "masks": MASKS,
    "moves": MOVES,
    "gradients": GRADIENTS,
    "loops": LOOPS,
    "complex": COMPLEX,
    "mathematics": MATHEMATICS,
}
#: Name -> a function of a batch.
EXPRESSIONS = {name: group[name] for group in GROUPS.values() for name in group}
