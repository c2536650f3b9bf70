"""Quantization and chance."""

from __future__ import annotations

import tensorflow as tf

from between.values import SHAPE


def rounded_at_random(g):
    """Rounds to multiples of 1/64, up or down by chance."""
    noise = tf.random.stateless_uniform(SHAPE, [1, 2])
    return tf.floor(g * 64.0 + noise) / 64.0


def to_8_bit_integers(g):
    step = tf.reduce_max(tf.abs(g)) / 127.0
    return tf.cast(tf.cast(tf.round(g / step), tf.int8), tf.float32) * step


def quantized(g):
    q = tf.quantization.quantize(g, -3.0, 3.0, tf.quint8)
    return tf.quantization.dequantize(q.output, q.output_min, q.output_max)


def ternary(g):
    """As TernGrad has it, without chance."""
    largest = tf.reduce_max(tf.abs(g))
    return largest * tf.sign(g) * tf.cast(tf.abs(g) > 0.5 * largest, tf.float32)


QUANTIZATION = {
    "fake_quant_with_min_max_args": lambda g: (
        tf.quantization.fake_quant_with_min_max_args(g, -3.0, 3.0)
    ),
    "fake_quant_with_min_max_vars": lambda g: (
        tf.quantization.fake_quant_with_min_max_vars(g, -3.0, 3.0)
    ),
    "fake_quant of its own range": lambda g: (
        tf.quantization.fake_quant_with_min_max_vars(
            g, tf.reduce_min(g), tf.reduce_max(g)
        )
    ),
    "quantize_and_dequantize": lambda g: tf.quantization.quantize_and_dequantize_v2(
        g, -3.0, 3.0, range_given=True
    ),
    "quantize_and_dequantize of its own range": lambda g: (
        tf.quantization.quantize_and_dequantize_v2(g, 0.0, 0.0, range_given=False)
    ),
    "quantize and dequantize": quantized,
    "rounded at random": rounded_at_random,
    "to 8-bit integers": to_8_bit_integers,
    "ternary": ternary,
    "noise * g": lambda g: g * tf.random.stateless_normal(SHAPE, [1, 2]),
    "noise + g": lambda g: g + 0.1 * tf.random.stateless_normal(SHAPE, [1, 2]),
    "stateless dropout": lambda g: tf.nn.experimental.stateless_dropout(
        g, 0.5, seed=[1, 2]
    ),
}
