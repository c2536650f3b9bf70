"""What cannot be known: of which functions a warning is right, and missed overflows.

A step whose gradients nobody unscaled is skipped by what is applied. Functions that
make a finite number of an infinity have it applied, if no warning says so.
"""

from __future__ import annotations

#: They take an overflow out of gradients that nobody has checked.
TAKES_INFINITIES_OUT = {
    "where(is_finite(g), g, 0)",
    "where(is_nan(g), 0, g)",
    "where(is_inf(g), 0, g)",
    "where(all is_finite, g, 0)",
    "where(norm is_finite, g, 0)",
    "multiply_no_nan(g, is_finite)",
    "cond(all is_finite, g, 0)",
    "boolean_mask(g, is_finite)",
}
#: They may do so, as far as can be seen.
MAY_TAKE_THEM_OUT = {
    "where(g == g, g, 0)",
    "cast(is_finite(g))",
    "reduce_logsumexp",  # TensorFlow asks there whether the maximum is finite
}
#: They have degree 0 or 1, and nobody can see it: a warning is right.
OPAQUE = {
    "(abs(g) ** 3) ** (1 / 3)",
    "exp(log(abs(g)))",
    "nextafter",
    "bitcast and back",
    "bitcast, masked",
    "py_function",
    "numpy_function halves",
    "reduce_prod of one",
    "fake_quant of its own range",
    "quantize_and_dequantize of its own range",
    "trust ratio",  # it has a constant for norms of 0
}
#: A number is computed, or drawn, in a graph: nobody knows there that it is not small.
NUMBERS = {"cholesky of gram + 1", "noise + g", "ones_like(g)"}
#: Python runs or chooses there in eager mode, which no operation tells of.
BRANCHES = {
    "cond of numbers",
    "cond of a sign",
    "cond(all is_finite, g, 0)",
    "while halves",
    "numpy_function halves",
}
#: What is done within them is not seen. By hand, they are divided again, and told.
BODIES = {
    "cond(all is_finite, g, 0)",
    "a function",
    "a function clips",
    "a function normalizes",
    "a function of flags",
    "a function thresholds",
    "cond clips",
    "cond of a sign",
    "cond of numbers",
    "cond(norm > 1)",
    "cond(sum > 0)",
    "flip and rot90",
    "foldl",
    "map_fn",
    "map_fn clips",
    "map_fn signs",
    "matrix_exp",
    "scan",
    "scan multiplies",
    "switch_case",
    "switch_case of a sign",
    "tf.case",
    "vectorized_map",
    "vectorized_map doubles",
    "while adds",
    "while halves",
    "zero_fraction",
}
#: Matrix functions and products of scaled gradients: some are told without need, the
#: others are divided by S in silence, as by both Kerases.
MATRICES = {
    "atan2(g, transpose(g))",
    "by power iteration",
    "cholesky",
    "conv2d with itself",
    "cross(g, transpose(g))",
    "eigh vectors",
    "fused batch norm",
    "g // mean(abs(g))",
    "gram ** -0.5 @ g",
    "gram ** 0.5",
    "histogram of its own range",
    "lu",
    "norm of order 3",
    "of rank one",
    "orthogonal by svd",
    "pinv",
    "qr q",
    "slogdet sign",
    "solve(g, g)",
    "solve(g, other)",
    "sqrtm",
    "svd again",
    "svd vectors",
    "triangular_solve(g, other)",
    "xlogy(other, abs(g))",
}
#: A number stands beside scaled gradients, and is divided with them in silence.
BESIDE = {
    "bitcast and back",
    "bitcast, masked",
    "concat with w",
    "dilation2d with ones",
    "g + 0.1 * sign(w)",
    "g + 0.1 * w",
    "g + stop_gradient(w)",
    "set_diag with ones",
    "tensor_scatter_nd_add with 1",
    "tensor_scatter_nd_update with 1",
    "where(constant, g, 1)",
    "where(g > 0, g, 1)",
}
#: Of degree 0: an infinity has a sign, a rank and a place in an order as any number.
FLAGS = {
    "a function of flags",
    "angle",
    "argmax",
    "argsort",
    "atan2(g, transpose(g))",
    "cast(g > 0)",
    "cast(g > mean(g))",
    "cond of a sign",
    "count_nonzero",
    "in_top_k",
    "majority of signs",
    "map_fn signs",
    "matrix_rank",
    "one_hot(argmax)",
    "ones_like(g)",
    "qr q",
    "searchsorted in itself",
    "sign",
    "slogdet sign",
    "unique indices",
    "w times a flag of g",
    "w where g is positive",
    "where(g > 0, 1, -1)",
    "zero_fraction",
}
#: Flags in older versions of TensorFlow, whose decomposition of an infinity is finite.
FLAGS_BEFORE = {"orthogonal by svd", "svd vectors"}
#: Of degree 1: they leave some elements out, and an infinity may be one of them.
CHOICES = {
    "abs below the median",
    "approx. percentile",
    "boolean_mask",
    "broadcast_to",
    "concat with zeros",
    "dilation2d",
    "fill",
    "g where it agrees with w",
    "gather_nd(where(g > 0))",
    "linalg.diag",
    "linspace",
    "max_pool",
    "maximum(g, 0)",
    "median",
    "meshgrid",
    "minimum(g, 0)",
    "one_hot with values",
    "pad",
    "range",
    "reduce_max",
    "reduce_min",
    "relu",
    "set_diag",
    "stateless dropout",
    "tensor_scatter_nd_max",
    "top_k values",
    "unsorted_segment_max",
    "where(abs(g) > mean, g, 0)",
    "where(g > 0, g, 0)",
}
#: Of no degree, or another one: while gradients are scaled, a warning tells of them.
BOUNDS = {
    "1 / g",
    "a function clips",
    "a function thresholds",
    "atan",
    "atan2(g, 1)",
    "boolean_mask of 0.1",
    "bucketize",
    "cast to int32",
    "cast to int8",
    "cast(g > 0.1)",
    "cast(norm(g) > 1)",
    "clip_by_value",
    "clip_by_value(g, 0, 1)",
    "concat with ones",
    "concat with w",
    "cond clips",
    "cond of numbers",
    "count of those above 0.1",
    "cumulative_logsumexp",
    "dilation2d with ones",
    "elu",
    "erf",
    "exp",
    "expm1",
    "fake_quant_with_min_max_args",
    "fake_quant_with_min_max_vars",
    "histogram",
    "map_fn clips",
    "maximum(g, -0.5)",
    "maximum(g, 0.01)",
    "maximum(g, w)",
    "minimum(g, 0.01)",
    "minimum(g, 1)",
    "nextafter",
    "one_hot of rounded",
    "pad with ones",
    "quantize and dequantize",
    "quantize_and_dequantize",
    "reciprocal",
    "reduce_logsumexp",
    "relu6",
    "rsqrt(abs(g))",
    "saturate_cast",
    "searchsorted",
    "selu",
    "set_diag with ones",
    "sigmoid",
    "sign(g - 0.5)",
    "softmax",
    "softplus",
    "sparse.softmax",
    "stack with ones",
    "tanh",
    "triangular_solve(g, other)",
    "truncatediv",
    "where(abs(g) < 1, g, 0)",
    "where(g > 0, g, 1)",
    "where(g > 0.1, 1, -1)",
    "where(g > 0.1, g, 0)",
}


def known_to_be_missed(state, mode):
    """Returns the functions whose overflows may be applied in silence."""
    found = NUMBERS | (BRANCHES if mode == "eager" else set())
    if state != "unscaled":
        found = found | FLAGS | FLAGS_BEFORE | CHOICES
        found = found | TAKES_INFINITIES_OUT | MAY_TAKE_THEM_OUT
        found = found | BODIES | MATRICES | BESIDE
    return found | BOUNDS if state == "by hand" else found
