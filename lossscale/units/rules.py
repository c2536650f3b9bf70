"""The loss scale is a unit, as a metre is: which power of it does a value have?

The loss scale S has exponent 1, and so have a scaled loss and its gradients; `1 / S`
has -1, and unscaled gradients have 0. A value "has the unit" if its exponent is not 0.
One rule for each kind of operation computes the outputs' exponents from the inputs':

```
products      add         x * y, MatMul, convolutions
quotients     subtract    x / y
powers        multiply    x**2, sqrt(x), 1 / x
gradients     add         of operations, if only one input has the unit; else unsure
sums, moves   keep        reshaping, branches too; unsure if inputs disagree, or one of
                          them is a number
flags         0           comparisons, signs, positions: depend on S if inputs disagree,
                          or one has the unit and is compared with a number
choices       keep        `where(flag, x, y)`: as x and y; of two numbers, as the flag
bounds        keep        minimum, maximum; unsure if x has the unit and the other is a
                          number, unless that is a small floor
rounding      keep        but the result depends on S, if x has the unit
functions     0           exp, tanh, ... and operations that the table does not list;
                          unsure if x has the unit
```

A sure exponent is right for every input: the results at S and at 2 S have that ratio.
`tests/units/test_every_operation.py` compares each rule with experiment.
"""

from __future__ import annotations

from typing import Callable, Optional, Sequence, Tuple

import numpy as np

from lossscale.units.unit import (
    FREE,
    ZERO,
    Numbers,
    Operands,
    Unit,
    Units,
    hull,
    made_of,
    widened,
)

Rule = Callable[[Units, Operands], Optional[Unit]]
#: A constant of at most this size is a floor that prevents a division by zero.
_SMALL_FLOOR = 1.01e-3  # 1e-3, also where float16 rounds it up
#: Takes how many inputs there are. Returns the positions of some of them.
Positions = Callable[[int], Sequence[int]]

_TOGETHER = "scaled and unscaled values together"
_COMPARED = "a comparison of a scaled value with an unscaled one"
_FUNCTION = "a function that is no power of its input"


def moved(*values: int) -> Rule:
    """Returns the rule of operations that add up, move or choose among some inputs.

    `values` are their positions. None given: all inputs. The other inputs (flags,
    positions, shapes) say which elements.
    """
    return moves(lambda count: values or range(count))


def moves(positions: Positions) -> Rule:
    """Returns the rule of `moved` if the positions depend on the number of inputs."""

    def rule(units: Units, operands: Operands) -> Optional[Unit]:
        values = positions(len(units))
        found = hull([units[i] for i in values], _TOGETHER)
        if found is not None and not (found.is_free or found.is_zero):
            numbers = _numbers(units, operands, values)
            if any(np.any(np.abs(n) > _SMALL_FLOOR) for n in numbers if n is not None):
                found = widened(found, _TOGETHER)
        return chosen(found, [u for i, u in enumerate(units) if i not in values])

    return rule


def _numbers(units: Units, operands: Operands, values: Sequence[int]) -> Numbers:
    """Returns the numbers in inputs that have no unit. None: they are not known.

    Zeros and infinities are left out, as they are the same in every unit.
    """
    numbers = [operands.value(i) for i in values if units[i] is None]
    return [n if n is None else n[np.isfinite(n) & (n != 0)] for n in numbers]


def chosen(found: Optional[Unit], flags: Units) -> Optional[Unit]:
    """Returns the unit of what flags or positions choose among some values.

    Args:
      found: The unit of the values. None: they are numbers, and only the flags count.
      flags: The units of the flags.
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
    """Returns the rule of operations that depend only on ratios of some inputs.

    These are comparisons, signs and positions. If the inputs have one exponent, no loss
    scale changes the result. `values` are their positions. None given: all inputs.
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


def _is_compared(said: Sequence[Unit], numbers: Numbers) -> bool:
    """Tells whether a value that has the unit stands beside a number without one."""
    return not said[0].is_free and any(n is None or n.size for n in numbers)


