"""The loss scale is a unit, as a metre is: which power of it does a value have?

The loss scale S has exponent 1, and so have a scaled loss and its gradients; `1 / S`
has -1, and what was unscaled has 0. One rule for each kind of operation hands exponents
on from its inputs to its outputs:

```
products      add         x * y, MatMul, convolutions
gradients     add         of operations, if one input alone has the unit; else unsure
quotients     subtract    x / y
powers        multiply    x**2, sqrt(x), 1 / x
bounds        minimum and maximum with a number: unsure, if x still has the unit and the
              number is no small floor
functions     exp, tanh, ...: unsure, if x still has the unit
signs         0           the sign of x is that of x / S
all others    keep        sums, reshaping, branches: unsure where they do not agree
```

Nothing here knows a graph or a tensor. An exponent is an interval: [1, 1] is sure,
[0, 1] is not, and a zero, which has every exponent, is the empty one.
"""

from __future__ import annotations

import math
from typing import Any, Callable, FrozenSet, NamedTuple, Optional, Sequence

NO_ORIGINS: FrozenSet[Any] = frozenset()


class Unit(NamedTuple):
    """What is known of a value.

    Attributes:
      low: The least exponent that it may have.
      high: The greatest one.
      readings: Where the loss scale was read that it is multiplied with.
      checks: The unscalings that it comes from: all of them must have been finite.
      is_kept: Whether it comes from what a variable held. Weights come from the
        gradients of steps before: such a value has no say beside any other.
      is_bounded: Whether an infinity in what it comes from may be hidden in it.
      is_scale: Whether it is the loss scale itself.
      cause: What made its exponent unsure.
    """

    low: float
    high: float
    readings: FrozenSet[Any] = NO_ORIGINS
    checks: FrozenSet[Any] = NO_ORIGINS
    is_kept: bool = False
    is_bounded: bool = False
    is_scale: bool = False
    cause: str = ""

    @property
    def is_sure(self) -> bool:
        """Whether there is one exponent that it can have."""
        return self.low == self.high

    @property
    def is_zero(self) -> bool:
        """Whether it is a zero, which has every exponent."""
        return self.low > self.high

    @property
    def is_free(self) -> bool:
        """Whether it has exponent 0: no loss scale changes it."""
        return self.low == self.high == 0.0


#: Nothing is known. Rules know nothing of a value by a None; who asks for a unit gets
#: this one, which is neither scaled nor unscaled nor a zero.
UNKNOWN = Unit(math.nan, math.nan)
#: What is known of each input of an operation. None: nothing is.
Units = Sequence[Optional[Unit]]
#: Returns the value of an input by its number, if it is a constant, else None.
Constant = Callable[[int], Optional[float]]
Rule = Callable[[Units, Constant], Optional[Unit]]

ZERO = Unit(math.inf, -math.inf)
FREE = Unit(0.0, 0.0)
#: What a variable holds, unless something else is known of it.
KEPT = Unit(0.0, 0.0, is_kept=True)
#: A constant up to this is a floor that keeps a division from being one by zero.
_SMALL_FLOOR = 1e-3
#: Beyond this power anything may be: loops that multiply by the loss scale end.
_LIMIT = 8.0


def hull(units: Units, cause: str = "") -> Optional[Unit]:
    """Returns what has one of several units, and it is not known which.

    What a variable held has no say beside anything else.
    """
    known = [unit for unit in units if unit is not None]
    if not all(unit.is_kept or unit.is_zero for unit in known):
        known = [unit for unit in known if not unit.is_kept]
    if not known:
        return None
    if all(unit is known[0] for unit in known):
        return known[0]
    low = min(unit.low for unit in known)
    high = max(unit.high for unit in known)
    found = _of(known, low, high, cause)
    # Zeros have no say in this, either.
    return found._replace(is_kept=any(unit.is_kept for unit in known))


def _of(units: Units, low: float, high: float, cause: str = "") -> Unit:
    """Returns a unit that comes from others."""
    known = [unit for unit in units if unit is not None]
    if max(-low, high) > _LIMIT:
        low, high, cause = -_LIMIT, _LIMIT, "a large power of the loss scale"
    causes = [unit.cause for unit in known if unit.cause]
    if low != high and not causes:
        causes = [cause]
    return Unit(
        low,
        high,
        _union([unit.readings for unit in known]),
        _union([unit.checks for unit in known]),
        all(unit.is_kept for unit in known),
        any(unit.is_bounded for unit in known),
        cause=causes[0] if causes and low != high else "",
    )


