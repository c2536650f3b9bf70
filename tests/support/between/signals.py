"""Signals, images and complex numbers."""

from __future__ import annotations

import tensorflow as tf

from between.values import OTHER, column


def image(g):
    return tf.reshape(g, [1, 3, 3, 1])


def as_complex(g):
    return tf.complex(g, tf.zeros_like(g))


def normalized_image(g):
    return tf.nn.local_response_normalization(tf.reshape(g, [1, 1, 3, 3]))


SIGNALS = {
    "ifft(fft)": lambda g: tf.math.real(
        tf.signal.ifft(tf.signal.fft(tf.cast(g, "complex64")))
    ),
    "low pass": lambda g: tf.signal.irfft(
        tf.signal.rfft(g) * tf.constant([1.0, 0.0], tf.complex64), [3]
    ),
    "abs(fft)": lambda g: tf.abs(tf.signal.fft2d(tf.cast(g, tf.complex64))),
    "dct": tf.signal.dct,
    "stft": lambda g: tf.abs(tf.signal.stft(column(g), 3, 2)),
    "real and imag": lambda g: tf.math.real(
        tf.math.real(as_complex(g)) + tf.math.imag(as_complex(g))
    ),
    "conj": lambda g: tf.math.real(tf.math.conj(tf.complex(g, 2.0 * g))),
    "angle": lambda g: tf.math.angle(tf.complex(g, tf.transpose(g))),
    "abs of complex": lambda g: tf.abs(tf.complex(g, tf.transpose(g))),
    "phase times number": lambda g: tf.math.real(
        tf.complex(g, g) * tf.exp(tf.complex(0.0, 0.5))
    ),
    "conv2d": lambda g: tf.nn.conv2d(
        image(g), tf.reshape(tf.constant(OTHER), [3, 3, 1, 1]), 1, "SAME"
    ),
    "conv2d as kernel": lambda g: tf.nn.conv2d(
        image(tf.constant(OTHER)), tf.reshape(g, [3, 3, 1, 1]), 1, "SAME"
    ),
    "conv2d with itself": lambda g: tf.nn.conv2d(
        image(g), tf.reshape(g, [3, 3, 1, 1]), 1, "SAME"
    ),
    "conv2d_transpose": lambda g: tf.nn.conv2d_transpose(
        image(g), tf.ones([2, 2, 1, 1]), [1, 3, 3, 1], 1
    ),
    "depthwise_conv2d": lambda g: tf.nn.depthwise_conv2d(
        image(g), tf.ones([2, 2, 1, 1]), [1, 1, 1, 1], "SAME"
    ),
    "conv1d": lambda g: tf.nn.conv1d(g[None], tf.ones([2, 3, 3]), 1, "SAME"),
    "dilation2d": lambda g: tf.nn.dilation2d(
        image(g), tf.zeros([2, 2, 1]), [1] * 4, "SAME", "NHWC", [1] * 4
    ),
    "dilation2d with ones": lambda g: tf.nn.dilation2d(
        image(g), tf.ones([2, 2, 1]), [1] * 4, "SAME", "NHWC", [1] * 4
    ),
    "max_pool": lambda g: tf.nn.max_pool2d(image(g), 2, 1, "SAME"),
    "avg_pool": lambda g: tf.nn.avg_pool2d(image(g), 2, 1, "SAME"),
    "max_pool_with_argmax": lambda g: tf.nn.max_pool_with_argmax(
        image(g), 2, 1, "SAME"
    )[0],
    "fractional_avg_pool": lambda g: tf.nn.fractional_avg_pool(
        image(g), [1.0, 1.5, 1.5, 1.0], seed=3
    )[0],
    "bias_add": lambda g: tf.nn.bias_add(g, [0.0, 0.0, 0.0]),
    "bias_add of ones": lambda g: tf.nn.bias_add(g, [1.0, 1.0, 1.0]),
    "lrn": normalized_image,
    "batch_normalization": lambda g: tf.nn.batch_normalization(
        g, 0.0, 1.0, 0.0, 1.0, 1e-3
    ),
    "fused batch norm": lambda g: tf.compat.v1.nn.fused_batch_norm(
        image(g), tf.ones([1]), tf.zeros([1])
    )[0],
    "resize": lambda g: tf.image.resize(image(g), [2, 2]),
    "resize to nearest": lambda g: tf.image.resize(image(g), [6, 6], "nearest"),
    "resize bicubic": lambda g: tf.image.resize(image(g), [6, 6], "bicubic"),
    "crop_and_resize": lambda g: tf.image.crop_and_resize(
        image(g), [[0.0, 0.0, 1.0, 1.0]], [0], [2, 2]
    ),
    "flip and rot90": lambda g: tf.image.rot90(tf.image.flip_up_down(image(g))),
    "adjust_contrast": lambda g: tf.image.adjust_contrast(image(g), 2.0),
    "per_image_standardization": lambda g: tf.image.per_image_standardization(image(g)),
    "total_variation": lambda g: tf.image.total_variation(image(g)),
    "sobel_edges": lambda g: tf.image.sobel_edges(image(g)),
    "rgb_to_grayscale": lambda g: tf.image.rgb_to_grayscale(
        tf.reshape(g, [1, 1, 3, 3])
    ),
    "embedding_lookup": lambda g: tf.nn.embedding_lookup(g, [2, 0, 1]),
    "cross entropy": lambda g: tf.nn.softmax_cross_entropy_with_logits(tf.eye(3), g),
    "sparse cross entropy": lambda g: tf.nn.sparse_softmax_cross_entropy_with_logits(
        [0, 1, 2], g
    ),
}
