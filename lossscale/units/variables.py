"""The units of what variables hold, after assignments."""

from __future__ import annotations

from typing import Hashable, List, MutableMapping, Optional

from lossscale.runtime import mode
from lossscale.units import sources
from lossscale.units.operations import join
from lossscale.units.rules import chosen
from lossscale.units.unit import Unit, Units

#: The units of values by their keys.
Table = MutableMapping[Hashable, Unit]

#: These operations change what a variable holds, but do not replace all of it.
ADDS = {
    *("AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd"),
    *("ResourceScatterSub", "ResourceScatterUpdate", "ResourceScatterNdAdd"),
    *("ResourceScatterNdSub", "ResourceScatterNdUpdate", "AssignAdd", "AssignSub"),
    "ResourceStridedSliceAssign",
}
ASSIGNS = {"AssignVariableOp", "Assign", *ADDS}


def leave(table: Table, keys: List[Hashable], before: Units, after: Units) -> None:
    """Notes the units that a body leaves in the variables that are its inputs.

    Args:
      table: Where they are noted.
      keys: The keys of the inputs.
      before: The inputs' units before the body ran.
      after: The inputs' units after it.
    """
    for key, old, new in zip(keys, before, after):
        if new != old:  # if one key stands at two inputs, the new unit counts
            _set(table, key, new)


def assign(table: Table, key: Hashable, kind: str, units: Units) -> None:
    """Notes the unit that an assignment leaves in a variable.

    Args:
      table: Where it is noted.
      key: The variable's key.
      kind: The assignment's type, one of `ASSIGNS`.
      units: The units of its inputs: the variable, positions, and the new value.
    """
    held, value = units[0], chosen(units[-1], units[1:-1])
    if held is not None and held.is_scale:
        return  # the loss scale's own variable, which its own rule may set
    if value is not None and value.is_zero:
        if kind in ADDS:
            return
        value = None  # when this trace runs again, the variable may hold anything
    if kind in ADDS:
        value = _sum_of(held, value, join([held, value]))
    _set(table, key, None if value is None else as_held(value))


def as_held(value: Unit) -> Unit:
    """Returns the unit that a value has once a variable holds it."""
    # A session's earlier run may have made the value: we do not know that run, and its
    # checks would run again in this one.
    if mode.current().runs_parts:
        kept = value.reads
    else:
        kept = sources.in_variable(value.sources)
    return value._replace(sources=kept, from_variable=True, is_scale=False)


def _set(table: Table, key: Hashable, unit: Optional[Unit]) -> None:
    if unit is None:
        table.pop(key, None)
    else:
        table[key] = unit


def _sum_of(
    held: Optional[Unit], value: Optional[Unit], total: Optional[Unit]
) -> Optional[Unit]:
    """Returns the unit of a sum in a variable.

    If one of its terms may hide an infinity, so may the sum, which then keeps the
    unscalings of both terms.
    """
    if not (held and value and total) or total.is_zero:
        return total
    if not (held.hides_inf or value.hides_inf):
        return total
    every = total.reads | held.unscalings | value.unscalings
    return total._replace(sources=every, hides_inf=True)
