"""Which combinations of a test's parameters say something that others do not."""

from __future__ import annotations

import itertools
from collections import defaultdict


def left_over(items):
    """Returns tests that only combine what other tests of their function have, too.

    The others hold each value of each parameter: of three Kerases in three modes, three
    on a diagonal. Values that are given together, as a table's rows, are one.
    """
    found = []
    for group in _functions(items, {"slow", "every_combination"}):
        needed = _needed(group, set().union(*(values for _, values in group)))
        found.extend(item for item, values in group if values and item not in needed)
    return found


def beyond_pairs(items):
    """Returns slow tests without which any two values still are in one test.

    Only of tests with three parameters or more there are such. One that is skipped
    would be taken for one that has them: `some_impossible` keeps all of its function.
    """
    found = []
    for group in _functions(items, {"every_combination", "some_impossible"}):
        pairs = [(item, _pairs(values)) for item, values in group]
        quick = [values for item, values in pairs if not _marks(item) & {"slow"}]
        slow = [each for each in pairs if "slow" in _marks(each[0])]
        wanted = set().union(*(values for _, values in slow)).difference(*quick)
        needed = _needed(slow, wanted)
        found.extend(item for item, values in slow if values and item not in needed)
    return found


def _marks(item):
    return {mark.name for mark in item.iter_markers()}


def _functions(items, but):
    """Returns the tests of each function with their values, without those so marked."""
    functions = defaultdict(list)
    for item in items:
        if not _marks(item) & but:
            functions[function_of(item)].append((item, _values(item)))
    return functions.values()


def function_of(item):
    """Returns the name of a test's function, with its file."""
    return item.nodeid.partition("[")[0]


def _needed(group, wanted):
    """Returns few tests of a group that together have all that is wanted."""
    needed, rest = set(), list(group)
    while wanted:
        best = max(rest, key=lambda one: len(wanted & one[1]))
        wanted = wanted - best[1]
        needed.add(best[0])
        rest.remove(best)
    return needed


def _pairs(values):
    """Returns all sets of two values; of fewer, the one of all."""
    return set(map(frozenset, itertools.combinations(values, min(2, len(values)))))


def _values(item):
    parameters = getattr(item, "callspec", None)
    if parameters is None:
        return set()
    together = {name: name for name in parameters.params}
    for marker in item.iter_markers("parametrize"):
        names = marker.kwargs.get("argnames", marker.args[0] if marker.args else ())
        names = names.replace(",", " ").split() if isinstance(names, str) else names
        together.update(dict.fromkeys(names, names[0]))
    values = defaultdict(list)
    for name, value in parameters.params.items():
        values[together[name]].append(id(value))
    return {(name, *ids) for name, ids in values.items()}