def is_finite(units: Units, operands: Operands) -> Optional[Unit]:
    """The rule of `is_finite` and its like. A choice by it may drop infinite values."""
    (unit,), found = units, flag()(units, operands)
    if unit is None or found is None or found.from_variable:
        return found
    # A value of exponent 0 that hides infinities may depend on a gradient only through
    # a flag, as every value within `tf.recompute_grad` does.
    return found._replace(replaces_inf=not (unit.is_free and unit.hides_inf))


def linear(*powers: Optional[float]) -> Rule:
    """Returns the rule of a product of these powers of the inputs.

    None in place of a power: another function of that input.
    """

    def rule(units: Units, operands: Operands) -> Optional[Unit]:
        del operands
        pairs = [(u, power) for u, power in zip(units, powers) if u is not None]
        if any(unit.is_zero and (power or 0.0) > 0.0 for unit, power in pairs):
            return ZERO
        pairs = [(u, power) for u, power in pairs if not u.is_zero]
        # As a rule these are weights. In a product they make no difference.
        pairs = [(u, power) for u, power in pairs if not u.is_weight] or pairs
        if len(pairs) == 1 and pairs[0][1] == 1.0:
            return pairs[0][0]
        return _multiplied(pairs) if pairs else None

    return rule


def _multiplied(pairs: Sequence[Tuple[Unit, Optional[float]]]) -> Unit:
    ends = [sorted((u.low * (p or 0.0), u.high * (p or 0.0))) for u, p in pairs]
    low, high = (round(sum(each), 6) for each in zip(*ends))  # 1/3 is in float32
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
    """The rule of the product of all inputs."""
    return linear(*[1.0] * len(units))(units, operands)


def zero_or(rule: Rule) -> Rule:
    """Returns the rule of results that are 0 where an input is 0, else as by `rule`."""

    def zero_or_that(units: Units, operands: Operands) -> Optional[Unit]:
        found = rule(units, operands)
        if found is None or found.is_zero:
            return found
        replaces_inf = any(unit is not None and unit.replaces_inf for unit in units)
        return found._replace(hides_inf=True, replaces_inf=replaces_inf)

    return zero_or_that


def gradient(units: Units, operands: Operands) -> Optional[Unit]:
    """The rule of an operation's gradient, linear in the incoming gradient."""
    # A zero may be another input than the incoming gradient: tanh has slope 1 at zero.
    said = [None if u is None or u.is_zero else u for u in units]
    scaled = [u for u in said if u is not None and not u.is_free]
    return (function() if len(scaled) > 1 else product)(said, operands)


def ones(units: Units, operands: Operands) -> Optional[Unit]:
    """The rule of ones in the shape of an input: their exponent is surely 0."""
    found = flag()(units, operands)
    if found is None or found.from_variable:
        return found
    return FREE._replace(sources=found.unscalings)


def power(units: Units, operands: Operands) -> Optional[Unit]:
    """The rule of a power; unsure, unless the power is a constant."""
    exponent = operands.float_of(1)
    if exponent is None or units[0] is None or units[1] not in (None, ZERO):
        return function()(units, operands)
    return linear(exponent)(units[:1], operands)


def determinant(units: Units, operands: Operands) -> Optional[Unit]:
    """The rule of a determinant: a product with as many factors as there are rows."""
    width = operands.width(0)
    rule = function() if width is None else linear(float(width))
    return rule(units, operands)


def bound(keeps_scale: bool) -> Rule:
    """Returns the rule of a minimum or maximum.

    Beside a number, the result may be either of the two. A small floor is different: it
    only prevents a division by zero. `keeps_scale` is True of a maximum: the loss scale
    and a floor make the loss scale, which is never so small that it needs one.
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
    """Returns the rule of rounding a result of `rule`. The steps have no unit."""

    def rounds(units: Units, operands: Operands) -> Optional[Unit]:
        found = rule(units, operands)
        if found is None or found.is_zero or found.is_free:
            return found
        return found._replace(cause=found.cause or "rounding", hides_inf=True)

    return rounds


def together(units: Units, operands: Operands) -> Optional[Unit]:
    """The rule of remainders and the like: the inputs' unit, if they all agree."""
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
    """Returns the rule of functions that are no powers of their inputs.

    Such a function may turn a zero into any number. Warnings name the `cause`.
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
