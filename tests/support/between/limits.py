"""What cannot be known of a function that stands before `apply_gradients`."""

from __future__ import annotations

#: They have degree 0 or 1, and nobody can see it: a warning is right.
OPAQUE = {
    "(abs(g) ** 3) ** (1 / 3)",
    "exp(log(abs(g)))",
    "nextafter",
    "bitcast and back",
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
    "cond of a sign",
    "cond(all is_finite, g, 0)",
    "while halves",
    "numpy_function halves",
}
#: What is done within them is not seen. By hand, they are divided again, and told.
BODIES = {
    "a function clips",
    "a function of flags",
    "cond clips",
    "cond of a sign",
    "cond(all is_finite, g, 0)",
    "cond(norm > 1)",
    "map_fn",
    "map_fn clips",
    "matrix_exp",
    "scan",
    "switch_case",
    "vectorized_map",
    "while adds",
    "while halves",
    "zero_fraction",
}
#: Matrix functions and products of scaled gradients: some are told without need, the
#: others are divided by S in silence, as by both Kerases.
MATRICES = {"conv2d with itself", "pinv", "qr q"}
#: A number stands beside scaled gradients, and is divided with them in silence.
BESIDE = {
    "bitcast and back",
    "concat with w",
    "g + 0.1 * sign(w)",
    "g + 0.1 * w",
    "tensor_scatter_nd_add with 1",
    "where(constant, g, 1)",
    "where(g > 0, g, 1)",
}


def is_open(name, state, mode):
    """Tells whether it is open what is applied, and whether anybody is told."""
    found = NUMBERS | (BRANCHES if mode == "eager" else set())
    if state != "unscaled":
        found = found | BODIES | MATRICES | BESIDE
    return name in found


def needs_no_warning(name, state, degree):
    """Tells whether a function is right, so that a warning is one too many.

    `degree` is the power of the loss scale that it hands on.
    """
    if state == "unscaled":
        return True
    return name not in OPAQUE and (state == "by hand" or degree in (0.0, 1.0))
