"""A unit: which powers of the loss scale a value may have, and where it comes from.

Nothing here knows a graph or a tensor. An exponent is an interval: [1, 1] is sure,
[0, 1] is not, and a zero, which has every exponent, is the empty one. Of a number
nothing is known: its unit is None. What else rules ask of inputs is `Operands`.
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from lossscale.units.sources import NONE, Sources, reads, unscalings


class Unit(NamedTuple):
    """What is known of a value.

    Attributes:
      low: The least exponent that it may have.
      high: The greatest one.
      sources: The events that it comes from: the reads of the loss scale that it is
        multiplied with, and the unscalings, all of which must have been finite.
      from_variable: Whether it was computed from variables alone. Weights come from the
        gradients of earlier steps, so any other input of an operation decides.
      hides_inf: Whether an infinity in what it comes from may not be seen in it.
      is_scale: Whether it is the loss scale itself.
      cause: Why it depends on the loss scale beyond its exponent, for the warning.
        Empty: it does not.
      replaces_inf: Whether `is_finite` or the like chose what is in it: what was not
        finite may have been replaced.
      is_trained: Whether it was computed from trained variables alone. They are
        weights, while another variable may hold gradients of which nothing is known:
        beside what has a unit it is a number, that has none.
      parts: Of a dataset whose elements have several parts: the unit of each.
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
    parts: Tuple[Any, ...] = ()

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
        """Whether its exponent is all that the loss scale does to it."""
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
        """Whether a variable held it, and no power of the loss scale is in it."""
        return self.from_variable and self.is_free

    @property
    def is_plain_weight(self) -> bool:
        """Whether it is a weight, and no gradients are known in it."""
        return self.is_weight and not self.unscalings


class Operands(NamedTuple):
    """What an operation's inputs are, their units aside.

    Attributes:
      value: Returns an input as an array of numbers, if it is a constant, else None.
      width: Returns the static size of the last axis of an input, None if there is
        none.
    """

    value: Callable[[int], Any] = lambda _: None
    width: Callable[[int], Optional[int]] = lambda _: None

    def float_of(self, index: int) -> Optional[float]:
        """Returns what all elements of an input are; None: it is not known."""
        value = self.value(index)
        if value is None or not value.size or np.any(value != value.flat[0]):
            return None
        return float(value.flat[0].real)


#: Nothing is known. Rules know nothing of a value by a None; who asks for a unit gets
#: this one, which is neither scaled nor unscaled nor a zero.
UNKNOWN = Unit(math.nan, math.nan)
#: What is known of each input of an operation. None: it is a number, or nothing is.
Units = Sequence[Optional[Unit]]

ZERO = Unit(math.inf, -math.inf)
FREE = Unit(0.0, 0.0)
#: What a variable holds, unless something else is known of it.
KEPT = Unit(0.0, 0.0, from_variable=True)
#: What a variable holds that is trained.
TRAINED = Unit(0.0, 0.0, from_variable=True, is_trained=True)
#: Exponents beyond this are not told apart, so that the sweep of a loop that multiplies
#: by the loss scale ends.
_LIMIT = 8.0


def hull(units: Units, cause: str = "") -> Optional[Unit]:
    """Returns the unit of a value that has one of these units, not known which.

    A zero has no say, and beside anything else neither has what a variable held, unless
    it is trained. Numbers have none beside a unit, but a number beside a zero is no
    zero.
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
    """Returns a unit that comes from others."""
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
    """Returns a unit that may have exponent 0 as well, with a cause."""
    return made_of([unit], min(unit.low, 0.0), max(unit.high, 0.0), cause)
