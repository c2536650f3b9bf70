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
ROWS = [0, 1, 0]
SHAPE = [3, 3]


def column(g):
    return tf.reshape(g, [9])


def through(g, dtype):
    return tf.cast(tf.cast(g, dtype), tf.float32)


def winsorized(g):
    """Clips to its own mean magnitude times two."""
    bound = 2.0 * tf.reduce_mean(tf.abs(g))
    return tf.clip_by_value(g, -bound, bound)


def sparsified(g):
    """Keeps the four largest."""
    flat = column(g)
    _, at = tf.math.top_k(tf.abs(flat), 4)
    return tf.scatter_nd(at[:, None], tf.gather(flat, at), [9])


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


def power_of_gram(g, power):
    values, vectors = tf.linalg.eigh(gram(g))
    return tf.matmul(vectors * values**power, vectors, transpose_b=True)


def standardized(g):
    mean, variance = tf.nn.moments(g, [0, 1])
    return tf.nn.batch_normalization(g, mean, variance, None, None, 1e-6)


def moments(g):
    mean, variance = tf.nn.moments(g, [0, 1])
    return mean + tf.sqrt(variance)


def partitioned(g):
    parts = tf.dynamic_partition(column(g), tf.cast(column(g) > 0.0, tf.int32), 2)
    at = tf.dynamic_partition(tf.range(9), tf.cast(column(g) > 0.0, tf.int32), 2)
    return tf.ensure_shape(tf.dynamic_stitch(at, [parts[0], parts[1] * 2.0]), [9])


def image(g):
    return tf.reshape(g, [1, 3, 3, 1])


def in_a_loop(g):
    def body(i, total):
        return i + 1, total + g

    return tf.while_loop(lambda i, _: i < 3, body, (0, tf.zeros(SHAPE)))[1]


def halved_until_small(g):
    is_large = lambda x: tf.norm(x) > 1.0  # noqa: E731
    return tf.while_loop(is_large, lambda x: (x / 2,), (g,), maximum_iterations=20)[0]


def in_a_tensor_array(g):
    array = tf.TensorArray(tf.float32, 3)
    for i in range(3):
        array = array.write(i, g[i])
    return array.stack()


def halved_in_numpy(g):
    halved = tf.numpy_function(lambda x: x / np.float32(2), [g], tf.float32)
    return tf.ensure_shape(halved, SHAPE)


def same_in_python(g):
    return tf.ensure_shape(tf.py_function(lambda x: x, [g], tf.float32), SHAPE)


def after_an_assertion(g):
    with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(g), SHAPE)]):
        return tf.identity(g)


