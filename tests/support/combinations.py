"""Few of a test's combinations of parameters: conftest.py says which run when."""

import itertools


def covering(tests, size, before=()):
    """Returns the tests `before`, and so many others that they have what all have.

    That is each value of a parameter if `size` is 1, and any two values if it is 2.
    """
    sets = {test: _values(test, size) for test in tests}
    found, rest = list(before), [test for test in tests if test not in before]
    missing = set().union(*sets.values()).difference(*map(sets.get, found))
    while missing:
        found.append(max(rest, key=lambda test: len(missing & sets[test])))
        rest.remove(found[-1])
        missing -= sets[found[-1]]
    return found


def _values(test, size):
    """Returns all sets of so many values of a test's parameters: of fewer, of all.

    pytest names each value, and those that are given together by one name.
    """
    given = getattr(test, "callspec", None)
    values = [] if given is None else list(enumerate(given._idlist))
    return {*map(frozenset, itertools.combinations(values, min(size, len(values))))}
