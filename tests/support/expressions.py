"""A hundred forward expressions: what a layer's `call` may do to a batch.

Each maps a float32 batch of shape `[rows, FEATURES]` to one, of any width that is known
before it is called. Zeros, masks, copies, loops and complex numbers on the way forward
are factors of the weights' gradients, so a wrong rule for any of them is a gradient
that is divided twice, or never. The gradient of each is linear in what comes back:
what is not, as a custom gradient that clips, trains otherwise when it is scaled.
"""

from __future__ import annotations

import tensorflow as tf
from expressions_of_kinds import COMPLEX, LOOPS, SPARSE
from expressions_of_zeros import (
    FEATURES,
    IMPUTES,
    MASKS,
    MATRIX,
    impute,
    of_width,
    zeros,
)


def _scattered_where(x):
    places = tf.where(x > 0)
    kept = tf.tensor_scatter_nd_update(zeros(x), places, tf.gather_nd(x, places))
    return of_width(x, kept)


def _partitioned(x):
    numbers = tf.cast(x[:, 0] > 0, tf.int32)
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), numbers, 2)
    parts = tf.dynamic_partition(x, numbers, 2)
    return of_width(x, tf.dynamic_stitch(places, [parts[0], 2.0 * parts[1]]))


def _segments(x, function):
    numbers = tf.range(tf.shape(x)[0]) // 2
    return of_width(x, tf.gather(function(x, numbers), numbers))


def _boolean_mask(x):
    kept = tf.boolean_mask(tf.concat([x, x], 0), tf.range(2 * tf.shape(x)[0]) % 2 < 1)
    return of_width(x, kept)


MOVES = {
    "tensor_scatter_nd_update-zeros_like": _scattered_where,
    "tensor_scatter_nd_add-zeros_like": lambda x: tf.tensor_scatter_nd_add(
        zeros(x), [[0], [1], [0]], tf.gather(x, [1, 0, 0])
    ),
    "scatter_nd": lambda x: (
        x + tf.scatter_nd([[0], [1]], x[:2], tf.cast(tf.shape(x), tf.int32))
    ),
    "boolean_mask": _boolean_mask,
    "dynamic_stitch": _partitioned,
    "segment_sum": lambda x: _segments(x, tf.math.segment_sum),
    "segment_mean": lambda x: _segments(x, tf.math.segment_mean),
    "unsorted_segment_sum": lambda x: _segments(
        x, lambda data, at: tf.math.unsorted_segment_sum(data, at, tf.shape(x)[0])
    ),
    "gather": lambda x: tf.gather(x, [3, 0, 0], axis=1),
    "top_k": lambda x: tf.math.top_k(x, 2)[0],
    "sort": lambda x: tf.sort(x, 1),
    "reverse": lambda x: tf.reverse(x, [1]),
    "roll": lambda x: tf.roll(x, 1, 1),
    "tile": lambda x: tf.tile(x, [1, 2]),
    "repeat": lambda x: tf.repeat(x, 2, 1),
    "strided": lambda x: x[:, ::-2],
    "unstacked": lambda x: tf.stack(tf.unstack(x, axis=1)[::-1], 1),
    "split": lambda x: tf.concat(tf.split(x, 2, 1)[::-1], 1),
    "cumsum": lambda x: tf.cumsum(x, 1, exclusive=True),
    "matrix_diag": lambda x: tf.reshape(tf.linalg.diag(x), [-1, FEATURES**2]),
    "set_diag": lambda x: tf.reshape(
        tf.linalg.set_diag(tf.linalg.diag(x), 2.0 * x), [-1, FEATURES**2]
    ),
    "band_part": lambda x: tf.reshape(
        tf.linalg.band_part(x[:, :, None] * x[:, None], 0, -1), [-1, FEATURES**2]
    ),
    "reverse_sequence": lambda x: tf.reverse_sequence(
        x, 1 + tf.range(tf.shape(x)[0]) % 4, 1
    ),
}


def _straight_through(x):
    @tf.custom_gradient
    def sign(x):
        return tf.sign(x), lambda upstream: upstream

    return sign(x)


def _hard_tanh_gradient(x):
    @tf.custom_gradient
    def sign(x):
        def grad(upstream):
            return tf.where(tf.abs(x) < 1, upstream, tf.zeros_like(upstream))

        return tf.sign(x), grad

    return sign(x)


def _with_gradient(backward):
    """Returns an identity with a backward pass of its own."""

    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), lambda upstream: backward(x, upstream)

    return identity


def _log1pexp(x):
    @tf.custom_gradient
    def log1pexp(x):
        e = tf.exp(x)
        return tf.math.log1p(e), lambda upstream: upstream * (1.0 - 1.0 / (1.0 + e))

    return log1pexp(x)


