"""What is left out of quick and slow tests only combines anew what they have."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from combinations import covering, left_out_though_named


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


HERE = str(Path("test_x.py").resolve())
NAMED = [
    Case(nodeid=f"tests/test_x.py::{name}", path=HERE)
    for name in ("test_a[1]", "test_a[2]", "test_a_b", "Of::test_c[1]", "Of::test_c[2]")
]


@pytest.mark.parametrize(
    ("argument", "keyword", "named"),
    [
        ("test_x.py::test_a[2]", "", [1]),
        ("test_x.py::test_a", "", []),  # its first combination runs
        ("test_x.py::Of", "", [3, 4]),
        ("test_x.py::Of::test_c", "", [3, 4]),
        ("test_x.py", "", []),
        ("test_y.py::test_a[2]", "", []),
        ("test_x.py", "a", []),
    ],
)
def test_what_is_named_runs(argument, keyword, named):
    runs = {NAMED[0]}
    found = left_out_though_named(NAMED, [argument], keyword, runs.__contains__)
    assert found == [NAMED[at] for at in named]
