"""Thresholds, flags, and functions of the gradient and the weight."""

from __future__ import annotations

import tensorflow as tf

from between.values import OTHER, SHAPE, column, median


def sparsified(g):
    """Keeps the four largest."""
    flat = column(g)
    _, at = tf.math.top_k(tf.abs(flat), 4)
    return tf.scatter_nd(at[:, None], tf.gather(flat, at), [9])


def soft_threshold(g, size):
    return tf.sign(g) * tf.maximum(tf.abs(g) - size, 0.0)


def majority(g):
    return tf.sign(tf.reduce_sum(tf.sign(g), axis=0, keepdims=True)) * tf.ones(SHAPE)


def is_finite(g):
    return tf.math.is_finite(g)


def by_layer_scale(g, w):
    """The trust ratio of LARS and LAMB."""
    of_w, of_g = tf.norm(w), tf.norm(g)
    ratio = tf.where(of_w > 0.0, tf.where(of_g > 0.0, of_w / of_g, 1.0), 1.0)
    return ratio * g


def adaptive_clip(g, w):
    """Adaptive gradient clipping, as NFNets have it."""
    most = 0.01 * tf.maximum(tf.norm(w, axis=0), 1e-3)
    norm = tf.norm(g, axis=0)
    clipped = g * (most / tf.maximum(norm, 1e-6))
    return tf.where(norm < most, g, clipped)


THRESHOLDS = {
    "where(g > 0, g, 0)": lambda g: tf.where(g > 0.0, g, 0.0),
    "where(g > 0.1, g, 0)": lambda g: tf.where(g > 0.1, g, 0.0),
    "where(abs(g) < 1, g, 0)": lambda g: tf.where(tf.abs(g) < 1.0, g, 0.0),
    "where(abs(g) > mean, g, 0)": lambda g: tf.where(
        tf.abs(g) > tf.reduce_mean(tf.abs(g)), g, 0.0
    ),
    "where(g > 0, g, 1)": lambda g: tf.where(g > 0.0, g, 1.0),
    "where(constant, g, 1)": lambda g: tf.where(OTHER > 0.0, g, 1.0),
    "g * cast(g > 0)": lambda g: g * tf.cast(g > 0.0, tf.float32),
    "g * cast(norm(g) < 10)": lambda g: g * tf.cast(tf.norm(g) < 10.0, tf.float32),
    "top_k values": lambda g: tf.math.top_k(g, 2).values,
    "top_k scattered": sparsified,
    "soft threshold": lambda g: soft_threshold(g, 0.1),
    "abs below the median": lambda g: tf.where(tf.abs(g) < median(tf.abs(g)), g, 0.0),
}
FLAGS = {
    "where(g > 0, 1, -1)": lambda g: tf.where(g > 0.0, 1.0, -1.0),
    "cast(g > 0.1)": lambda g: tf.cast(g > 0.1, tf.float32),
    "cast(g > mean(g))": lambda g: tf.cast(g > tf.reduce_mean(g), tf.float32),
    "cast(norm(g) > 1)": lambda g: tf.cast(tf.norm(g) > 1.0, tf.float32),
    "one_hot(argmax)": lambda g: tf.one_hot(tf.argmax(g, 1), 3),
    "argsort": tf.argsort,
    "majority of signs": majority,
    "in_top_k": lambda g: tf.cast(tf.math.in_top_k([0, 1, 2], g, 2), tf.float32),
    "count_nonzero": tf.math.count_nonzero,
    "g / count of those above 0.1": lambda g: (
        g / tf.cast(tf.math.count_nonzero(g > 0.1), tf.float32)
    ),
    "where(is_finite(g), g, 0)": lambda g: tf.where(is_finite(g), g, 0.0),
    "where(g == g, g, 0)": lambda g: tf.where(tf.equal(g, g), g, 0.0),
    "where(all is_finite, g, 0)": lambda g: tf.where(
        tf.reduce_all(is_finite(g)), g, tf.zeros_like(g)
    ),
    "multiply_no_nan(g, is_finite)": lambda g: tf.math.multiply_no_nan(
        g, tf.cast(is_finite(g), tf.float32)
    ),
    "cond(all is_finite, g, 0)": lambda g: tf.cond(
        tf.reduce_all(is_finite(g)), lambda: g, lambda: tf.zeros_like(g)
    ),
    "boolean_mask(g, is_finite)": lambda g: tf.reduce_sum(
        tf.boolean_mask(g, is_finite(g))
    ),
}
WITH_WEIGHT = {
    "g + 0.1 * w": lambda g, w: g + 0.1 * w,
    "g + 0.1 * sign(w)": lambda g, w: g + 0.1 * tf.sign(w),
    "g * w": lambda g, w: g * w,
    "g - its part along w": lambda g, w: (
        g - w * (tf.reduce_sum(g * w) / tf.reduce_sum(w * w))
    ),
    "g where it agrees with w": lambda g, w: tf.where(g * w > 0.0, g, 0.0),
    "maximum(abs(g), abs(w)) * g": lambda g, w: tf.maximum(tf.abs(g), tf.abs(w)) * g,
    "w times a flag of g": lambda g, w: w * tf.cast(g > 0.0, tf.float32),
    "w where g is positive": lambda g, w: tf.where(g > 0.0, w, -w),
    "trust ratio": by_layer_scale,
    "adaptive clipping": adaptive_clip,
    "cosine": lambda g, w: tf.reduce_sum(g * w) / (tf.norm(g) * tf.norm(w)),
    "concat with w": lambda g, w: tf.concat([g[:2], w[2:]], 0),
}
