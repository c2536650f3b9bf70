"""What is known of a value, in random straight-line programs and rule by rule.

A program is run with the loss scale S and with 2 S. If a value is said to be unscaled,
or a number, the two results are equal; if it is said to be scaled, one is twice the
other; and so on. What is said to be changed or unknown may be anything.
"""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from lossscale.provenance.kinds import (
    CHANGED,
    INVERSE,
    SCALE,
    SCALED,
    SQUARED,
    UNKNOWN,
    UNSCALED,
    Kind,
    made_of,
)
from lossscale.provenance.walk import Kinds
from lossscale.runtime import op_callbacks

S = 1024.0
#: What doubling S multiplies a value of a kind by.
DOUBLES = {
    None: 1.0,
    UNSCALED: 1.0,
    SCALE: 2.0,
    SCALED: 2.0,
    SQUARED: 4.0,
    INVERSE: 0.5,
}
NUMBERS = np.array([[0.5, 3.0, 1.25], [2.0, 0.125, 0.75], [1.5, 1.0, 4.0]])

#: What is made of a value `x`, or of two, `x` and `y`. The result is made as large.
UNARY = [
    *("-x", "tf.abs(x)", "tf.square(x)", "tf.sqrt(x)", "tf.math.rsqrt(x)"),
    *("tf.math.reciprocal(x)", "tf.sign(x)", "tf.reduce_sum(x)", "tf.transpose(x)"),
    *("tf.norm(x)", "tf.nn.l2_loss(x)", "tf.cast(x, tf.float32)", "tf.round(x)"),
    *("tf.exp(-x)", "tf.tanh(x)", "tf.math.is_finite(x)", "tf.argsort(x)"),
    *("tf.size(x)", "x - x", "tf.maximum(x, 1.0)", "tf.minimum(x, 7.0)"),
    *("tf.maximum(x, 1e-30)", "tf.nn.relu(x)", "x > 0.0", "x > 5.0"),
]
SUMS = [
    *("x + y", "x - y", "tf.where(x > 0.0, x, y)", "tf.add_n([x, y, x])"),
    *("tf.math.squared_difference(x, y)", "tf.concat([x, y], 0)[1:4]"),
]
BINARY = [
    *("x * y", "x / y", "tf.math.divide_no_nan(x, y)", "x @ y", "tf.maximum(x, y)"),
    *("tf.minimum(x, y)", "x > y", *SUMS),
]
STEPS = st.one_of(
    st.tuples(st.sampled_from(UNARY), st.integers(0, 50)),
    st.tuples(st.sampled_from(BINARY), st.integers(0, 50), st.integers(0, 50)),
)


def run(steps, kinds, s, number):
    """Returns the values of a program."""
    scale = tf.identity(s)
    kinds.note(scale, Kind(SCALE, (scale,)))
    unscaled = tf.identity(number)
    kinds.note(unscaled, Kind(UNSCALED))
    values = [scale * tf.ones([3, 3], tf.float64), number, unscaled, number * scale]
    for expression, *at in steps:
        x, y = values[at[0] % len(values)], values[at[-1] % len(values)]
        value = eval(expression, {"tf": tf, "x": x, "y": y})  # noqa: S307 - as above
        value = tf.cast(value, tf.float64)
        whole = value.shape == [3, 3]
        values.append(value if whole else value * tf.ones([3, 3], tf.float64))
    return values


def homogeneous(steps, found):
    """Tells which values come from no sum of a number and a value with S in it."""
    exact = [True] * 4
    for expression, *at in steps:
        sources = [i % len(exact) for i in at]
        kinds = {found[i] for i in sources}
        mixes = expression in SUMS and kinds - {None, UNSCALED} and len(kinds) > 1
        exact.append(all(exact[i] for i in sources) and not mixes)
    return exact


@pytest.mark.each_version
@pytest.mark.parametrize("mode", ["eager", "graph"])
@settings(max_examples=40, deadline=None)
@given(steps=st.lists(STEPS, min_size=1, max_size=7))
def test_what_is_said_of_a_value_is_so(mode, steps):
    results, said = [], []
    for s in (S, 2.0 * S):
        kinds = Kinds(None)

        def program(s, kinds=kinds):
            values = run(steps, kinds, s, tf.constant(NUMBERS))
            said[:] = [None if k is None else k.name for k in kinds.of(values)]
            return values

        if mode == "graph":
            program = tf.function(program, autograph=False)
        results.append([each.numpy() for each in program(tf.constant(s, tf.float64))])
    exact = homogeneous(steps, said)
    for at, kind in enumerate(said):
        once, twice = results[0][at], results[1][at]
        usable = np.isfinite(once) & np.isfinite(twice) & (np.abs(once) > 1e-12)
        usable &= np.abs(once) < 1e30
        if kind in DOUBLES and exact[at]:
            ratio = twice[usable] / once[usable]
            np.testing.assert_allclose(
                ratio, DOUBLES[kind], rtol=1e-5, err_msg=f"{at}: {kind}"
            )


@pytest.mark.parametrize(
    ("operation", "kinds", "value", "expected"),
    [
        ("Mul", [SCALED, SQUARED], None, CHANGED),
        ("RealDiv", [None, SCALE], None, INVERSE),
        ("RealDiv", [SCALED, UNKNOWN], None, SCALED),
        ("RealDiv", [UNKNOWN, SCALED], None, UNKNOWN),
        ("Rsqrt", [SQUARED], None, INVERSE),
        ("Pow", [SCALED, None], 2.0, SQUARED),
        ("Pow", [SCALED, None], 3.0, CHANGED),
        ("AddV2", [UNSCALED, UNKNOWN], None, UNKNOWN),
        ("AddV2", [SCALED, UNKNOWN], None, SCALED),
        ("Minimum", [UNSCALED, None], 1.0, UNSCALED),
        ("SelectV2", [UNSCALED, SCALED, None], None, SCALED),
        ("SelectV2", [CHANGED, SCALED, None], None, CHANGED),
        ("Mul", [CHANGED, UNSCALED], None, CHANGED),
        ("NobodyHasHeardOfIt", [SCALED, None], None, SCALED),
        ("NobodyHasHeardOfIt", [None, None], None, None),
    ],
)
def test_what_an_operation_makes_beside_what_expressions_show(
    operation, kinds, value, expected
):
    number = None if value is None else np.asarray(value)
    assert made_of(operation, kinds, lambda _: number) == expected


def test_listening_ends_a_thousand_operations_after_the_last_use():
    kinds = Kinds(None)
    kinds.note(tf.constant(2.0), Kind(SCALE))
    assert op_callbacks.is_notifying()
    one = tf.constant(1.0)
    for _ in range(1001):
        one += 1.0
    assert not op_callbacks.is_notifying()
