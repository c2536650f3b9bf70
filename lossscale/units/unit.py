"""A unit: which powers of the loss scale a value may have, and where it comes from.

Nothing here knows a graph or a tensor. An exponent is an interval: [1, 1] is sure and
[0, 1] is not. A zero has every exponent; the empty interval stands for it. A plain
number has no unit: None stands for that, and for a value of which nothing is known.
`Operands` answers what else a rule asks about the inputs.

```
None      a plain number, or nothing is known; within the rules
UNKNOWN   the same for code outside of the rules, which wants a Unit
ZERO      a zero: rules ignore it beside any other unit
FREE      exponent 0: unscaled
KEPT      what a variable holds: exponent 0, and any unit beside it decides
TRAINED   what a trained variable holds, so a weight
```
"""

from __future__ import annotations

import math
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from lossscale.runtime.aliases import Array
from lossscale.units.sources import NONE, Sources, reads, unscalings


class Unit(NamedTuple):
    """What is known of a value.

    Attributes:
      low: The least exponent that it may have.
      high: The greatest one.
      sources: The events that it comes from: the reads of the loss scale that it was
        multiplied with, and the unscalings, all of which must have been finite.
      from_variable: Whether it was computed from variables alone. Weights come from the
        gradients of earlier steps, so any other input of an operation decides.
      hides_inf: Whether it may be finite though a value that it comes from was not.
      is_scale: Whether it is the loss scale itself.
      cause: Why it depends on the loss scale beyond its exponent, for the warning.
        Empty: it does not.
      replaces_inf: Whether a flag of `is_finite` or the like chose its elements, so
        that others may have replaced the infinite ones.
      is_trained: Whether it was computed from trained variables alone. Trained
        variables hold weights. Another variable may hold unknown gradients: beside a
        value with a unit it counts as a number, which has none.
      parts: The units of the parts of a dataset's elements, if these have several.
    """

    low: float
    high: float
    sources: Sources = NONE
    from_variable: bool = False
    hides_inf: bool = False
    is_scale: bool = False
    cause: str = ""
    replaces_inf: bool = False
    is_trained: bool = False
    parts: Tuple[Optional[Unit], ...] = ()

    @property
    def reads(self) -> Sources:
        """The reads of the loss scale among its sources."""
        return reads(self.sources)

    @property
    def unscalings(self) -> Sources:
        """The unscalings among its sources."""
        return unscalings(self.sources)

    @property
    def is_sure(self) -> bool:
        """Whether it changes with the loss scale exactly as its exponent says."""
        return self.low == self.high and not self.cause

    @property
    def is_zero(self) -> bool:
        """Whether it is a zero, which has every exponent."""
        return self.low > self.high

    @property
    def is_free(self) -> bool:
        """Whether it has exponent 0."""
        return self.low == self.high == 0.0

    @property
    def is_weight(self) -> bool:
        """Whether a variable held it, and its exponent is 0."""
        return self.from_variable and self.is_free

    @property
    def is_plain_weight(self) -> bool:
        """Whether it is a weight that comes from no gradients that we know."""
        return self.is_weight and not self.unscalings


class Operands(NamedTuple):
    """The values and the widths of an operation's inputs, if they are known.

    Attributes:
      value: Takes an input's position. Returns the input as an array of numbers if it
        is a constant, else None.
      width: Takes an input's position. Returns the static size of its last axis, None
        if there is none.
    """

    value: Callable[[int], Optional[Array]] = lambda _: None
    width: Callable[[int], Optional[int]] = lambda _: None

    def float_of(self, index: int) -> Optional[float]:
        """Returns the number that all elements of an input are. None: not known."""
        value = self.value(index)
        if value is None or not value.size or np.any(value != value.flat[0]):
            return None
        return float(value.flat[0].real)


#: The numbers in several inputs. None: they are not known.
Numbers = List[Optional[Array]]
#: The unit of a value of which nothing is known, for code outside of the rules, which
#: have a None for it. It is neither scaled nor unscaled nor a zero.
UNKNOWN = Unit(math.nan, math.nan)
#: The unit of each input of an operation. None: it is a number, or nothing is known.
Units = Sequence[Optional[Unit]]

ZERO = Unit(math.inf, -math.inf)
FREE = Unit(0.0, 0.0)
#: The unit of what a variable holds, unless another one is known.
KEPT = Unit(0.0, 0.0, from_variable=True)
#: The unit of what a trained variable holds.
TRAINED = Unit(0.0, 0.0, from_variable=True, is_trained=True)
#: All exponents beyond this one count as the same, so that the sweep of a loop that
#: multiplies by the loss scale ends.
_LIMIT = 8.0


def hull(units: Units, cause: str = "") -> Optional[Unit]:
    """Returns the unit of a value that has one of these units, we do not know which.

    A zero is ignored. So is the value of a variable that is not trained, beside a unit
    that comes from no variable. A number (None) is ignored beside a unit, but a number
    and a zero make a number.
    """
    said = [unit for unit in units if unit is not None and not unit.is_zero]
    if not said:
        return ZERO if units and None not in units else None
    if not all(unit.from_variable for unit in said):
        said = [unit for unit in said if not unit.from_variable or unit.is_trained]
    if all(unit is said[0] for unit in said):
        return said[0]
    low = min(unit.low for unit in said)
    high = max(unit.high for unit in said)
    return made_of(said, low, high, cause if low != high else "")


def made_of(units: Sequence[Unit], low: float, high: float, cause: str = "") -> Unit:
    """Returns the unit of a value that was computed from values of these units."""
    if max(-low, high) > _LIMIT:
        low, high, cause = -_LIMIT, _LIMIT, "a large power of the loss scale"
    causes = [unit.cause for unit in units if unit.cause]
    return Unit(
        low,
        high,
        _union([unit.sources for unit in units]),
        all(unit.from_variable for unit in units),
        any(unit.hides_inf for unit in units),
        cause=causes[0] if causes else cause,
        replaces_inf=any(unit.replaces_inf for unit in units),
        is_trained=all(unit.is_trained for unit in units),
    )


def _union(sets: Sequence[Sources]) -> Sources:
    first = sets[0]
    for each in sets[1:]:
        first = first if each <= first else first | each
    return first


def widened(unit: Unit, cause: str) -> Unit:
    """Returns the unit with exponent 0 as one more possibility, and the cause."""
    return made_of([unit], min(unit.low, 0.0), max(unit.high, 0.0), cause)
