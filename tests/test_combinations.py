"""What is left out of quick and slow tests only combines anew what they have."""

import itertools
from types import SimpleNamespace

from combinations import covering


class Case(SimpleNamespace):
    """A test as pytest collects it, so far as it is asked."""

    __hash__ = object.__hash__


def cases(*sizes):
    numbers = itertools.product(*map(range, sizes))
    ids = [list(map(str, each)) for each in numbers]
    return [Case(callspec=SimpleNamespace(_idlist=each)) for each in ids]


def seen(cases, *places):
    return {tuple(case.callspec._idlist[at] for at in places) for case in cases}


def test_quick_has_each_value_and_slow_any_two():
    every = cases(3, 2, 4, 2)
    quick = covering(every, 1)
    assert len(quick) == 4
    slow = covering(every, 2, quick)
    assert slow[:4] == quick
    assert len(slow) < 20
    for places in itertools.combinations(range(4), 2):
        assert seen(slow, *places) == seen(every, *places)
        assert seen(quick, places[0]) == seen(every, places[0])


def test_none_is_lost_of_those_with_one_parameter_or_none():
    for tests in (cases(5), [Case()]):
        assert covering(tests, 1) == tests
        assert covering(tests, 2, tests[:1]) == tests
