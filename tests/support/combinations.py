"""Which combinations of a test's parameters say something that others do not."""

from __future__ import annotations

from collections import defaultdict


def left_over(items):
    """Returns tests that only combine what other tests of their function have, too.

    The others hold each value of each parameter: of three Kerases in three modes, three
    on a diagonal. Values that are given together, as a table's rows, are one.
    """
    functions = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if not marks & {"slow", "every_combination"}:
            functions[item.nodeid.partition("[")[0]].append((item, _values(item)))
    found = []
    for group in functions.values():
        wanted = set().union(*(values for _, values in group))
        while wanted:
            best = max(group, key=lambda one: len(wanted & one[1]))
            wanted -= best[1]
            group.remove(best)
        found.extend(item for item, values in group if values)
    return found


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
