"""Functions that users put between `tape.gradient` and `apply_gradients`.

Each takes a gradient of shape `[3, 3]`, some the weight, too. Whatever comes out is
made a gradient of that shape in a way that hands any power of the loss scale on.
"""

from __future__ import annotations

from functools import lru_cache

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


def column(g):
    return tf.reshape(g, [9])


def through(g, dtype):
    return tf.cast(tf.cast(g, dtype), tf.float32)


def winsorized(g):
    """Clips to its own mean magnitude times two."""
    bound = 2.0 * tf.reduce_mean(tf.abs(g))
    return tf.clip_by_value(g, -bound, bound)


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


def gram(g):
    return tf.matmul(g, g, transpose_b=True)


def newton_schulz(g):
    """As the optimizer Muon does it."""
    x = g / (tf.norm(g) + 1e-7)
    for _ in range(5):
        a = tf.matmul(x, x, transpose_b=True)
        x = 3.4445 * x + tf.matmul(-4.775 * a + 2.0315 * tf.matmul(a, a), x)
    return x


def in_a_loop(g):
    def body(i, total):
        return i + 1, total + g

    return tf.while_loop(lambda i, _: i < 3, body, (0, tf.zeros(SHAPE)))[1]


def halved_until_small(g):
    is_large = lambda x: tf.norm(x) > 1.0  # noqa: E731
    return tf.while_loop(is_large, lambda x: (x / 2,), (g,), maximum_iterations=20)[0]


def halved_in_numpy(g):
    halved = tf.numpy_function(lambda x: x / np.float32(2), [g], tf.float32)
    return tf.ensure_shape(halved, SHAPE)


def same_in_python(g):
    return tf.ensure_shape(tf.py_function(lambda x: x, [g], tf.float32), SHAPE)


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


def of(module, names):
    """Returns functions of a module of TensorFlow, by name."""
    return {name: getattr(module, name) for name in names.split()}


