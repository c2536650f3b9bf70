"""What users do to gradients before they apply them: a table of expressions.

Each row has what becomes of a gradient `g` of shape `[3, 3]` that is still scaled, and
an expression, in which `w` is the weight and `other` a constant. What an expression
makes of an unscaled gradient is unscaled, but for those with `w` and those in Python.
"""

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
SHAPE = [3, 3]


def adaptive_clip(g, w):
    """Adaptive gradient clipping, as NFNets have it."""
    most = 0.01 * tf.maximum(tf.norm(w, axis=0), 1e-3)
    norm = tf.norm(g, axis=0)
    clipped = g * (most / tf.maximum(norm, 1e-6))
    return tf.where(norm < most, g, clipped)


def newton_schulz(g):
    """As the optimizer Muon does it."""
    x = g / (tf.norm(g) + 1e-7)
    for _ in range(5):
        a = tf.matmul(x, x, transpose_b=True)
        x = 3.4445 * x + tf.matmul(-4.775 * a + 2.0315 * tf.matmul(a, a), x)
    return x


def added_in_a_loop(g):
    def body(i, total):
        return i + 1, total + g

    return tf.while_loop(lambda i, _: i < 3, body, (0, tf.zeros(SHAPE)))[1]


def halved_until_small(g):
    is_large = lambda x: tf.norm(x) > 1.0  # noqa: E731
    return tf.while_loop(is_large, lambda x: (x / 2,), (g,), maximum_iterations=20)[0]


def halved_in_numpy(g):
    halved = tf.numpy_function(lambda x: x / np.float32(2), [g], tf.float32)
    return tf.ensure_shape(halved, SHAPE)


def gradient_of_square(g):
    with tf.GradientTape() as tape:
        tape.watch(g)
        square = tf.reduce_sum(g * g)
    return tape.gradient(square, g)


def to_8_bit_integers(g):
    step = tf.reduce_max(tf.abs(g)) / 127.0
    return tf.cast(tf.cast(tf.round(g / step), tf.int8), tf.float32) * step


def ternary(g):
    """As TernGrad has it, without chance."""
    largest = tf.reduce_max(tf.abs(g))
    return largest * tf.sign(g) * tf.cast(tf.abs(g) > 0.5 * largest, tf.float32)


@tf.function(autograph=False)
def clipped_in_a_function(g):
    return tf.clip_by_value(g, -1.0, 1.0)


