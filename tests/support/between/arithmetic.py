"""Arithmetic of each element, or of an element and a norm."""

from __future__ import annotations

import tensorflow as tf

from between.values import OTHER, SHAPE


def through(g, dtype):
    return tf.cast(tf.cast(g, dtype), tf.float32)


def one_bit(g):
    return tf.sign(g) * tf.reduce_mean(tf.abs(g))


def winsorized(g):
    """Clips to its own mean magnitude times two."""
    bound = 2.0 * tf.reduce_mean(tf.abs(g))
    return tf.clip_by_value(g, -bound, bound)


ARITHMETIC = {
    "-g": lambda g: -g,
    "g * 2": lambda g: g * 2.0,
    "g + g": lambda g: g + g,
    "g * other": lambda g: g * OTHER,
    "g / other": lambda g: g / OTHER,
    "g * g": lambda g: g * g,
    "square": tf.square,
    "squared_difference": lambda g: tf.math.squared_difference(g, tf.transpose(g)),
    "sqrt(abs(g))": lambda g: tf.sqrt(tf.abs(g)),
    "rsqrt(abs(g))": lambda g: tf.math.rsqrt(tf.abs(g)),
    "sign(g) * sqrt(abs(g))": lambda g: tf.sign(g) * tf.sqrt(tf.abs(g)),
    "abs(g) ** 1.5": lambda g: tf.abs(g) ** 1.5,
    "(abs(g) ** 3) ** (1 / 3)": lambda g: (tf.abs(g) ** 3) ** (1 / 3),
    "abs(g) ** other": lambda g: tf.abs(g) ** OTHER,
    "sqrt(g * g)": lambda g: tf.sqrt(g * g),
    "sqrt(g * g + 1e-8)": lambda g: tf.sqrt(g * g + 1e-8),
    "1 / g": lambda g: 1.0 / g,
    "reciprocal": tf.math.reciprocal,
    "g / g": lambda g: g / g,
    "g / norm(g)": lambda g: g / tf.norm(g),
    "g / (norm(g) + 1e-7)": lambda g: g / (tf.norm(g) + 1e-7),
    "g / max(norm(g), 1e-6)": lambda g: g / tf.maximum(tf.norm(g), 1e-6),
    "g / max(norm(g), 1)": lambda g: g / tf.maximum(tf.norm(g), 1.0),
    "g / (abs(g) + 0.01)": lambda g: g / (tf.abs(g) + 0.01),
    "g / sqrt(mean(g * g) + 1e-8)": lambda g: g / tf.sqrt(tf.reduce_mean(g * g) + 1e-8),
    "g * g / norm(g)": lambda g: g * g / tf.norm(g),
    "g + 1": lambda g: g + 1.0,
    "g + other": lambda g: g + OTHER,
    "g + 1e-12": lambda g: g + 1e-12,
    "g - mean(g)": lambda g: g - tf.reduce_mean(g, axis=0, keepdims=True),
    "add_n": lambda g: tf.add_n([g, 2.0 * g]),
    "add_n with a number": lambda g: tf.add_n([g, tf.ones(SHAPE)]),
    "polyval": lambda g: tf.math.polyval([1.0, 2.0, 3.0], g),
    "clip_by_value": lambda g: tf.clip_by_value(g, -1.0, 1.0),
    "clip_by_norm": lambda g: tf.clip_by_norm(g, 1.0),
    "clip_by_global_norm": lambda g: tf.clip_by_global_norm([g], 1.0)[0][0],
    "clipped to its own mean": winsorized,
    "clipped by hand": lambda g: g * tf.minimum(1.0, 1.0 / tf.norm(g)),
    "tanh": tf.tanh,
    "softmax": tf.nn.softmax,
    "log_softmax": tf.nn.log_softmax,
    "sigmoid": tf.sigmoid,
    "relu": tf.nn.relu,
    "relu6": tf.nn.relu6,
    "leaky_relu": tf.nn.leaky_relu,
    "elu": tf.nn.elu,
    "selu": tf.nn.selu,
    "softplus": tf.nn.softplus,
    "softsign": tf.nn.softsign,
    "exp": tf.exp,
    "expm1": tf.math.expm1,
    "log(abs(g))": lambda g: tf.math.log(tf.abs(g)),
    "sign(g) * log1p(abs(g))": lambda g: tf.sign(g) * tf.math.log1p(tf.abs(g)),
    "exp(log(abs(g)))": lambda g: tf.exp(tf.math.log(tf.abs(g))),
    "sin": tf.sin,
    "atan": tf.atan,
    "atan2(g, 1)": lambda g: tf.atan2(g, 1.0),
    "asinh": tf.asinh,
    "erf": tf.math.erf,
    "lgamma": lambda g: tf.math.lgamma(tf.abs(g)),
    "maximum(g, 0)": lambda g: tf.maximum(g, 0.0),
    "maximum(g, 0.01)": lambda g: tf.maximum(g, 0.01),
    "maximum(g, transpose(g))": lambda g: tf.maximum(g, tf.transpose(g)),
    "maximum(abs(g), 1e-6)": lambda g: tf.maximum(tf.abs(g), 1e-6),
    "minimum(g, 1)": lambda g: tf.minimum(g, 1.0),
    "minimum(g, mean(g))": lambda g: tf.minimum(g, tf.reduce_mean(g)),
    "sign": tf.sign,
    "sign(g) * mean(abs(g))": one_bit,
    "sign(g - 0.5)": lambda g: tf.sign(g - 0.5),
    "round": tf.round,
    "floor": tf.floor,
    "ceil": tf.math.ceil,
    "rint": tf.math.rint,
    "g // 0.1": lambda g: g // 0.1,
    "g % 0.1": lambda g: g % 0.1,
    "g % mean(abs(g))": lambda g: g % tf.reduce_mean(tf.abs(g)),
    "truncatediv": lambda g: tf.truncatediv(tf.cast(g * 8.0, tf.int32), 3),
    "truncatemod": lambda g: tf.truncatemod(g, 0.1),
    "nextafter": lambda g: tf.math.nextafter(g, tf.zeros(SHAPE)),
    "xdivy": lambda g: tf.math.xdivy(g, OTHER),
    "multiply_no_nan": lambda g: tf.math.multiply_no_nan(g, OTHER),
    "divide_no_nan": lambda g: tf.math.divide_no_nan(g, OTHER),
    "divide_no_nan(g, norm(g))": lambda g: tf.math.divide_no_nan(g, tf.norm(g)),
    "cast to float16": lambda g: through(g, tf.float16),
    "cast to int32": lambda g: through(g, tf.int32),
    "saturate_cast": lambda g: tf.saturate_cast(g, tf.float16),
    "bitcast and back": lambda g: tf.bitcast(tf.bitcast(g, tf.int32), tf.float32),
    "ones_like(g) * g": lambda g: tf.ones_like(g) * g,
    "ones_like(g)": tf.ones_like,
    "ones_like(g) + g": lambda g: tf.ones_like(g) + g,
}