FUNCTIONS = {
    **of(
        tf.math,
        "square reciprocal tanh sigmoid exp expm1 sin atan asinh erf sign round floor "
        "ceil rint count_nonzero reduce_sum reduce_max reduce_prod reduce_logsumexp "
        "reduce_std reduce_euclidean_norm cumsum cumprod cumulative_logsumexp "
        "zero_fraction",
    ),
    **of(tf.nn, "softmax log_softmax relu relu6 leaky_relu elu selu softplus"),
    **of(tf.nn, "softsign l2_loss"),
    **of(tf.linalg, "inv pinv det matrix_rank norm"),
    **of(tf, "argsort sort transpose stop_gradient"),
    # Arithmetic of each element, or of an element and a norm.
    "-g": lambda g: -g,
    "g * 2": lambda g: g * 2.0,
    "g + g": lambda g: g + g,
    "g * other": lambda g: g * OTHER,
    "g / other": lambda g: g / OTHER,
    "g * g": lambda g: g * g,
    "squared_difference": lambda g: tf.math.squared_difference(g, tf.transpose(g)),
    "sqrt(abs(g))": lambda g: tf.sqrt(tf.abs(g)),
    "abs(g) ** 1.5": lambda g: tf.abs(g) ** 1.5,
    "(abs(g) ** 3) ** (1 / 3)": lambda g: (tf.abs(g) ** 3) ** (1 / 3),
    "sqrt(g * g)": lambda g: tf.sqrt(g * g),
    "g / norm(g)": lambda g: g / tf.norm(g),
    "g / (norm(g) + 1e-7)": lambda g: g / (tf.norm(g) + 1e-7),
    "g / max(norm(g), 1)": lambda g: g / tf.maximum(tf.norm(g), 1.0),
    "g / (abs(g) + 0.01)": lambda g: g / (tf.abs(g) + 0.01),
    "g / sqrt(mean(g * g) + 1e-8)": lambda g: g / tf.sqrt(tf.reduce_mean(g * g) + 1e-8),
    "g + 1": lambda g: g + 1.0,
    "g + 1e-12": lambda g: g + 1e-12,
    "g - mean(g)": lambda g: g - tf.reduce_mean(g, axis=0, keepdims=True),
    "add_n": lambda g: tf.add_n([g, 2.0 * g]),
    "clip_by_value": lambda g: tf.clip_by_value(g, -1.0, 1.0),
    "clip_by_norm": lambda g: tf.clip_by_norm(g, 1.0),
    "clipped to its own mean": winsorized,
    "sign(g) * log1p(abs(g))": lambda g: tf.sign(g) * tf.math.log1p(tf.abs(g)),
    "exp(log(abs(g)))": lambda g: tf.exp(tf.math.log(tf.abs(g))),
    "maximum(g, 0.01)": lambda g: tf.maximum(g, 0.01),
    "maximum(abs(g), 1e-6)": lambda g: tf.maximum(tf.abs(g), 1e-6),
    "minimum(g, mean(g))": lambda g: tf.minimum(g, tf.reduce_mean(g)),
    "sign(g - 0.5)": lambda g: tf.sign(g - 0.5),
    "g // 0.1": lambda g: g // 0.1,
    "g % mean(abs(g))": lambda g: g % tf.reduce_mean(tf.abs(g)),
    "nextafter": lambda g: tf.math.nextafter(g, tf.zeros(SHAPE)),
    "divide_no_nan": lambda g: tf.math.divide_no_nan(g, OTHER),
    "cast to float16": lambda g: through(g, tf.float16),
    "cast to int32": lambda g: through(g, tf.int32),
    "bitcast and back": lambda g: tf.bitcast(tf.bitcast(g, tf.int32), tf.float32),
    "ones_like(g)": tf.ones_like,
    "ones_like(g) + g": lambda g: tf.ones_like(g) + g,
    # Thresholds.
    "where(g > 0.1, g, 0)": lambda g: tf.where(g > 0.1, g, 0.0),
    "where(g > 0, g, 1)": lambda g: tf.where(g > 0.0, g, 1.0),
    "where(constant, g, 1)": lambda g: tf.where(OTHER > 0.0, g, 1.0),
    "g * cast(norm(g) < 10)": lambda g: g * tf.cast(tf.norm(g) < 10.0, tf.float32),
    "soft threshold": lambda g: tf.sign(g) * tf.maximum(tf.abs(g) - 0.1, 0.0),
    # Flags.
    "where(g > 0, 1, -1)": lambda g: tf.where(g > 0.0, 1.0, -1.0),
    "cast(g > 0.1)": lambda g: tf.cast(g > 0.1, tf.float32),
    "one_hot(argmax)": lambda g: tf.one_hot(tf.argmax(g, 1), 3),
    "where(is_finite(g), g, 0)": lambda g: tf.where(tf.math.is_finite(g), g, 0.0),
    "cond(all is_finite, g, 0)": lambda g: tf.cond(
        tf.reduce_all(tf.math.is_finite(g)), lambda: g, lambda: tf.zeros_like(g)
    ),
    # Linear algebra.
    "matmul(g, g)": lambda g: tf.matmul(g, g),
    "matmul(g, other)": lambda g: tf.matmul(g, OTHER),
    "matmul(g, transpose(g))": gram,
    "Newton-Schulz": newton_schulz,
    "g / largest singular value": lambda g: g / tf.linalg.svd(g, compute_uv=False)[0],
    "cholesky of gram + 1": lambda g: tf.linalg.cholesky(gram(g) + tf.eye(3)),
    "matrix_exp": tf.linalg.expm,
    "g / global_norm": lambda g: g / tf.linalg.global_norm([g, 2.0 * g]),
    "einsum(g, g)": lambda g: tf.einsum("ij,kj->ik", g, g),
    # Sums, products and other reductions.
    "reduce_mean": lambda g: tf.reduce_mean(g, axis=0, keepdims=True) * tf.ones(SHAPE),
    "segment_sum": lambda g: tf.math.segment_sum(g, [0, 0, 1]),
    # What moves elements, chooses some of them, or counts them.
    "concat with zeros": lambda g: tf.concat([g[:2], tf.zeros([1, 3])], 0),
    "concat with ones": lambda g: tf.concat([g[:2], tf.ones([1, 3])], 0),
    "concat of two": lambda g: tf.concat([g, -2.0 * g], 0),
    "pad with ones": lambda g: tf.pad(g, [[1, 0], [0, 1]], constant_values=1.0)[:3, :3],
    "gather": lambda g: tf.gather(g, [2, 0, 1]),
    "scatter_nd": lambda g: tf.scatter_nd([[2], [0], [0]], g, SHAPE),
    "tensor_scatter_nd_add with 1": lambda g: tf.tensor_scatter_nd_add(
        g, [[0, 0]], [1.0]
    ),
    "strided slice": lambda g: g[::2, ::-1],
    "boolean_mask of 0.1": lambda g: tf.reduce_sum(tf.boolean_mask(g, g > 0.1)),
    "searchsorted": lambda g: tf.searchsorted(tf.constant([-1.0, 0.0, 1.0]), column(g)),
    "bucketize": lambda g: tf.raw_ops.Bucketize(input=g, boundaries=[-1.0, 0.0, 1.0]),
    # Signals, images and complex numbers.
    "abs(fft)": lambda g: tf.abs(tf.signal.fft2d(tf.cast(g, tf.complex64))),
    "bias_add of ones": lambda g: tf.nn.bias_add(g, [1.0, 1.0, 1.0]),
    "cross entropy": lambda g: tf.nn.softmax_cross_entropy_with_logits(tf.eye(3), g),
    # Branches, loops, functions, and what does nothing to a value.
    "cond(norm > 1)": lambda g: tf.cond(
        tf.norm(g) > 1.0, lambda: g / tf.norm(g), lambda: g
    ),
    "cond of a sign": lambda g: tf.cond(
        tf.reduce_sum(g) > 0.0, lambda: tf.ones(SHAPE), lambda: tf.zeros(SHAPE)
    ),
    "cond clips": lambda g: tf.cond(
        tf.constant(True), lambda: tf.clip_by_value(g, -1.0, 1.0), lambda: g
    ),
    "while adds": in_a_loop,
    "while halves": halved_until_small,
    "scan": lambda g: tf.scan(lambda a, x: a + x, g),
    "vectorized_map": lambda g: tf.vectorized_map(lambda x: x / tf.norm(x), g),
    "a function clips": tf.function(
        lambda x: tf.clip_by_value(x, -1.0, 1.0), autograph=False
    ),
    "py_function": same_in_python,
    "numpy_function halves": halved_in_numpy,
    "custom_gradient": tf.custom_gradient(lambda g: (tf.identity(g), tf.identity)),
    "identity_n": lambda g: tf.identity_n([g, -g])[1],
    "check_numerics": lambda g: tf.debugging.check_numerics(g, "bad"),
    "the gradient of its square": gradient_of_square,
    # Quantization and chance.
    "fake_quant of its own range": lambda g: (
        tf.quantization.fake_quant_with_min_max_vars(
            g, tf.reduce_min(g), tf.reduce_max(g)
        )
    ),
    "to 8-bit integers": to_8_bit_integers,
    "ternary": ternary,
    "noise + g": lambda g: g + 0.1 * tf.random.stateless_normal(SHAPE, [1, 2]),
}
WITH_WEIGHT = {
    "g + 0.1 * w": lambda g, w: g + 0.1 * w,
    "g + 0.1 * sign(w)": lambda g, w: g + 0.1 * tf.sign(w),
    "g * w": lambda g, w: g * w,
    "w times a flag of g": lambda g, w: w * tf.cast(g > 0.0, tf.float32),
    "trust ratio": by_layer_scale,
    "adaptive clipping": adaptive_clip,
    "concat with w": lambda g, w: tf.concat([g[:2], w[2:]], 0),
}
FUNCTIONS.update(WITH_WEIGHT)


