"""Signals, images and complex numbers."""

from __future__ import annotations

import tensorflow as tf

from between.values import OTHER


def image(g):
    return tf.reshape(g, [1, 3, 3, 1])


def normalized_image(g):
    return tf.nn.local_response_normalization(tf.reshape(g, [1, 1, 3, 3]))


SIGNALS = {
    "ifft(fft)": lambda g: tf.math.real(
        tf.signal.ifft(tf.signal.fft(tf.cast(g, "complex64")))
    ),
    "abs(fft)": lambda g: tf.abs(tf.signal.fft2d(tf.cast(g, tf.complex64))),
    "angle": lambda g: tf.math.angle(tf.complex(g, tf.transpose(g))),
    "abs of complex": lambda g: tf.abs(tf.complex(g, tf.transpose(g))),
    "phase times number": lambda g: tf.math.real(
        tf.complex(g, g) * tf.exp(tf.complex(0.0, 0.5))
    ),
    "conv2d": lambda g: tf.nn.conv2d(
        image(g), tf.reshape(tf.constant(OTHER), [3, 3, 1, 1]), 1, "SAME"
    ),
    "conv2d with itself": lambda g: tf.nn.conv2d(
        image(g), tf.reshape(g, [3, 3, 1, 1]), 1, "SAME"
    ),
    "dilation2d": lambda g: tf.nn.dilation2d(
        image(g), tf.zeros([2, 2, 1]), [1] * 4, "SAME", "NHWC", [1] * 4
    ),
    "max_pool": lambda g: tf.nn.max_pool2d(image(g), 2, 1, "SAME"),
    "avg_pool": lambda g: tf.nn.avg_pool2d(image(g), 2, 1, "SAME"),
    "bias_add": lambda g: tf.nn.bias_add(g, [0.0, 0.0, 0.0]),
    "bias_add of ones": lambda g: tf.nn.bias_add(g, [1.0, 1.0, 1.0]),
    "lrn": normalized_image,
    "resize": lambda g: tf.image.resize(image(g), [2, 2]),
    "per_image_standardization": lambda g: tf.image.per_image_standardization(image(g)),
    "cross entropy": lambda g: tf.nn.softmax_cross_entropy_with_logits(tf.eye(3), g),
    "sparse cross entropy": lambda g: tf.nn.sparse_softmax_cross_entropy_with_logits(
        [0, 1, 2], g
    ),
}
