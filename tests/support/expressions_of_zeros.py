"""Forward expressions with zeros, ones and masks, and what they are put in."""

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
    "where-isfinite-zeros_like": lambda x: tf.where(tf.math.is_finite(x), x, zeros(x)),
    "where-isnan-a-zero": lambda x: tf.where(tf.math.is_nan(x), 0.0, x),
    "where-isnan-ones_like": lambda x: tf.where(tf.math.is_nan(x), tf.ones_like(x), x),
    "multiply_no_nan": lambda x: tf.math.multiply_no_nan(
        x, tf.cast(tf.math.is_finite(x), x.dtype)
    ),
    "imputed-by-the-mean": lambda x: tf.where(
        tf.math.is_nan(x), tf.reduce_mean(impute(x), 0, keepdims=True), x
    ),
    "imputed-and-a-mask": lambda x: tf.concat(
        [impute(x), tf.cast(tf.math.is_nan(x), x.dtype)], 1
    ),
}

MASKS = {
    "times-ones_like": lambda x: x * tf.ones_like(x),
    "divided-by-ones_like": lambda x: x / tf.ones_like(x),
    "times-two-ones_like": lambda x: x * (2.0 * tf.ones_like(x)),
    "plus-ones_like": lambda x: x + tf.ones_like(x),
    "plus-zeros_like": lambda x: x + zeros(x),
    "minus-zeros_like": lambda x: x - zeros(x),
    "zeros_like-minus": lambda x: zeros(x) - x,
    "plus-times-zeros_like": lambda x: x + x * zeros(x),
    "times-zeros_like-plus-one": lambda x: x * (zeros(x) + 1.0),
    "cos-zeros_like": lambda x: x * tf.cos(zeros(x)),
    "exp-zeros_like": lambda x: x * tf.exp(zeros(x)),
    "pow-zeros_like": lambda x: x * x ** zeros(x),
    "where-zeros_like": lambda x: tf.where(x > 0, x, zeros(x)),
    "where-zeros_like-first": lambda x: tf.where(x < 0, zeros(x), x),
    "where-ones_like": lambda x: tf.where(x > 0, x, tf.ones_like(x)),
    "where-zero-times": lambda x: tf.where(x > 0, x, x * 0.0),
    "where-zeros": lambda x: tf.where(x > 0, x, tf.zeros(tf.shape(x))),
    "where-stopped": lambda x: tf.where(x > 0, x, tf.stop_gradient(zeros(x))),
    "where-of-version-1": lambda x: tf.compat.v1.where(x > 0, x, zeros(x)),
    "where-of-two-wheres": lambda x: tf.where(
        x > 1, tf.ones_like(x), tf.where(x > 0, x, zeros(x))
    ),
    "maximum-zeros_like": lambda x: tf.maximum(x, zeros(x)),
    "minimum-ones_like": lambda x: tf.minimum(x, tf.ones_like(x)),
    "mask-by-cast": lambda x: x * tf.cast(x > 0, x.dtype),
    "mask-of-constants": lambda x: x * KEEP,
    "mask-of-zeros-and-ones": lambda x: x * tf.where(x > 0, tf.ones_like(x), zeros(x)),
    "masked-softmax": lambda x: tf.nn.softmax(x + (1.0 - KEEP) * -1e9),
    "masked-mean": lambda x: (
        x
        - tf.math.divide_no_nan(
            tf.reduce_sum(x * KEEP, 1, keepdims=True),
            tf.reduce_sum(tf.ones_like(x) * KEEP, 1, keepdims=True),
        )
    ),
    "concat-zeros_like": lambda x: tf.concat([x, zeros(x)], 1),
    "concat-zeros_like-first": lambda x: tf.concat([zeros(x), x], 1),
    "concat-ones_like": lambda x: tf.concat([x, tf.ones_like(x)], 1),
    "concat-rows-of-zeros": lambda x: tf.concat([x, zeros(x)], 0)[: tf.shape(x)[0]],
    "stack-zeros_like": lambda x: tf.reshape(
        tf.stack([x, zeros(x)], 2), [-1, 2 * FEATURES]
    ),
    "padded": lambda x: tf.pad(x, [[0, 0], [1, 2]]),
    "shifted-by-zeros_like": lambda x: tf.concat([zeros(x[:, :1]), x[:, :-1]], 1),
    "add_n-zeros_like": lambda x: tf.add_n([x, zeros(x), x]),
    "accumulated-from-zeros_like": lambda x: sum([x, 2.0 * x], zeros(x)),
    "divide_no_nan": lambda x: tf.math.divide_no_nan(x, tf.nn.relu(x) + 0.5 * KEEP),
    "divide_no_nan-by-zeros_like": lambda x: x + tf.math.divide_no_nan(x, zeros(x)),
    "one_hot-of-argmax": lambda x: x * tf.one_hot(tf.argmax(x, 1), FEATURES),
    "squared_difference-zeros_like": lambda x: tf.math.squared_difference(x, zeros(x)),
    "a-difference-that-is-zero": lambda x: x + (x - x),
    "fill": lambda x: x * tf.fill(tf.shape(x), 0.5),
    "broadcast-zeros": lambda x: x + tf.broadcast_to(0.0, tf.shape(x)),
    "zeros_like-einsum": lambda x: x + tf.einsum("ij,jk->ik", zeros(x), MATRIX),
    "zeros_like-through-layers": lambda x: x + tf.nn.relu(zeros(x) @ MATRIX),
    "a-sum-of-zeros_like": lambda x: x + tf.reduce_sum(zeros(x), 1, keepdims=True),
    "scaled-by-a-norm-of-ones_like": lambda x: x / tf.norm(tf.ones_like(x)),
}