def _slope(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(x**3 / 8.0)
    return tape.gradient(y, x)


def _zero_slope(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(x)
    other = tf.constant(0.0)
    slopes = tape.gradient(y, [x, other], unconnected_gradients="zero")
    return x * slopes[0] + slopes[1]


def _forward_mode(x):
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        y = tf.tanh(x)
    return x + accumulator.jvp(y)


GRADIENTS = {
    "straight-through": lambda x: x + tf.stop_gradient(tf.round(x) - x),
    "straight-through-custom": _straight_through,
    "straight-through-where": _hard_tanh_gradient,
    "straight-through-one_hot": lambda x: (
        tf.stop_gradient(tf.one_hot(tf.argmax(x, 1), FEATURES) - tf.nn.softmax(x))
        + tf.nn.softmax(x)
    ),
    "grad_pass_through": tf.grad_pass_through(tf.round),
    "stopped": lambda x: x * tf.stop_gradient(x),
    "gradient-identity": _with_gradient(lambda _, upstream: upstream),
    "gradient-reversal": _with_gradient(lambda _, upstream: -upstream),
    "gradient-halved": _with_gradient(lambda _, upstream: upstream * 0.5),
    "gradient-where-zeros_like": _with_gradient(
        lambda x, upstream: tf.where(x > 0, upstream, tf.zeros_like(upstream))
    ),
    "gradient-times-ones_like": _with_gradient(
        lambda x, upstream: upstream * tf.ones_like(x)
    ),
    "gradient-log1pexp": _log1pexp,
    "recompute": tf.recompute_grad(lambda x: tf.tanh(x) * x),
    "recompute-impute": tf.recompute_grad(impute),
    "gradient-in-the-network": lambda x: x + _slope(x),
    "unconnected-gradient": _zero_slope,
    "forward-mode": _forward_mode,
    "relu6": tf.nn.relu6,
    "leaky_relu": tf.nn.leaky_relu,
    "swish": tf.nn.swish,
    "clip_by_value": lambda x: tf.clip_by_value(x, -1.0, 1.0),
    "clip_by_norm": lambda x: tf.clip_by_norm(x, 0.5),
    "clip_by_norm-rows": lambda x: tf.clip_by_norm(x, 0.5, axes=[1]),
    "clip_by_global_norm": lambda x: tf.clip_by_global_norm([x], 0.5)[0][0],
    "fake_quant": lambda x: tf.quantization.fake_quant_with_min_max_args(x, -2, 2),
    "quantize_and_dequantize": lambda x: tf.quantization.quantize_and_dequantize_v2(
        x, -2.0, 2.0, range_given=True
    ),
}


def _solved(x):
    square = x[:, :, None] * x[:, None] + 2.0 * tf.eye(FEATURES)
    return tf.linalg.solve(square, x[:, :, None])[:, :, 0]


MATHEMATICS = {
    "square": tf.square,
    "cube": lambda x: x**3,
    "sqrt": lambda x: tf.sqrt(x * x + 1.0),
    "reciprocal": lambda x: tf.math.reciprocal(x * x + 1.0),
    "pow-pow": lambda x: (1.0 + x * x) ** tf.tanh(x),
    "abs-sign": lambda x: tf.abs(x) * tf.sign(x),
    "exp": tf.exp,
    "log1p": lambda x: tf.math.log1p(x * x),
    "erf": tf.math.erf,
    "atan2": lambda x: tf.atan2(x, tf.ones_like(x)),
    "xlogy": lambda x: tf.math.xlogy(x, 1.0 + x * x),
    "xdivy": lambda x: tf.math.xdivy(x, 1.0 + x * x),
    "lgamma": lambda x: tf.math.lgamma(x * x + 3.0),
    "l2_normalize": lambda x: tf.nn.l2_normalize(x, 1),
    "divided-by-norm": lambda x: x / tf.norm(x),
    "centred-and-whitened": lambda x: (
        (x - tf.reduce_mean(x, 0)) / (tf.math.reduce_std(x, 0) + 1.0)
    ),
    "minus-reduce_max": lambda x: x - tf.reduce_max(x, 1, keepdims=True),
    "reduce_prod": lambda x: x + tf.reduce_prod(x, 1, keepdims=True),
    "logsumexp": lambda x: x - tf.reduce_logsumexp(x, 1, keepdims=True),
    "log_softmax": tf.nn.log_softmax,
    "attention": lambda x: tf.nn.softmax(x @ tf.transpose(x)) @ x,
    "einsum": lambda x: tf.einsum("ij,ik->ij", x, x),
    "matmul-ones_like": lambda x: x @ tf.ones_like(MATRIX),
    "conv1d": lambda x: tf.nn.conv1d(x[:, :, None], [[[0.5]], [[2.0]]], 1, "SAME")[
        :, :, 0
    ],
    "avg_pool": lambda x: tf.nn.avg_pool1d(x[:, :, None], 2, 2, "SAME")[:, :, 0],
    "max_pool": lambda x: tf.nn.max_pool1d(x[:, :, None], 2, 2, "SAME")[:, :, 0],
    "solve": _solved,
    "det": lambda x: (
        x + tf.linalg.det(x[:, None] * x[:, :, None] / 8.0 + tf.eye(4))[:, None]
    ),
    "cast-float64": lambda x: tf.cast(tf.cast(x, tf.float64) * 2.0, tf.float32),
    "cast-float16": lambda x: tf.cast(tf.cast(x, tf.float16), tf.float32),
    "random-dropout": lambda x: (
        x * tf.cast(tf.random.stateless_uniform([FEATURES], [1, 2]) > 0.3, x.dtype)
    ),
    "random-noise": lambda x: x + tf.random.stateless_normal([FEATURES], [3, 4]),
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
    "sparse": SPARSE,
    "mathematics": MATHEMATICS,
}
#: Name -> a function of a batch.
EXPRESSIONS = {name: group[name] for group in GROUPS.values() for name in group}
