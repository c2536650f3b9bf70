"""What is remembered of each side of a branch, and for which later branches."""

from __future__ import annotations

import pytest

from lossscale.units.sides import Sides
from lossscale.units.unit import FREE, Unit

SCALED, EITHER, NUMBER = Unit(1.0, 1.0), Unit(0.0, 1.0), None


@pytest.fixture
def sides():
    """Of a branch with two results. The second is a number on the second side."""
    found = Sides()
    units, on_sides = [EITHER, FREE], [[SCALED, FREE], [FREE, NUMBER]]
    found.note("flag", ["first", "second"], units, on_sides)
    return found


@pytest.mark.parametrize(
    ("side", "expected"), [(0, [SCALED, FREE]), (1, [FREE, NUMBER])]
)
def test_a_later_branch_with_the_same_flag(sides, side, expected):
    assert sides.on(side, "flag", ["first", "second"], [EITHER, FREE]) == expected


def test_a_branch_with_another_flag(sides):
    units = [EITHER, FREE]
    assert sides.on(0, "other", ["first", "second"], units) == units


def test_values_that_no_branch_returned(sides):
    assert sides.on(1, "flag", ["else", "first"], [EITHER, EITHER]) == [EITHER, FREE]


def test_a_new_unit_counts_even_if_it_is_equal(sides):
    """Something was assigned to the variable whose handle the branch returned."""
    assert sides.on(0, "flag", ["first"], [Unit(0.0, 1.0)]) == [EITHER]
    assert sides.on(0, "flag", ["first"], [None]) == [None]


def test_a_number_on_either_side_stays_a_number(sides):
    sides.note("flag", ["third"], [NUMBER], [[FREE], [NUMBER]])
    assert sides.on(0, "flag", ["third"], [NUMBER]) == [NUMBER]