def call(name, gradient, weight):
    """Returns what a function makes of a gradient: its values, or else their sum."""
    arguments = (gradient, weight) if name in WITH_WEIGHT else (gradient,)
    value = tf.cast(FUNCTIONS[name](*arguments), tf.float32)
    if value.shape.rank is not None and value.shape.num_elements() == 9:
        return tf.reshape(value, SHAPE)
    return tf.reduce_sum(value) * tf.ones(SHAPE)


def bare(name, gradient):
    """Returns what a function makes of a gradient that no loss scale has seen."""
    return call(name, tf.constant(gradient), tf.constant(WEIGHT)).numpy()


@lru_cache(maxsize=None)
def names():
    """Returns the names of the functions that this TensorFlow has."""

    def runs(name):
        try:
            bare(name, GRADIENT)
        except Exception:
            return False
        return True

    return list(filter(runs, FUNCTIONS))


def degree(name):
    """Returns which power of a factor the result holds, None if there is no such."""
    at_one = bare(name, GRADIENT).astype(np.float64)
    found = []
    for exponent in (-10, 10, 20):
        at = bare(name, GRADIENT * np.float32(2.0**exponent))
        with np.errstate(all="ignore"):
            powers = np.log2(at / at_one) / exponent
        found += powers[(at != 0.0) | (at_one != 0.0)].tolist()
    if not np.all(np.isfinite(found)) or np.ptp(found or [0.0]) > 2e-3:
        return None
    return round(float(np.mean(found or [0.0])), 2) + 0.0
