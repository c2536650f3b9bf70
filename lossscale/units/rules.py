"""The loss scale is a unit, as a metre is: which power of it does a value have?

The loss scale S has exponent 1, and so have a scaled loss and its gradients; `1 / S`
has -1, and what was unscaled has 0. One rule for each kind of operation hands exponents
on from its inputs to its outputs:

```
products      add         x * y, MatMul, convolutions
quotients     subtract    x / y
powers        multiply    x**2, sqrt(x), 1 / x
gradients     add         of operations, if one input alone has the unit; else unsure
sums, moves   keep        reshaping, branches too; unsure where inputs disagree, or a
                          number is among them
flags         0           comparisons, signs, positions: depend on S where inputs
                          disagree, or what has the unit is compared with a number
choices       keep        `where(flag, x, y)`: that of x and y; of numbers, the flag's
bounds        minimum and maximum with a number: unsure, if x still has the unit and the
              number is no small floor
rounding      keep        but depends on S, if x still has the unit
functions     exp, tanh, ...: unsure, if x still has the unit. All others, too
```

A rule that is sure holds for every input: at S and at 2 S the results have that ratio.
`tests/units/test_every_operation.py` holds each against experiment.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np

from lossscale.units.unit import (
    FREE,
    ZERO,
    Operands,
    Unit,
    Units,
    hull,
    made_of,
    widened,
)

Rule = Callable[[Units, Operands], Optional[Unit]]

#: A constant up to this is a floor that keeps a division from being one by zero.
_SMALL_FLOOR = 1.01e-3  # 1e-3, as float16 rounds it, too
#: Returns the positions of some of so many inputs.
Positions = Callable[[int], Sequence[int]]

_TOGETHER = "what is scaled and what is not, together"
_COMPARED = "a comparison of what is scaled with what is not"
_FUNCTION = "a function that is no power"


def moved(*values: int) -> Rule:
    """Returns the rule of what adds up, moves or chooses among some of its inputs.

    Its other inputs, flags and positions, say which. Shapes are such, too.

    Args:
      *values: The positions of those inputs. None at all: all of them.
    """
    return moves(lambda count: values or range(count))


def moves(positions: Positions) -> Rule:
    """Returns that rule, given what returns the positions of so many inputs."""

    def rule(units: Units, operands: Operands) -> Optional[Unit]:
        values = positions(len(units))
        found = hull([units[i] for i in values], _TOGETHER)
        if found is not None and not (found.is_free or found.is_zero):
            numbers = _numbers(units, operands, values)
            if any(np.any(np.abs(n) > _SMALL_FLOOR) for n in numbers if n is not None):
                found = widened(found, _TOGETHER)
        return chosen(found, [u for i, u in enumerate(units) if i not in values])

    return rule


def _numbers(units: Units, operands: Operands, values: Sequence[int]) -> List[Any]:
    """Returns what inputs are of which nothing is known, less those without a unit.

    A zero and an infinity are the same in every unit. None: it is not known.
    """
    numbers = [operands.value(i) for i in values if units[i] is None]
    return [n if n is None else n[np.isfinite(n) & (n != 0)] for n in numbers]


def chosen(found: Optional[Unit], flags: Units) -> Optional[Unit]:
    """Returns the unit of what flags or positions choose among values with a unit.

    Args:
      found: That of the values. None: they are numbers, and only the flags tell.
      flags: Those of the flags.
    """
    known = [u for u in flags if u is not None and not u.is_zero]
    known = [u for u in known if not u.is_plain_weight]
    if not known or (found is not None and found.is_zero):
        return found
    flag = made_of(known, 0.0, 0.0)._replace(hides_inf=True)
    if not all(u.is_free for u in known):
        flag = flag._replace(cause=flag.cause or _COMPARED)
    if found is None or found.is_weight:
        return flag
    return found._replace(
        sources=found.sources | flag.unscalings,
        cause=found.cause or flag.cause,
        replaces_inf=found.replaces_inf or flag.replaces_inf,
    )


def flag(*values: int) -> Rule:
    """Returns the rule of what depends on the ratios of some of its inputs alone.

    Comparisons, signs, positions. No loss scale changes them if their inputs agree.
    """

    def rule(units: Units, operands: Operands) -> Optional[Unit]:
        among = values or range(len(units))
        said = [u for u in (units[i] for i in among) if u is not None]
        said = [u for u in said if not u.is_zero]
        if not said:
            return None
        found = made_of(said, 0.0, 0.0)._replace(hides_inf=True)
        if _agree(said) and not _is_compared(said, _numbers(units, operands, among)):
            return found
        return found._replace(cause=found.cause or _COMPARED)

    return rule


def _agree(said: Sequence[Unit]) -> bool:
    return len({(unit.low, unit.high) for unit in said}) == 1


def _is_compared(said: Sequence[Unit], numbers: List[Any]) -> bool:
    """Tells whether what has a unit stands beside a number that has none."""
    return not said[0].is_free and any(n is None or n.size for n in numbers)


def is_finite(units: Units, operands: Operands) -> Optional[Unit]:
    """Whether something is finite. Who chooses by it may drop what was not."""
    (unit,), found = units, flag()(units, operands)
    if unit is None or found is None or found.from_variable:
        return found
    # A flag moved it? `tf.recompute_grad` lets all depend on what comes from above.
    return found._replace(replaces_inf=not (unit.is_free and unit.hides_inf))


def linear(*powers: Optional[float]) -> Rule:
    """Returns the rule of a product of these powers of the inputs.

    A power that is None is another function of that input.
    """

    def rule(units: Units, operands: Operands) -> Optional[Unit]:
        del operands
        pairs = [(u, power) for u, power in zip(units, powers) if u is not None]
        if any(unit.is_zero and (power or 0.0) > 0.0 for unit, power in pairs):
            return ZERO
        pairs = [(u, power) for u, power in pairs if not u.is_zero]
        # Weights, as a rule: they make no difference in a product.
        pairs = [(u, power) for u, power in pairs if not u.is_weight] or pairs
        if len(pairs) == 1 and pairs[0][1] == 1.0:
            return pairs[0][0]
        return _multiplied(pairs) if pairs else None

    return rule


def _multiplied(pairs: Sequence[Tuple[Unit, Optional[float]]]) -> Unit:
    ends = [sorted((u.low * (p or 0.0), u.high * (p or 0.0))) for u, p in pairs]
    low, high = (round(sum(each), 6) for each in zip(*ends))  # 1/3 is float32's
    found = made_of([unit for unit, _ in pairs], low, high)
    if any(power is None and not unit.is_free for unit, power in pairs):
        found = widened(found, _FUNCTION)
    # An infinite factor is seen in the product.
    factors = [unit for unit, power in pairs if power is None or power > 0.0]
    return found._replace(
        hides_inf=all(unit.hides_inf for unit in factors),
        replaces_inf=bool(factors) and all(unit.replaces_inf for unit in factors),
    )


def product(units: Units, operands: Operands) -> Optional[Unit]:
    """A product, of as many as there are."""
    return linear(*[1.0] * len(units))(units, operands)


def zero_or(rule: Rule) -> Rule:
    """Returns the rule of what is 0 where an input is 0, whatever the others are."""

    def zero_or_that(units: Units, operands: Operands) -> Optional[Unit]:
        found = rule(units, operands)
        if found is None or found.is_zero:
            return found
        replaces_inf = any(unit is not None and unit.replaces_inf for unit in units)
        return found._replace(hides_inf=True, replaces_inf=replaces_inf)

    return zero_or_that


def gradient(units: Units, operands: Operands) -> Optional[Unit]:
    """The gradient of an operation is linear in what comes from above."""
    # A zero need not be what comes from above: of a zero tanh has the slope 1.
    said = [None if u is None or u.is_zero else u for u in units]
    scaled = [u for u in said if u is not None and not u.is_free]
    return (function() if len(scaled) > 1 else product)(said, operands)


def ones(units: Units, operands: Operands) -> Optional[Unit]:
    """Ones in the shape of what has a unit: they have none, and that is known."""
    found = flag()(units, operands)
    if found is None or found.from_variable:
        return found
    return FREE._replace(sources=found.unscalings)


def power(units: Units, operands: Operands) -> Optional[Unit]:
    """A power, if its exponent is a constant."""
    exponent = operands.float_of(1)
    if exponent is None or units[0] is None or units[1] not in (None, ZERO):
        return function()(units, operands)
    return linear(exponent)(units[:1], operands)


def determinant(units: Units, operands: Operands) -> Optional[Unit]:
    """A product of as many as a matrix has rows."""
    width = operands.width(0)
    rule = function() if width is None else linear(float(width))
    return rule(units, operands)


def bound(keeps_scale: bool) -> Rule:
    """Returns the rule of a minimum or maximum.

    Of one with a number it is not known which of the two it is. A floor keeps a
    division from being one by zero, and no loss scale is so small that it needs one.
    """

    def rule(units: Units, operands: Operands) -> Optional[Unit]:
        found = hull(units, "Minimum or Maximum")
        if found is None or found.is_zero:
            return found
        missing = [i for i, unit in enumerate(units) if unit is None]
        if missing and not (found.is_free or (found.is_scale and keeps_scale)):
            value = operands.float_of(missing[0])
            largest = _SMALL_FLOOR if keeps_scale else 0.0
            if value is None or not 0 <= value <= largest:
                found = widened(found, "Minimum or Maximum with a number")
        return found._replace(hides_inf=True)

    return rule


def rounded(rule: Rule) -> Rule:
    """Returns the rule of what is rounded: to numbers that no loss scale knows."""

    def rounds(units: Units, operands: Operands) -> Optional[Unit]:
        found = rule(units, operands)
        if found is None or found.is_zero or found.is_free:
            return found
        return found._replace(cause=found.cause or "rounding", hides_inf=True)

    return rounds


def together(units: Units, operands: Operands) -> Optional[Unit]:
    """What has the unit of all of its inputs, if they agree: a remainder."""
    found = hull(units, _TOGETHER)
    if found is None or found.is_zero:
        return found
    said = [unit for unit in units if unit is not None and not unit.is_zero]
    if not _agree(said) or _is_compared(
        said, _numbers(units, operands, range(len(units)))
    ):
        found = widened(found, _TOGETHER)
    return found._replace(hides_inf=True)


def function(cause: str = _FUNCTION) -> Rule:
    """Returns the rule of what is something else for each loss scale.

    What it makes of a zero may be any number.
    """

    def rule(units: Units, operands: Operands) -> Optional[Unit]:
        del operands
        found = hull(units)
        if found is None or found.is_zero:
            return None
        if not found.is_free:
            found = widened(found, cause)
        return found._replace(hides_inf=True)

    return rule