def _union(sets: Sequence[FrozenSet[Any]]) -> FrozenSet[Any]:
    first = sets[0]
    for each in sets[1:]:
        first = first if each <= first else first | each
    return first


def keep(units: Units, constant: Constant) -> Optional[Unit]:
    """Of what carries nothing takes no notice. A sum of unlike units is unsure."""
    del constant
    return hull(units, "what is scaled and what is not, together")


def product(units: Units, constant: Constant) -> Optional[Unit]:
    """A product, of as many as there are."""
    return linear(*[1.0] * len(units))(units, constant)


def multiply(units: Units, constant: Constant) -> Optional[Unit]:
    """A product of two, of which one may be a constant zero."""
    if any(u is None and constant(i) == 0.0 for i, u in enumerate(units)):
        return ZERO
    return product(units, constant)


def gradient(units: Units, constant: Constant) -> Optional[Unit]:
    """The gradient of an operation is linear in what comes from above."""
    known = [u for u in units if u is not None and not u.is_free]
    if len(known) > 1 and not any(unit.is_zero for unit in known):
        return function(units, constant)
    return product(units, constant)


def linear(*powers: float) -> Rule:
    """Returns the rule of a product of these powers of the inputs."""

    def rule(units: Units, constant: Constant) -> Optional[Unit]:
        del constant
        pairs = [(u, power) for u, power in zip(units, powers) if u is not None]
        if any(unit.is_zero for unit, _ in pairs):
            return ZERO
        # Weights, as a rule: they make no difference in a product.
        pairs = [(u, power) for u, power in pairs if not _is_weight(u)] or pairs
        if pairs == [(pairs[0][0], 1.0)]:
            return pairs[0][0]
        ends = [sorted((u.low * power, u.high * power)) for u, power in pairs]
        low, high = (sum(each) for each in zip(*ends))
        # An infinite factor is seen in the product.
        is_bounded = all(unit.is_bounded for unit, power in pairs if power > 0.0)
        found = _of([unit for unit, _ in pairs], low, high)
        return found._replace(is_bounded=is_bounded)

    return rule


def _is_weight(unit: Unit) -> bool:
    return unit.is_kept and unit.is_free


def power(units: Units, constant: Constant) -> Optional[Unit]:
    """A power, if its exponent is a constant."""
    exponent = constant(1)
    if exponent is None or units[0] is None:
        return function(units, constant)
    return linear(exponent)(units[:1], constant)


def bound(keeps_scale: bool) -> Rule:
    """Returns the rule of a minimum or maximum.

    Of one with a number it is not known which of the two it is. A floor keeps a
    division from being one by zero, and no loss scale is so small that it needs one.
    """

    def rule(units: Units, constant: Constant) -> Optional[Unit]:
        found = hull(units, "Minimum or Maximum")
        if found is None or found.is_zero:
            return found if found is None or None not in units else FREE
        missing = [i for i, unit in enumerate(units) if unit is None]
        if missing and not (found.is_free or (found.is_scale and keeps_scale)):
            value = constant(missing[0])
            is_floor = keeps_scale and value is not None and 0 <= value <= _SMALL_FLOOR
            if not (is_floor or value == 0.0):
                found = _widened(found, "Minimum or Maximum with a number")
        return found._replace(is_bounded=True)

    return rule


def function(units: Units, constant: Constant) -> Optional[Unit]:
    """A function of what has the unit is something else for each loss scale."""
    del constant
    found = hull(units)
    if found is None:
        return None
    if found.is_zero:  # what it makes of a zero may be any number, but always the same
        return FREE
    if not found.is_free:
        found = _widened(found, "a function that is no power")
    return found._replace(is_bounded=True)


def sign(units: Units, constant: Constant) -> Optional[Unit]:
    """The sign of what is scaled is the sign of what is not."""
    found = function(units, constant)
    if found is None or found.is_zero:
        return found
    return found._replace(low=0.0, high=0.0, cause="")


def angle(units: Units, constant: Constant) -> Optional[Unit]:
    """What depends on the ratio of two alone."""
    found = hull(units)
    is_ratio = found is not None and found.is_sure and None not in units
    return (sign if is_ratio else function)(units, constant)


def _widened(unit: Unit, cause: str) -> Unit:
    return _of([unit], min(unit.low, 0.0), max(unit.high, 0.0), cause)
