"""The table of causes: what each operation makes of what, and what is said of that."""

import numpy as np
import pytest
import tensorflow as tf

from lossscale.ranges import causes

#: Operation, arguments, whether its derivative is bad, and what is said first.
ROWS = [
    ("RealDiv", (1.0, 0.0), False, "Its divisor holds zeros."),
    ("RealDiv", (0.0, 0.0), False, "Its divisor holds zeros."),
    ("RealDiv", (1.0, 0.0), True, "Its divisor holds zeros."),
    ("RealDiv", (1.0, 1e-30), True, causes._SQUARE),
    ("Log", (0.0,), False, "It is the logarithm of a zero."),
    ("Log", (-1.0,), False, causes._NEGATIVE),
    ("Log", (0.0,), True, "Its argument holds zeros."),
    ("Log", (1e-40,), True, causes._OFTEN_LOG),
    ("Xlogy", (2.0, 0.0), False, "It is the logarithm of a zero."),
    ("Log1p", (-1.0,), False, "It is the logarithm of a zero."),
    ("Log1p", (-2.0,), False, causes._BELOW),
    ("Log1p", (-1.0,), True, "Its argument holds zeros."),
    ("Sqrt", (-1.0,), False, causes._NEGATIVE),
    ("Sqrt", (0.0,), True, "Its argument holds zeros."),
    ("Rsqrt", (0.0,), False, "It is a negative power of zero."),
    ("Rsqrt", (1e-30,), True, causes._OFTEN_ROOT),
    ("Pow", (0.0, -0.5), False, "It is a negative power of zero."),
    ("Pow", (-1.0, 0.5), False, causes._NEGATIVE),
    ("Pow", (0.0, 0.5), True, "Its argument holds zeros."),
    ("Exp", (800.0,), False, causes._EXPONENTIAL),
    ("Acos", (2.0,), False, causes._LIMITS),
    ("Acos", (1.0,), True, causes._LIMITS),
    ("Mul", (1e30, 1e30), False, causes._OFTEN),
    ("Mul", (1.0, 1e30), True, causes._OFTEN_ROOT),
]


@pytest.mark.parametrize(
    ("operation", "given", "is_backward", "said"),
    ROWS,
    ids=[f"{row[0]}{row[1]}{'-' * row[2]}back" for row in ROWS],
)
def test_what_is_said_fits_what_was_seen(operation, given, is_backward, said):
    values = [tf.constant(value) for value in given]
    names = [*"xy"] if len(values) == 2 else ["x"]
    compute = getattr(tf.raw_ops, operation)
    with tf.GradientTape() as tape:
        tape.watch(values)
        result = compute(**dict(zip(names, values)))
        result *= 1e30 if operation in {"Mul", "Rsqrt"} and is_backward else 1.0
    made = tape.gradient(result, values) if is_backward else [result]
    kinds = [
        "nan" if np.isnan(each) else "inf" if each > 0 else "-inf"
        for each in map(float, made)
        if not np.isfinite(each)
    ]
    assert kinds  # the operation does what the row is about
    held = causes.held_by(operation, values)
    cause = causes.cause_of(operation, kinds, is_backward, held)
    assert said == (cause.seen or cause.usual)
    assert cause.to_write or not cause.operations
