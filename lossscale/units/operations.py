"""What is known of an operation's results, by its rule.

A type that `table` does not name is unsure, unless what goes in has exponent 0. What is
named as a gradient is linear in the incoming gradient.
"""

from __future__ import annotations

from typing import Optional

from lossscale.units.moves import NOTHING, READS, SAME, STARTS
from lossscale.units.rules import Rule, function, gradient
from lossscale.units.table import EACH, RULES
from lossscale.units.unit import KEPT, ZERO, Operands, Unit, Units


def result(kind: str, units: Units, operands: Operands) -> Optional[Unit]:
    """Returns what is known of the results of an operation, None if nothing is.

    Args:
      kind: The operation's type.
      units: What is known of its inputs.
      operands: What its inputs are besides.
    """
    return _result(kind, rule_of(kind), units, operands)


def results(kind: str, units: Units, operands: Operands, count: int) -> Units:
    """Returns what is known of each of the `count` results, nothing if of none."""
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
    """Returns the unit of zeros, or of what fills a tensor."""
    if index is None or operands.float_of(index) == 0.0:
        return ZERO
    return units[index] if units else None


def rule_of(kind: str) -> Rule:
    """Returns the rule for an operation of this type."""
    rule = RULES.get(kind)
    if rule is None:
        is_gradient = "Grad" in kind or "Backprop" in kind
        unsure = function(f"{kind}, which may be no power")
        rule = RULES[kind] = gradient if is_gradient else unsure
    return rule


def join(units: Units) -> Optional[Unit]:
    """Returns the unit of what is one of several, or made of some of them."""
    return result("Merge", units, Operands())
