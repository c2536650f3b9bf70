"""What variables hold: the units that assignments leave in them."""

from __future__ import annotations

from typing import Any, FrozenSet, Hashable, List, Optional

from lossscale.runtime import mode
from lossscale.units.operations import join
from lossscale.units.rules import chosen
from lossscale.units.unit import NO_ORIGINS, Unit, Units

READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd"}
#: What a variable holds afterwards, with what it held before.
ADDS = {
    *("AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd"),
    *("ResourceScatterSub", "ResourceScatterUpdate", "ResourceScatterNdAdd"),
    *("ResourceScatterNdSub", "ResourceScatterNdUpdate", "AssignAdd", "AssignSub"),
    "ResourceStridedSliceAssign",
}
ASSIGNS = {"AssignVariableOp", "Assign"}
#: How many unscalings are kept of what a variable sums up, the last ones.
_CHECKS = 64


def leave(table: Any, keys: List[Hashable], before: Units, after: Units) -> None:
    """Notes what a body leaves in the variables that it was given."""
    for key, old, new in zip(keys, before, after):
        if new == old:
            continue  # one name can stand at two inputs: what is new counts
        if new is None:
            table.pop(key, None)
        else:
            table[key] = new


def assign(table: Any, key: Hashable, kind: str, units: Units) -> None:
    """Notes what an assignment leaves in the variable that a key names."""
    held, value = units[0], chosen(units[-1], units[1:-1])
    if held is not None and held.is_scale:
        return  # the loss scale's own variable: its rule may set it
    if value is not None and value.is_zero:
        if kind in ADDS:
            return
        value = None  # it may hold anything when what is traced now runs again
    if kind in ADDS:
        value = _sum_of(held, value, join([held, value]))
    if value is None:
        table.pop(key, None)
    else:
        checks = _kept_checks(value.checks)
        table[key] = value._replace(checks=checks, is_kept=True, is_scale=False)


def _sum_of(
    held: Optional[Unit], value: Optional[Unit], total: Optional[Unit]
) -> Optional[Unit]:
    """Returns the unit of a sum in a variable, in which an infinity may be hidden."""
    if held is None or value is None or total is None or total.is_zero:
        return total
    if not (held.is_bounded or value.is_bounded):
        return total
    return total._replace(checks=held.checks | value.checks, is_bounded=True)


def still_open(checks: FrozenSet[Any]) -> FrozenSet[Any]:
    """Returns the unscalings that a value carries on: not those that are settled."""
    if len(checks) < 2 or any(isinstance(each, int) for each in checks):
        return checks  # within a function numbers stand for those of its inputs
    last = max(each.number for each in checks)
    return frozenset(each for each in checks if not each.is_settled_at(last))


def _kept_checks(checks: FrozenSet[Any]) -> FrozenSet[Any]:
    """Returns the unscalings that what a variable holds is known to come from."""
    # Of another run of a session nothing is known, and a check would run here anew.
    return NO_ORIGINS if checks and mode.current().runs_parts else latest(checks)


def latest(checks: FrozenSet[Any]) -> FrozenSet[Any]:
    """Returns the last of the unscalings that a variable sums up, if they are many."""
    checks = still_open(checks)
    if len(checks) <= _CHECKS:
        return checks
    ordered = sorted(checks, key=lambda each: getattr(each, "number", 0))
    return frozenset(ordered[-_CHECKS:])
