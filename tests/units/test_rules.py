"""The rules by which exponents are handed on, each by itself."""

from __future__ import annotations

import numpy as np
import pytest

from lossscale.units.rules import (
    bound,
    chosen,
    determinant,
    flag,
    function,
    gradient,
    is_finite,
    linear,
    moved,
    power,
    product,
    rounded,
    together,
    zero_or,
)
from lossscale.units.sources import Input
from lossscale.units.unit import FREE, KEPT, ZERO, Operands, Unit, hull

SCALED = Unit(1.0, 1.0, frozenset([Input(0, is_read=True)]))
UNSURE = Unit(0.0, 1.0, cause="tanh")
UNSCALED = Unit(0.0, 0.0, sources=frozenset([Input(0, is_read=False)]))
NOTHING = Operands()


def numbers(*values):
    """Returns what inputs are: arrays, None of one that is no constant."""
    arrays = [None if v is None else np.asarray(v, np.float32) for v in values]
    return Operands(lambda index: arrays[index])


def ends(unit):
    return (unit.low, unit.high)


def test_one_of_several_may_be_any_of_them():
    assert hull([None, None]) is None
    assert hull([None, SCALED]) is SCALED
    assert ends(hull([SCALED, FREE], "a branch")) == (0.0, 1.0)
    assert hull([SCALED, FREE], "a branch").cause == "a branch"
    assert hull([SCALED, FREE]).reads == SCALED.reads
    assert hull([ZERO, SCALED]) is SCALED
    assert hull([KEPT, SCALED]) == SCALED  # weights have no say


def test_a_number_beside_a_zero_is_no_zero():
    assert hull([ZERO, None]) is None
    assert hull([ZERO, ZERO]) is ZERO
    assert hull([]) is None
    assert moved()([ZERO, None], NOTHING) is None
    assert moved()([ZERO, KEPT], NOTHING) is KEPT


def test_the_first_cause_is_told():
    assert moved()([UNSURE, SCALED], NOTHING).cause == "tanh"
    assert moved()([SCALED, SCALED], NOTHING).cause == ""


@pytest.mark.parametrize(
    ("number", "low"),
    [
        (0.0, 1.0),
        (0.001, 1.0),
        (-1e-07, 1.0),
        (np.inf, 1.0),
        (None, 1.0),
        (0.1, 0.0),
        (-2.0, 0.0),
        ([0.0, 0.1], 0.0),
    ],
)
def test_a_number_changes_what_has_a_unit_unless_it_is_small(number, low):
    found = moved()([SCALED, None], numbers(None, number))
    assert ends(found) == (low, 1.0)
    assert bool(found.cause) == (low < 1.0)
    assert moved()([UNSCALED, None], numbers(None, number)) is UNSCALED


def test_positions_and_flags_say_which_and_not_what():
    assert moved(0)([SCALED, FREE], numbers(None, None)) == SCALED
    assert moved(0)([SCALED, None], numbers(None, 3.0)) is SCALED
    assert ends(moved()([SCALED, FREE], NOTHING)) == (0.0, 1.0)


def test_what_flags_choose_among_has_its_own_unit_or_else_theirs():
    found = moved(1, 2)([UNSCALED, SCALED, ZERO], NOTHING)
    assert ends(found) == (1.0, 1.0)
    assert found.unscalings == UNSCALED.unscalings
    assert found.reads == SCALED.reads
    for values in ([None, None], [KEPT, None], [KEPT, KEPT]):
        found = moved(1, 2)([UNSCALED, *values], NOTHING)
        assert found.is_free
        assert not found.from_variable
        assert found.hides_inf  # an infinity is a flag like any other
        assert found.unscalings == UNSCALED.unscalings
    assert moved(1, 2)([UNSCALED, ZERO, ZERO], NOTHING) is ZERO
    assert moved(1, 2)([KEPT, None, None], NOTHING) is None


@pytest.mark.parametrize(
    ("units", "number", "agrees"),
    [
        ([SCALED, SCALED], None, True),
        ([SCALED, ZERO], None, True),
        ([SCALED, None], 0.0, True),
        ([SCALED, None], np.inf, True),
        ([SCALED, None], 0.1, False),
        ([SCALED, None], None, False),
        ([SCALED, KEPT], None, False),
        ([SCALED, FREE], None, False),
        ([FREE, None], 0.1, True),
        ([FREE, KEPT], None, True),
    ],
)
def test_flags_have_units(units, number, agrees):
    found = flag()(units, numbers(None, number))
    assert found.is_free
    assert found.hides_inf
    assert bool(found.cause) != agrees
    assert found.is_sure == agrees
    assert bool(moved(1, 2)([found, SCALED, None], NOTHING).cause) != agrees


def test_a_flag_of_numbers_is_a_number():
    assert flag()([None, None], NOTHING) is None
    assert flag()([ZERO, None], NOTHING) is None
    assert flag()([KEPT, None], NOTHING).is_weight


def test_who_chooses_by_what_is_finite_may_drop_an_infinity():
    finite = is_finite([SCALED], NOTHING)
    assert finite.replaces_inf
    assert moved(1, 2)([finite, SCALED, None], NOTHING).replaces_inf
    assert not is_finite([KEPT], NOTHING).replaces_inf
    assert is_finite([FREE], NOTHING).replaces_inf
    assert not is_finite([FREE._replace(hides_inf=True)], NOTHING).replaces_inf
    # Infinity times 0 is NaN.
    assert not product([finite, SCALED], NOTHING).replaces_inf
    assert zero_or(product)([SCALED, finite], NOTHING).replaces_inf


