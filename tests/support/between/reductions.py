"""Sums, products and other reductions."""

from __future__ import annotations

import tensorflow as tf

from between.values import ROWS, SHAPE, column


def standardized(g):
    mean, variance = tf.nn.moments(g, [0, 1])
    return tf.nn.batch_normalization(g, mean, variance, None, None, 1e-6)


def moments(g):
    mean, variance = tf.nn.moments(g, [0, 1])
    return mean + tf.sqrt(variance)


REDUCTIONS = {
    "reduce_sum": tf.reduce_sum,
    "reduce_mean": lambda g: tf.reduce_mean(g, axis=0, keepdims=True) * tf.ones(SHAPE),
    "reduce_max": tf.reduce_max,
    "reduce_prod": tf.reduce_prod,
    "reduce_prod of one": lambda g: tf.reduce_prod(g[..., None], axis=-1),
    "reduce_logsumexp": tf.reduce_logsumexp,
    "reduce_std": tf.math.reduce_std,
    "g / reduce_std": lambda g: g / (tf.math.reduce_std(g) + 1e-8),
    "reduce_euclidean_norm": tf.math.reduce_euclidean_norm,
    "standardized": standardized,
    "l2_loss": tf.nn.l2_loss,
    "cumsum": tf.cumsum,
    "cumprod": tf.math.cumprod,
    "cumulative_logsumexp": tf.math.cumulative_logsumexp,
    "segment_sum": lambda g: tf.math.segment_sum(g, [0, 0, 1]),
    "segment_prod": lambda g: tf.math.segment_prod(g, [0, 0, 1]),
    "unsorted_segment_max": lambda g: tf.math.unsorted_segment_max(g, ROWS, 2),
    "unsorted_segment_prod": lambda g: tf.math.unsorted_segment_prod(g, ROWS, 2),
    "zero_fraction": tf.nn.zero_fraction,
    "approx. percentile": lambda g: tf.gather(tf.sort(column(tf.abs(g))), 7),
}