def gradient_of_square(g):
    with tf.GradientTape() as tape:
        tape.watch(g)
        square = tf.reduce_sum(g * g)
    return tape.gradient(square, g)


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
    "rsqrt(abs(g))": lambda g: tf.math.rsqrt(tf.abs(g)),
    "sign(g) * sqrt(abs(g))": lambda g: tf.sign(g) * tf.sqrt(tf.abs(g)),
    "abs(g) ** 1.5": lambda g: tf.abs(g) ** 1.5,
    "(abs(g) ** 3) ** (1 / 3)": lambda g: (tf.abs(g) ** 3) ** (1 / 3),
    "abs(g) ** other": lambda g: tf.abs(g) ** OTHER,
    "sqrt(g * g)": lambda g: tf.sqrt(g * g),
    "sqrt(g * g + 1e-8)": lambda g: tf.sqrt(g * g + 1e-8),
    "1 / g": lambda g: 1.0 / g,
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
    "log(abs(g))": lambda g: tf.math.log(tf.abs(g)),
    "sign(g) * log1p(abs(g))": lambda g: tf.sign(g) * tf.math.log1p(tf.abs(g)),
    "exp(log(abs(g)))": lambda g: tf.exp(tf.math.log(tf.abs(g))),
    "atan2(g, 1)": lambda g: tf.atan2(g, 1.0),
    "lgamma": lambda g: tf.math.lgamma(tf.abs(g)),
    "maximum(g, 0)": lambda g: tf.maximum(g, 0.0),
    "maximum(g, 0.01)": lambda g: tf.maximum(g, 0.01),
    "maximum(g, transpose(g))": lambda g: tf.maximum(g, tf.transpose(g)),
    "maximum(abs(g), 1e-6)": lambda g: tf.maximum(tf.abs(g), 1e-6),
    "minimum(g, 1)": lambda g: tf.minimum(g, 1.0),
    "minimum(g, mean(g))": lambda g: tf.minimum(g, tf.reduce_mean(g)),
    "sign(g) * mean(abs(g))": lambda g: tf.sign(g) * tf.reduce_mean(tf.abs(g)),
    "sign(g - 0.5)": lambda g: tf.sign(g - 0.5),
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
    # Thresholds.
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
    "soft threshold": lambda g: tf.sign(g) * tf.maximum(tf.abs(g) - 0.1, 0.0),
    "abs below the median": lambda g: tf.where(
        tf.abs(g) < tf.sort(column(tf.abs(g)))[4], g, 0.0
    ),
    # Flags.
    "where(g > 0, 1, -1)": lambda g: tf.where(g > 0.0, 1.0, -1.0),
    "cast(g > 0.1)": lambda g: tf.cast(g > 0.1, tf.float32),
    "cast(g > mean(g))": lambda g: tf.cast(g > tf.reduce_mean(g), tf.float32),
    "cast(norm(g) > 1)": lambda g: tf.cast(tf.norm(g) > 1.0, tf.float32),
    "one_hot(argmax)": lambda g: tf.one_hot(tf.argmax(g, 1), 3),
    "majority of signs": lambda g: (
        tf.sign(tf.reduce_sum(tf.sign(g), axis=0, keepdims=True)) * tf.ones(SHAPE)
    ),
    "in_top_k": lambda g: tf.cast(tf.math.in_top_k([0, 1, 2], g, 2), tf.float32),
    "g / count of those above 0.1": lambda g: (
        g / tf.cast(tf.math.count_nonzero(g > 0.1), tf.float32)
    ),
    "where(is_finite(g), g, 0)": lambda g: tf.where(tf.math.is_finite(g), g, 0.0),
    "where(g == g, g, 0)": lambda g: tf.where(tf.equal(g, g), g, 0.0),
    "where(all is_finite, g, 0)": lambda g: tf.where(
        tf.reduce_all(tf.math.is_finite(g)), g, tf.zeros_like(g)
    ),
    "multiply_no_nan(g, is_finite)": lambda g: tf.math.multiply_no_nan(
        g, tf.cast(tf.math.is_finite(g), tf.float32)
    ),
    "cond(all is_finite, g, 0)": lambda g: tf.cond(
        tf.reduce_all(tf.math.is_finite(g)), lambda: g, lambda: tf.zeros_like(g)
    ),
    "boolean_mask(g, is_finite)": lambda g: tf.reduce_sum(
        tf.boolean_mask(g, tf.math.is_finite(g))
    ),
    # Linear algebra.
    "matmul(g, g)": lambda g: tf.matmul(g, g),
    "matmul(g, other)": lambda g: tf.matmul(g, OTHER),
    "matmul(g, transpose(g))": gram,
    "svd values": lambda g: tf.linalg.svd(g, compute_uv=False),
    "Newton-Schulz": newton_schulz,
    "g / largest singular value": lambda g: g / tf.linalg.svd(g, compute_uv=False)[0],
    "qr q": lambda g: tf.linalg.qr(g)[0],
    "gram ** -0.25 @ g": lambda g: tf.matmul(power_of_gram(g, -0.25), g),
    "cholesky of gram + 1": lambda g: tf.linalg.cholesky(gram(g) + tf.eye(3)),
    "slogdet log": lambda g: tf.linalg.slogdet(g)[1],
    "matrix_exp": tf.linalg.expm,
    "logm": lambda g: tf.math.real(tf.linalg.logm(tf.complex(gram(g), 0.0 * g))),
    "solve(other, g)": lambda g: tf.linalg.solve(OTHER, g),
    "norm of order 1": lambda g: tf.norm(g, ord=1),
    "g / global_norm": lambda g: g / tf.linalg.global_norm([g, 2.0 * g]),
    "einsum(g, other)": lambda g: tf.einsum("ij,jk->ik", g, tf.constant(OTHER)),
    "einsum(g, g)": lambda g: tf.einsum("ij,kj->ik", g, g),
    # Sums, products and other reductions.
    "reduce_mean": lambda g: tf.reduce_mean(g, axis=0, keepdims=True) * tf.ones(SHAPE),
    "reduce_prod of one": lambda g: tf.reduce_prod(g[..., None], axis=-1),
    "g / reduce_std": lambda g: g / (tf.math.reduce_std(g) + 1e-8),
    "standardized": standardized,
    "segment_sum": lambda g: tf.math.segment_sum(g, [0, 0, 1]),
    "segment_prod": lambda g: tf.math.segment_prod(g, [0, 0, 1]),
    "unsorted_segment_max": lambda g: tf.math.unsorted_segment_max(g, ROWS, 2),
    "unsorted_segment_prod": lambda g: tf.math.unsorted_segment_prod(g, ROWS, 2),
    "approx. percentile": lambda g: tf.gather(tf.sort(column(tf.abs(g))), 7),
    # What moves elements, chooses some of them, or counts them.
    "reshape and back": lambda g: tf.reshape(tf.reshape(g, [9, 1]), SHAPE),
    "concat with zeros": lambda g: tf.concat([g[:2], tf.zeros([1, 3])], 0),
    "concat with ones": lambda g: tf.concat([g[:2], tf.ones([1, 3])], 0),
    "concat of two": lambda g: tf.concat([g, -2.0 * g], 0),
    "pad": lambda g: tf.pad(g, [[1, 0], [0, 1]])[:3, :3],
    "pad with ones": lambda g: tf.pad(g, [[1, 0], [0, 1]], constant_values=1.0)[:3, :3],
    "gather": lambda g: tf.gather(g, [2, 0, 1]),
    "gather by argsort": lambda g: tf.gather(column(g), tf.argsort(column(g))),
    "scatter_nd": lambda g: tf.scatter_nd([[2], [0], [0]], g, SHAPE),
    "tensor_scatter_nd_update": lambda g: tf.tensor_scatter_nd_update(
        g, [[0, 0]], [0.0]
    ),
    "tensor_scatter_nd_add with 1": lambda g: tf.tensor_scatter_nd_add(
        g, [[0, 0]], [1.0]
    ),
    "strided slice": lambda g: g[::2, ::-1],
    "stack with ones": lambda g: tf.stack([g[0], g[1], tf.ones([3])]),
    "boolean_mask": lambda g: tf.reduce_sum(tf.boolean_mask(g, g > 0.0)),
    "boolean_mask of 0.1": lambda g: tf.reduce_sum(tf.boolean_mask(g, g > 0.1)),
    "gather_nd(where(g > 0))": lambda g: tf.reduce_sum(
        tf.gather_nd(g, tf.where(g > 0.0))
    ),
    "unique indices": lambda g: tf.unique(column(g)).idx,
    "dynamic_partition": partitioned,
    "sparse to dense": lambda g: tf.sparse.to_dense(tf.sparse.from_dense(g)),
    "sparse_dense_matmul": lambda g: tf.sparse.sparse_dense_matmul(
        tf.sparse.from_dense(g), tf.constant(OTHER)
    ),
    "sparse.softmax": lambda g: tf.sparse.to_dense(
        tf.sparse.softmax(tf.sparse.from_dense(g))
    ),
    "IndexedSlices": lambda g: tf.convert_to_tensor(
        tf.IndexedSlices(g, tf.constant([0, 2, 2]), tf.constant(SHAPE))
    ),
    "ragged": lambda g: tf.RaggedTensor.from_tensor(g, lengths=[1, 2, 3]).to_tensor(
        shape=SHAPE
    ),
    "set_diag": lambda g: tf.linalg.set_diag(g, tf.zeros([3])),
    "one_hot with values": lambda g: tf.one_hot([0, 1, 2], 3, g[0, 0], 0.0),
    "fill": lambda g: tf.fill(SHAPE, g[1, 1]),
    "linspace": lambda g: tf.linspace(0.0, tf.reduce_max(g), 9),
    "range": lambda g: tf.range(9.0) * g[0, 0],
    "searchsorted": lambda g: tf.searchsorted(tf.constant([-1.0, 0.0, 1.0]), column(g)),
    "histogram": lambda g: tf.cast(
        tf.histogram_fixed_width(g, [-3.0, 3.0], 9), tf.float32
    ),
    "bincount with weights": lambda g: tf.math.bincount(
        tf.constant([0, 1, 0, 2, 1, 0, 2, 1, 0]), weights=column(g)
    ),
    "bucketize": lambda g: tf.raw_ops.Bucketize(input=g, boundaries=[-1.0, 0.0, 1.0]),
    # Signals, images and complex numbers.
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
    "lrn": lambda g: tf.nn.local_response_normalization(tf.reshape(g, [1, 1, 3, 3])),
    "resize": lambda g: tf.image.resize(image(g), [2, 2]),
    "per_image_standardization": lambda g: tf.image.per_image_standardization(image(g)),
    "cross entropy": lambda g: tf.nn.softmax_cross_entropy_with_logits(tf.eye(3), g),
    "sparse cross entropy": lambda g: tf.nn.sparse_softmax_cross_entropy_with_logits(
        [0, 1, 2], g
    ),
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
    "map_fn": lambda g: tf.map_fn(lambda x: x * 2.0, g),
    "map_fn clips": lambda g: tf.map_fn(lambda x: tf.clip_by_value(x, -1.0, 1.0), g),
    "scan": lambda g: tf.scan(lambda a, x: a + x, g),
    "vectorized_map": lambda g: tf.vectorized_map(lambda x: x / tf.norm(x), g),
    "switch_case": lambda g: tf.switch_case(
        tf.constant(1), [lambda: g, lambda: g * 2.0]
    ),
    "a function clips": tf.function(
        lambda x: tf.clip_by_value(x, -1.0, 1.0), autograph=False
    ),
    "a function of flags": tf.function(
        lambda x: tf.cast(x > 0.0, tf.float32), autograph=False
    ),
    "tensor array": in_a_tensor_array,
    "recompute_grad": tf.recompute_grad(lambda x: x * 2.0),
    "py_function": same_in_python,
    "numpy_function halves": halved_in_numpy,
    "custom_gradient": tf.custom_gradient(lambda g: (tf.identity(g), tf.identity)),
    "identity_n": lambda g: tf.identity_n([g, -g])[1],
    "grad_pass_through": tf.grad_pass_through(tf.round),
    "check_numerics": lambda g: tf.debugging.check_numerics(g, "bad"),
    "control_dependencies": after_an_assertion,
    "the gradient of its square": gradient_of_square,
    # Quantization and chance.
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