TABLE = """
scaled    -g
scaled    g * 2.0
scaled    g + g
scaled    g * other
scaled    g / other
scaled    g + 1e-12
scaled    g - tf.reduce_mean(g, axis=0, keepdims=True)
scaled    g % tf.reduce_mean(tf.abs(g))
scaled    g * w
scaled    tf.sqrt(g * g)
scaled    tf.add_n([g, 2.0 * g])
scaled    tf.cumsum(g)
scaled    tf.norm(g)
scaled    tf.reduce_sum(g)
scaled    tf.reduce_max(g)
scaled    tf.math.reduce_std(g)
scaled    tf.math.segment_sum(g, [0, 0, 1])
scaled    tf.math.divide_no_nan(g, other)
scaled    tf.matmul(g, other)
scaled    tf.nn.relu(g)
scaled    tf.nn.leaky_relu(g)
scaled    tf.sort(g)
scaled    tf.stop_gradient(g)
scaled    tf.transpose(g)
scaled    tf.gather(g, [2, 0, 1])
scaled    tf.scatter_nd([[2], [0], [0]], g, [3, 3])
scaled    g[::2, ::-1]
scaled    tf.concat([g[:2], tf.zeros([1, 3])], 0)
scaled    tf.concat([g, -2.0 * g], 0)
scaled    tf.maximum(tf.abs(g), 1e-6)
scaled    tf.minimum(g, tf.reduce_mean(g))
scaled    tf.clip_by_value(g, -tf.reduce_mean(tf.abs(g)), tf.reduce_mean(tf.abs(g)))
scaled    tf.where(tf.math.is_finite(g), g, 0.0)
scaled    tf.cond(tf.reduce_all(tf.math.is_finite(g)), lambda: g, lambda: 0.0 * g)
scaled    tf.cast(tf.cast(g, tf.bfloat16), tf.float32)
scaled    tf.bitcast(tf.bitcast(g, tf.int32), tf.float32)
scaled    tf.abs(tf.signal.fft2d(tf.cast(g, tf.complex64)))
scaled    tf.scan(lambda a, x: a + x, g)
scaled    tf.custom_gradient(lambda g: (tf.identity(g), tf.identity))(g)
scaled    tf.identity_n([g, -g])[1]
scaled    tf.debugging.check_numerics(g, "bad")
scaled    added_in_a_loop(g)
scaled    gradient_of_square(g)
scaled    to_8_bit_integers(g)
scaled    ternary(g)
unscaled  tf.sign(g)
unscaled  tf.math.count_nonzero(g)
unscaled  tf.math.zero_fraction(g)
unscaled  tf.argsort(g)
unscaled  tf.one_hot(tf.argmax(g, 1), 3)
unscaled  tf.where(g > 0.0, 1.0, -1.0)
unscaled  tf.cond(tf.reduce_sum(g) > 0.0, lambda: tf.ones([3]), lambda: tf.zeros([3]))
unscaled  g / tf.norm(g)
unscaled  g / (tf.norm(g) + 1e-7)
unscaled  g / tf.sqrt(tf.reduce_mean(g * g) + 1e-8)
unscaled  g / tf.linalg.global_norm([g, 2.0 * g])
unscaled  g / tf.linalg.svd(g, compute_uv=False)[0]
unscaled  tf.vectorized_map(lambda x: x / tf.norm(x), g)
unscaled  newton_schulz(g)
squared   g * g
squared   tf.nn.l2_loss(g)
squared   tf.math.squared_difference(g, tf.transpose(g))
squared   tf.matmul(g, g, transpose_b=True)
squared   tf.einsum("ij,kj->ik", g, g)
inverse   tf.math.reciprocal(g)
inverse   tf.linalg.inv(g)
changed   g + 1.0
changed   tf.ones_like(g) + g
changed   g // 0.1
changed   g / tf.maximum(tf.norm(g), 1.0)
changed   g / (tf.abs(g) + 0.01)
changed   tf.abs(g) ** 1.5
changed   tf.sqrt(tf.abs(g))
changed   tf.tanh(g)
changed   tf.exp(tf.math.log(tf.abs(g)))
changed   tf.round(g)
changed   tf.cast(g, tf.int32)
changed   tf.nn.softmax(g)
changed   tf.nn.relu6(g)
changed   tf.nn.bias_add(g, [1.0, 1.0, 1.0])
changed   tf.nn.softmax_cross_entropy_with_logits(tf.eye(3), g)
changed   tf.reduce_prod(g)
changed   tf.reduce_logsumexp(g)
changed   tf.linalg.det(g)
changed   tf.linalg.expm(g)
changed   tf.clip_by_value(g, -1.0, 1.0)
changed   tf.clip_by_norm(g, 1.0)
changed   tf.maximum(g, 0.01)
changed   tf.sign(g - 0.5)
changed   tf.cast(g > 0.1, tf.float32)
changed   tf.where(g > 0.1, g, 0.0)
changed   g * tf.cast(tf.norm(g) < 10.0, tf.float32)
changed   tf.reduce_sum(tf.boolean_mask(g, g > 0.1))
changed   tf.concat([g[:2], tf.ones([1, 3])], 0)
changed   tf.pad(g, [[1, 0], [0, 1]], constant_values=1.0)
changed   tf.searchsorted(tf.constant([-1.0, 0.0, 1.0]), tf.reshape(g, [9]))
changed   tf.cond(tf.norm(g) > 1.0, lambda: g / tf.norm(g), lambda: g)
changed   tf.cond(tf.constant(True), lambda: tf.clip_by_value(g, -1, 1), lambda: g)
changed   halved_until_small(g)
changed   clipped_in_a_function(g)
changed   adaptive_clip(g, w)
unknown   tf.py_function(lambda x: x, [g], tf.float32)
unknown   halved_in_numpy(g)
number    tf.ones_like(g)
"""
#: A number stands beside scaled gradients and is divided with them, or a matrix
#: function that is not linear is divided once. Nobody sees it: docs/inside.md.
NOT_SEEN = """
scaled    g + 0.1 * w
scaled    tf.concat([g[:2], w[2:]], 0)
scaled    tf.where(g > 0.0, g, 1.0)
scaled    tf.tensor_scatter_nd_add(g, [[0, 0]], [1.0])
scaled    g + 0.1 * tf.random.stateless_normal([3, 3], [1, 2])
scaled    tf.linalg.pinv(g)
"""


def rows(table):
    """Returns the kind of each expression of a table."""
    pairs = (line.split(None, 1) for line in table.strip().splitlines())
    return {expression: kind for kind, expression in pairs}


def call(expression, g, w):
    """Returns what an expression makes of a gradient: its values, or else their sum."""
    names = {**globals(), "g": g, "w": w, "other": OTHER}
    value = tf.cast(eval(expression, names), tf.float32)  # noqa: S307 - a row above
    if value.shape.rank is not None and value.shape.num_elements() == 9:
        return tf.reshape(value, SHAPE)
    return tf.reduce_sum(value) * tf.ones(SHAPE)


def bare(expression, gradient):
    """Returns what an expression makes of a gradient that no loss scale has seen."""
    return call(expression, tf.constant(gradient), tf.constant(WEIGHT)).numpy()
