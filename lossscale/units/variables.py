"""What variables hold: the units that assignments leave in them."""

from __future__ import annotations

from typing import Any, Hashable, List, Optional

from lossscale.runtime import mode
from lossscale.units import sources
from lossscale.units.operations import join
from lossscale.units.rules import chosen
from lossscale.units.unit import Unit, Units

#: These change a variable, and keep what it held.
ADDS = {
    *("AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd"),
    *("ResourceScatterSub", "ResourceScatterUpdate", "ResourceScatterNdAdd"),
    *("ResourceScatterNdSub", "ResourceScatterNdUpdate", "AssignAdd", "AssignSub"),
    "ResourceStridedSliceAssign",
}
ASSIGNS = {"AssignVariableOp", "Assign", *ADDS}


def leave(table: Any, keys: List[Hashable], before: Units, after: Units) -> None:
    """Notes what a body leaves in the variables that it was given."""
    for key, old, new in zip(keys, before, after):
        if new != old:  # one name can stand at two inputs: what is new counts
            _set(table, key, new)


def assign(table: Any, key: Hashable, kind: str, units: Units) -> None:
    """Notes what an assignment leaves in the variable that a key names."""
    held, value = units[0], chosen(units[-1], units[1:-1])
    if held is not None and held.is_scale:
        return  # the loss scale's own variable: its rule may set it
    if value is not None and value.is_zero:
        if kind in ADDS:
            return
        value = None  # when what is traced now runs again, it may hold anything
    if kind in ADDS:
        value = _sum_of(held, value, join([held, value]))
    _set(table, key, None if value is None else as_held(value))


def as_held(value: Unit) -> Unit:
    """Returns the unit that a value has once a variable holds it."""
    # Of another run of a session nothing is known, and a check would run here anew.
    if mode.current().runs_parts:
        kept = value.reads
    else:
        kept = sources.in_variable(value.sources)
    return value._replace(sources=kept, from_variable=True, is_scale=False)


def _set(table: Any, key: Hashable, unit: Optional[Unit]) -> None:
    if unit is None:
        table.pop(key, None)
    else:
        table[key] = unit


def _sum_of(
    held: Optional[Unit], value: Optional[Unit], total: Optional[Unit]
) -> Optional[Unit]:
    """Returns the unit of a sum in a variable, in which an infinity may be hidden."""
    if not (held and value and total) or total.is_zero:
        return total
    if not (held.hides_inf or value.hides_inf):
        return total
    every = total.reads | held.unscalings | value.unscalings
    return total._replace(sources=every, hides_inf=True)
