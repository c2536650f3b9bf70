"""Few of a test's combinations of parameters: conftest.py says which run when."""

from __future__ import annotations

import itertools
from pathlib import Path


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


def left_out_though_named(tests, arguments, keyword, runs):
    """Returns tests of which none would run, though the command line names them.

    It names tests by a node id, or by a file and `-k`. Tests of which some run are only
    named by what they have in common, and their other combinations stay out.

    Args:
      tests: All that were collected, and that `-k` leaves.
      arguments: The command line's, each a path, or a path and a name behind "::".
      keyword: What `-k` was given, empty without.
      runs: Tells whether a test runs anyway.
    """
    found = []
    for argument in arguments:
        path, is_id, name = argument.partition("::")
        if not is_id and not (keyword and path.endswith(".py")):
            continue
        whole = str(Path(path).resolve())
        named = [
            test
            for test in tests
            if str(test.path) == whole and _is_within(test.nodeid, name)
        ]
        found += [] if any(map(runs, named)) else named
    return found


def _is_within(node_id, name):
    """Tells whether a test is the one of a name, or in a class or function of it."""
    own = node_id.partition("::")[2]
    return name in ("", own) or own.startswith((f"{name}[", f"{name}::"))


def _values(test, size):
    """Returns all sets of so many values of a test's parameters: of fewer, of all.

    pytest names each value, and those that are given together by one name.
    """
    given = getattr(test, "callspec", None)
    values = [] if given is None else list(enumerate(given._idlist))
    return {*map(frozenset, itertools.combinations(values, min(size, len(values))))}
