"""What is left out of quick and slow tests only combines anew what they have."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from combinations import covering


class Case(SimpleNamespace):
    """A test as pytest collects it, so far as it is asked."""

    __hash__ = object.__hash__


SIZES = (3, 2, 4, 2)
CASES = [
    Case(callspec=SimpleNamespace(_idlist=list(map(str, numbers))))
    for numbers in itertools.product(*map(range, SIZES))
]


def seen(cases, *places):
    return {tuple(case.callspec._idlist[at] for at in places) for case in cases}


def test_quick_has_each_value_and_slow_any_two():
    quick = covering(CASES, 1)
    assert len(quick) == 4
    for at, size in enumerate(SIZES):
        assert len(seen(quick, at)) == size
    slow = covering(CASES, 2, quick)
    assert slow[:4] == quick
    assert len(slow) < 20
    for one, other in itertools.combinations(range(4), 2):
        assert len(seen(slow, one, other)) == SIZES[one] * SIZES[other]


def test_none_is_lost_of_those_with_one_parameter_or_none():
    one = [Case(callspec=SimpleNamespace(_idlist=[str(row)])) for row in range(5)]
    for tests in (one, [Case()]):
        assert covering(tests, 1) == tests
        assert covering(tests, 2, tests[:1]) == tests
