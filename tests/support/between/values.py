"""The numbers that the functions are called with."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

#: A gradient of mixed signs and magnitudes, without ties.
GRADIENT = np.array(
    [[0.7, -0.013, 2.1], [-1.3, 0.31, 0.0017], [0.09, -2.9, 1.1]], np.float32
)
WEIGHT = np.array(
    [[0.5, -0.25, 1.0], [0.75, -1.5, 0.125], [2.0, 0.375, -0.625]], np.float32
)
OTHER = np.array([[1.0, -0.5, 0.25], [0.5, 2.0, 0.125], [-1.0, 0.75, 1.5]], np.float32)
ROWS = [0, 1, 0]
SHAPE = [3, 3]


def column(g):
    return tf.reshape(g, [9])


def median(g):
    return tf.sort(column(g))[4]


def overflowed(infinity):
    """Returns the gradient with an infinity in its last element."""
    gradient = GRADIENT.copy()
    gradient[-1, -1] = infinity
    return gradient