@pytest.mark.parametrize(
    ("powers", "units", "expected"),
    [
        ((1.0, 1.0), [SCALED, SCALED], (2.0, 2.0)),
        ((1.0, -1.0), [SCALED, SCALED], (0.0, 0.0)),
        ((1.0, -1.0), [None, SCALED], (-1.0, -1.0)),
        ((1.0, -1.0), [SCALED, UNSURE], (0.0, 1.0)),
        ((0.5,), [SCALED], (0.5, 0.5)),
        ((-1.0,), [UNSURE], (-1.0, 0.0)),
        ((None, 1.0), [FREE, SCALED], (1.0, 1.0)),
        ((None, 1.0), [SCALED, FREE], (0.0, 0.0)),
        ((0.0, 1.0), [SCALED, SCALED], (1.0, 1.0)),
    ],
)
def test_products_of_powers(powers, units, expected):
    assert ends(linear(*powers)(units, NOTHING)) == expected


def test_another_function_of_what_has_the_unit_is_unsure():
    assert linear(None, 1.0)([SCALED, FREE], NOTHING).cause
    assert not linear(None, 1.0)([FREE, SCALED], NOTHING).cause


def test_a_product_with_a_zero_is_a_zero_and_a_quotient_by_one_is_not():
    assert linear(1.0, 1.0)([ZERO, SCALED], NOTHING).is_zero
    assert linear(1.0, 1.0)([ZERO, None], NOTHING).is_zero
    assert linear(1.0, -1.0)([SCALED, ZERO], NOTHING) is SCALED
    assert linear(1.0, -1.0)([None, ZERO], NOTHING) is None
    assert linear(0.0)([ZERO], NOTHING) is None


def test_a_power_must_be_a_constant():
    assert ends(power([SCALED, None], numbers(None, 3.0))) == (3.0, 3.0)
    assert ends(power([SCALED, None], NOTHING)) == (0.0, 1.0)
    assert ends(power([None, SCALED], numbers(2.0, None))) == (0.0, 1.0)
    assert power([SCALED, ZERO], numbers(None, 0.0)).is_free


def test_a_determinant_has_as_many_factors_as_its_matrix_has_rows():
    assert ends(determinant([SCALED], Operands(width=lambda _: 3))) == (3.0, 3.0)
    assert ends(determinant([SCALED], NOTHING)) == (0.0, 1.0)


def test_what_a_variable_holds_is_no_weight_if_it_is_scaled():
    held = SCALED._replace(from_variable=True)
    for others in ([FREE], [UNSCALED], [KEPT]):
        assert ends(product([held, *others], NOTHING)) == (1.0, 1.0)
    assert ends(product([held, SCALED], NOTHING)) == (2.0, 2.0)


def test_a_gradient_is_linear_in_one():
    assert gradient([SCALED, FREE, None], NOTHING) == SCALED
    assert ends(gradient([SCALED, SCALED], NOTHING)) == (0.0, 1.0)
    assert gradient([ZERO, SCALED], NOTHING) is SCALED  # of a zero tanh has slope 1
    assert gradient([ZERO, None], NOTHING) is None


@pytest.mark.parametrize(
    ("keeps_scale", "number", "low"),
    [(True, 1e-3, 1.0), (True, 1.0, 0.0), (True, -1e-3, 0.0), (False, 1e-3, 0.0)],
)
def test_a_small_floor_is_no_bound(keeps_scale, number, low):
    found = bound(keeps_scale)([SCALED, None], numbers(None, number))
    assert ends(found) == (low, 1.0)
    assert found.hides_inf
    of_two = bound(keeps_scale)([SCALED, SCALED], NOTHING)
    assert ends(of_two) == (1.0, 1.0)


def test_a_bound_of_a_number_and_a_zero_is_a_number():
    assert bound(keeps_scale=True)([ZERO, None], numbers(None, 1.0)) is None
    assert ends(bound(keeps_scale=True)([SCALED, ZERO], NOTHING)) == (1.0, 1.0)


def test_what_is_rounded_depends_on_the_loss_scale():
    found = rounded(moved())([SCALED], NOTHING)
    assert ends(found) == (1.0, 1.0)
    assert found.cause == "rounding"
    assert rounded(moved())([UNSCALED], NOTHING) is UNSCALED
    quotient = rounded(linear(1.0, -1.0))
    assert quotient([SCALED, SCALED], NOTHING).is_sure
    assert not quotient([SCALED, None], NOTHING).is_sure


def test_together():
    assert ends(together([SCALED, SCALED], NOTHING)) == (1.0, 1.0)
    assert ends(together([SCALED, None], numbers(None, 0.0))) == (1.0, 1.0)
    for other in (None, FREE, KEPT):
        assert ends(together([SCALED, other], NOTHING)) == (0.0, 1.0)
    assert together([FREE, None], NOTHING).is_sure


def test_functions():
    assert ends(function()([SCALED], NOTHING)) == (0.0, 1.0)
    assert ends(function()([Unit(2.0, 2.0)], NOTHING)) == (0.0, 2.0)
    assert function()([FREE], NOTHING).is_free
    assert function()([ZERO], NOTHING) is None  # of a zero exp is 1
    assert function("exp")([SCALED], NOTHING).cause == "exp"


def test_a_sign_is_sure_of_what_is_sure():
    assert flag()([SCALED], NOTHING).is_sure
    assert ends(flag()([UNSURE], NOTHING)) == (0.0, 0.0)
    assert flag()([UNSURE], NOTHING).cause == "tanh"


def test_a_large_power_may_be_anything():
    found = linear(9.0)([SCALED], NOTHING)
    assert ends(found) == (-8.0, 8.0)
    assert "large power" in found.cause


def test_flags_alone():
    assert chosen(None, [None, KEPT]) is None
    assert chosen(SCALED, []) is SCALED
