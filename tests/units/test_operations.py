"""Exponents against arithmetic: what is computed at S and at 2 S tells the power."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lossscale.units.operations import join, result, results
from lossscale.units.sources import Input
from lossscale.units.unit import FREE, KEPT, ZERO, Operands, Unit

READ = Unit(1.0, 1.0, frozenset([Input(0, is_read=True)]), is_scale=True)
SCALED = Unit(1.0, 1.0, frozenset([Input(0, is_read=True)]))
UNSCALED = Unit(0.0, 0.0, sources=frozenset([Input(0, is_read=False)]))

#: What TensorFlow's operations compute, for the few that are drawn.
UNARY = {
    "Neg": np.negative,
    "Abs": np.abs,
    "Square": np.square,
    "Sqrt": np.sqrt,
    "Rsqrt": lambda x: 1.0 / np.sqrt(x),
    "Reciprocal": lambda x: 1.0 / x,
    "Exp": lambda x: np.exp(-x),
    "Tanh": np.tanh,
    "Sign": np.sign,
    "Sum": np.sum,
    "Max": np.max,
    "Identity": lambda x: x,
    "Relu": np.abs,
    "L2Loss": lambda x: np.sum(x * x) / 2,
    "ZerosLike": np.zeros_like,
    "Log1p": np.log1p,
    "Sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "Round": np.round,
}
BINARY = {
    "Mul": np.multiply,
    "AddV2": np.add,
    "AddN": np.add,
    "RealDiv": np.divide,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "MatMul": np.dot,
    "SquaredDifference": lambda x, y: (x + y) ** 2,
    "Atan2": np.arctan2,
    "Pack": lambda x, y: np.where(np.array([True, False]), x, y),
    "Less": lambda x, y: np.less(x, y) * 1.0,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
}
POWERS = [-2.0, -1.0, 0.5, 2.0, 3.0]


def numbers(*values):
    """Returns what inputs are: numbers, None of one that is no constant."""
    arrays = [None if value is None else np.asarray(value) for value in values]
    return Operands(lambda index: arrays[index])


class Value:
    """A value at S and at 2 S, and what is known of it."""

    def __init__(self, at_one, at_two, unit, number=None):
        self.at = np.float64(at_one), np.float64(at_two)
        self.unit, self.number = unit, number


def leaf(kind, x, y):
    if kind == "S":
        return Value(8.0, 16.0, READ)
    if kind == "scaled":
        return Value([8.0 * x, 8.0 * y], [16.0 * x, 16.0 * y], SCALED)
    if kind == "unscaled":
        return Value([x, y], [x, y], UNSCALED)
    return Value(x, x, None, number=x)


def applied(kind, values, function):
    operands = numbers(*(value.number for value in values))
    unit = result(kind, [value.unit for value in values], operands)
    at = [function(*(value.at[i] for value in values)) for i in (0, 1)]
    # TensorFlow folds no constants before it is asked: here all are known.
    are_numbers = all(value.unit is None for value in values)
    return Value(*at, unit, number=at[0] if are_numbers else None)


def both(kind, x, y):
    """Returns an operation of two."""
    return applied(kind, [x, y], BINARY[kind])


some = st.floats(0.5, 2.0).map(lambda x: round(x, 3))
leaves = st.builds(
    leaf, st.sampled_from(["S", "scaled", "unscaled", "number"]), some, some
)


def larger(values):
    unary = st.builds(
        lambda kind, x: applied(kind, [x], UNARY[kind]),
        st.sampled_from(sorted(UNARY)),
        values,
    )
    binary = st.builds(both, st.sampled_from(sorted(BINARY)), values, values)
    power = st.builds(
        lambda x, p: applied("Pow", [x, Value(p, p, None, number=p)], np.power),
        values,
        st.sampled_from(POWERS),
    )
    return st.one_of(unary, binary, power)


@settings(max_examples=2000, deadline=None, derandomize=True, database=None)
@given(st.recursive(leaves, larger, max_leaves=12))
def test_an_exponent_that_is_sure_is_right(value):
    one, two = value.at
    if value.unit is None:
        assert np.array_equal(one, two, equal_nan=True)
    elif value.unit.is_zero:
        assert not np.any(one) or not np.all(np.isfinite(one))
    elif value.unit.is_sure and np.all(np.isfinite(one) & np.isfinite(two)):
        factor = 2.0**value.unit.low
        np.testing.assert_allclose(two, one * factor, rtol=1e-9)


NOTHING = Operands()


@pytest.mark.parametrize(
    ("kind", "units", "low", "high"),
    [
        ("Mul", [READ, UNSCALED], 1, 1),
        ("RealDiv", [SCALED, READ], 0, 0),
        ("RealDiv", [None, READ], -1, -1),
        ("AddN", [SCALED, None, SCALED], 1, 1),
        ("AddV2", [SCALED, UNSCALED], 0, 1),
        ("Exp", [SCALED], 0, 1),
        ("Exp", [UNSCALED], 0, 0),
        ("Sign", [SCALED], 0, 0),
        ("Atan2", [SCALED, SCALED], 0, 0),
        ("Atan2", [SCALED, None], 0, 0),
        ("SqrtGrad", [Unit(0.5, 0.5), SCALED], 0.5, 0.5),
        ("ReluGrad", [SCALED, UNSCALED], 1, 1),
        ("Conv2DBackpropFilter", [None, None, SCALED], 1, 1),
        ("SomebodysOwnOperation", [SCALED, None], 0, 1),
        ("SomebodysOwnOperation", [UNSCALED, None], 0, 0),
        ("SomebodysOwnGrad", [SCALED, None], 1, 1),
        ("Relu6", [SCALED], 0, 1),
    ],
)
def test_rules(kind, units, low, high):
    found = result(kind, units, NOTHING)
    assert (found.low, found.high) == (low, high)


@pytest.mark.parametrize(
    ("kind", "unit", "bound", "low"),
    [
        ("Maximum", READ, 1.0, 1.0),  # no loss scale is below 1 by accident
        ("Minimum", READ, 1.0, 0.0),
        ("Maximum", SCALED, 1.0, 0.0),
        ("Maximum", SCALED, 1e-7, 1.0),  # no division by zero
        ("Maximum", SCALED, 0.0, 1.0),
        ("Minimum", SCALED, 1e-7, 0.0),
        ("Minimum", SCALED, 0.0, 1.0),
        ("Maximum", UNSCALED, 1.0, 0.0),
    ],
)
def test_bounds(kind, unit, bound, low):
    found = result(kind, [unit, None], numbers(None, bound))
    assert (found.low, found.high) == (low, unit.high)
    assert found.hides_inf


def test_the_loss_scale_times_something_is_not_the_loss_scale():
    twice = result("Mul", [READ, None], numbers(None, 2.0))
    assert result("Maximum", [twice, None], numbers(None, 1.0)).low == 0.0
    same = result("Identity", [READ], NOTHING)
    assert result("Maximum", [same, None], numbers(None, 1.0)).low == 1.0


def test_a_zero_has_every_exponent():
    assert result("ZerosLike", [None], NOTHING).is_zero
    assert result("Const", [], numbers(0.0)).is_zero
    assert result("Const", [], numbers(1.0)) is None
    assert result("Fill", [None, None], numbers(None, 0.0)).is_zero
    assert result("Fill", [None, SCALED], numbers(None, None)) is SCALED
    assert result("Mul", [ZERO, SCALED], NOTHING).is_zero
    assert result("AddN", [ZERO, SCALED], NOTHING) == SCALED
    assert result("AddN", [ZERO, KEPT], NOTHING).from_variable
    assert result("Exp", [ZERO], NOTHING) is None  # it is 1
    assert result("Maximum", [ZERO, None], numbers(None, 1.0)) is None


def test_results_of_one_operation_may_differ():
    values, positions = results("TopKV2", [SCALED, None], NOTHING, 2)
    assert (values.low, positions.low) == (1.0, 0.0)
    assert [each.low for each in results("Svd", [SCALED], NOTHING, 3)] == [1, 0, 0]
    assert [each.low for each in results("Qr", [SCALED], NOTHING, 2)] == [0, 1]
    assert results("IdentityN", [SCALED, None], NOTHING, 2) == [SCALED, None]
    assert results("Split", [None, SCALED], NOTHING, 2) == [SCALED, SCALED]


def test_what_a_variable_held_has_no_say_beside_anything_else():
    assert result("AddV2", [KEPT, SCALED], NOTHING).low == 1.0
    assert not result("AddV2", [KEPT, SCALED], NOTHING).from_variable
    assert result("AddV2", [KEPT, None], NOTHING).from_variable
    held = SCALED._replace(from_variable=True)
    assert result("RealDiv", [held, None], NOTHING) == held


def test_a_power_of_the_loss_scale_counts_in_a_product_though_a_variable_held_it():
    held = READ._replace(from_variable=True, is_scale=False)
    assert result("RealDiv", [SCALED, held], NOTHING).is_free
    assert not result("RealDiv", [SCALED, held], NOTHING).from_variable
    assert result("RealDiv", [held, READ], NOTHING).is_free
    assert result("Mul", [SCALED, KEPT], NOTHING) == SCALED
    assert result("AddV2", [SCALED, held], NOTHING) == SCALED


def test_a_clipped_norm_is_unsure_and_what_it_divides_too():
    norm = result("Sqrt", [result("L2Loss", [SCALED], NOTHING)], NOTHING)
    assert norm.low == norm.high == 1.0
    clipped = result(
        "Minimum", [result("Reciprocal", [norm], NOTHING), None], numbers(None, 1)
    )
    grad = result("Mul", [SCALED, clipped], NOTHING)
    assert (grad.low, grad.high) == (0.0, 1.0)
    assert "number" in grad.cause
    assert result("RealDiv", [SCALED, norm], NOTHING).is_free


def test_reads_end_where_the_unit_does_and_unscalings_stay():
    assert result("RealDiv", [SCALED, READ], NOTHING).reads == frozenset()
    both = result(
        "AddN",
        [UNSCALED, FREE._replace(sources=frozenset([Input(1, is_read=False)]))],
        NOTHING,
    )
    assert both.unscalings == UNSCALED.sources | {Input(1, is_read=False)}
    scaled_again = result("Mul", [both, READ], NOTHING)
    assert scaled_again.unscalings == both.unscalings
    assert scaled_again.reads == READ.reads


def test_an_infinity_is_hidden_by_a_bound_and_seen_through_a_product():
    clipped = result("Minimum", [UNSCALED, None], numbers(None, 1.0))
    assert clipped.hides_inf
    assert result("AddV2", [UNSCALED, clipped], NOTHING).hides_inf
    assert not result("Mul", [UNSCALED, clipped], NOTHING).hides_inf


def test_exponents_end_somewhere():
    """A loop that multiplies by the loss scale is swept until nothing is new."""
    unit = READ
    for _ in range(100):
        before, unit = unit, join([unit, result("Mul", [unit, READ], NOTHING)])
    assert before == unit
    assert not math.isinf(unit.high)
