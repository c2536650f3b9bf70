"""The units of an operation's results, by its rule.

The result of an operation that `table` does not name is unsure, unless its inputs have
exponent 0. If its name is that of a gradient, it is taken to be linear in the incoming
gradient.
"""

from __future__ import annotations

from typing import Optional

from lossscale.units.moves import NOTHING, READS, SAME, STARTS
from lossscale.units.rules import Rule, function, gradient
from lossscale.units.table import EACH, RULES
from lossscale.units.unit import KEPT, ZERO, Operands, Unit, Units


def result(kind: str, units: Units, operands: Operands) -> Optional[Unit]:
    """Returns the unit of an operation's first result, None if nothing is known.

    Args:
      kind: The operation's type.
      units: The units of its inputs.
      operands: The values and the widths of its inputs.
    """
    return _result(kind, rule_of(kind), units, operands)


def results(kind: str, units: Units, operands: Operands, count: int) -> Units:
    """Returns the units of all `count` results, an empty list if none has a unit."""
    if kind in READS and units[0] is None:
        return [KEPT] * count
    if not any(units) and kind not in STARTS:
        return []
    if kind == "IdentityN":
        return units
    rules = EACH.get(kind)
    if rules is None:
        return [result(kind, units, operands)] * count
    return [_result(kind, rule, units, operands) for rule in rules[:count]]


def _result(kind: str, rule: Rule, units: Units, operands: Operands) -> Optional[Unit]:
    if kind in STARTS:
        return _started(STARTS[kind], units, operands)
    if kind in NOTHING or not any(units):
        return None
    found = rule(units, operands)
    if found is None or found.is_zero:
        return found
    if found.is_scale and kind not in SAME:
        found = found._replace(is_scale=False)
    if found.is_free and found.reads:
        found = found._replace(sources=found.unscalings)
    return found


def _started(index: Optional[int], units: Units, operands: Operands) -> Optional[Unit]:
    """Returns the unit of an operation that makes zeros, or fills a tensor.

    Args:
      index: The position of the input that fills it. None: it makes zeros.
      units: The units of the inputs.
      operands: The values of the inputs.
    """
    if index is None or operands.float_of(index) == 0.0:
        return ZERO
    return units[index] if units else None


def rule_of(kind: str) -> Rule:
    """Returns the rule for an operation of this type."""
    rule = RULES.get(kind)
    if rule is None:
        is_gradient = "Grad" in kind or "Backprop" in kind
        unsure = function(f"{kind}, which may be no power of its input")
        rule = RULES[kind] = gradient if is_gradient else unsure
    return rule


def join(units: Units) -> Optional[Unit]:
    """Returns the unit of a value that is one of several, or made of some of them.

    A branch and a loop end so. The rule is that of TensorFlow 1's operation for it.
    """
    return result("Merge", units, Operands())
