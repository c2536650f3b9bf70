"""The rules by which exponents are handed on, each by itself."""

from __future__ import annotations

import pytest

from lossscale.units.rules import (
    FREE,
    KEPT,
    ZERO,
    Unit,
    angle,
    bound,
    function,
    gradient,
    hull,
    keep,
    linear,
    multiply,
    power,
    sign,
)

SCALED = Unit(1.0, 1.0, frozenset(["a reading"]))
UNSURE = Unit(0.0, 1.0, cause="tanh")


def nothing(_):
    return None


def ends(unit):
    return (unit.low, unit.high)


def test_one_of_several_may_be_any_of_them():
    assert hull([None, None]) is None
    assert hull([None, SCALED]) is SCALED
    assert ends(hull([SCALED, FREE], "a branch")) == (0.0, 1.0)
    assert hull([SCALED, FREE], "a branch").cause == "a branch"
    assert hull([SCALED, FREE]).readings == SCALED.readings
    assert hull([ZERO, SCALED])[:3] == SCALED[:3]
    assert hull([KEPT, SCALED]) == SCALED  # weights have no say


def test_the_first_cause_is_told():
    assert keep([UNSURE, SCALED], nothing).cause == "tanh"
    assert keep([SCALED, SCALED], nothing).cause == ""


@pytest.mark.parametrize(
    ("powers", "units", "expected"),
    [
        ((1.0, 1.0), [SCALED, SCALED], (2.0, 2.0)),
        ((1.0, -1.0), [SCALED, SCALED], (0.0, 0.0)),
        ((1.0, -1.0), [None, SCALED], (-1.0, -1.0)),
        ((1.0, -1.0), [SCALED, UNSURE], (0.0, 1.0)),
        ((0.5,), [SCALED], (0.5, 0.5)),
        ((-1.0,), [UNSURE], (-1.0, 0.0)),
    ],
)
def test_products_of_powers(powers, units, expected):
    assert ends(linear(*powers)(units, nothing)) == expected


def test_a_product_with_a_zero_is_a_zero():
    assert linear(1.0, 1.0)([ZERO, SCALED], nothing).is_zero
    assert multiply([SCALED, None], lambda _: 0.0).is_zero
    assert multiply([SCALED, None], nothing) == SCALED


def test_a_power_must_be_a_constant():
    assert ends(power([SCALED, None], lambda _: 3.0)) == (3.0, 3.0)
    assert ends(power([SCALED, None], nothing)) == (0.0, 1.0)


def test_a_gradient_is_linear_in_one():
    assert gradient([SCALED, FREE, None], nothing) == SCALED
    assert ends(gradient([SCALED, SCALED], nothing)) == (0.0, 1.0)
    assert gradient([ZERO, SCALED], nothing).is_zero


@pytest.mark.parametrize(
    ("keeps_scale", "number", "low"),
    [(True, 1e-3, 1.0), (True, 1.0, 0.0), (True, -1e-3, 0.0), (False, 1e-3, 0.0)],
)
def test_a_small_floor_is_no_bound(keeps_scale, number, low):
    found = bound(keeps_scale)([SCALED, None], lambda _: number)
    assert ends(found) == (low, 1.0)
    assert found.is_bounded
    of_two = bound(keeps_scale)([SCALED, SCALED], nothing)
    assert ends(of_two) == (1.0, 1.0)


def test_functions_signs_and_angles():
    assert ends(function([SCALED], nothing)) == (0.0, 1.0)
    assert ends(function([Unit(2.0, 2.0)], nothing)) == (0.0, 2.0)
    assert function([FREE], nothing).is_free
    assert function([ZERO], nothing) is FREE
    assert sign([UNSURE], nothing).is_free
    assert angle([SCALED, SCALED], nothing).is_free
    assert not angle([SCALED, None], nothing).is_free


def test_a_large_power_may_be_anything():
    found = linear(9.0)([SCALED], nothing)
    assert ends(found) == (-8.0, 8.0)
    assert "large power" in found.cause
