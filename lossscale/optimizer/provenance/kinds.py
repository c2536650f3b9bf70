"""What a gradient is, by its unit: scaled, unscaled, or not known to be either."""

from __future__ import annotations

import enum
from typing import Any, Iterable

import numpy as np

from lossscale.optimizer.provenance.events import Unscale
from lossscale.runtime.graphs import is_eager
from lossscale.units.unit import UNKNOWN, Unit


class Kind(enum.Enum):
    """What a gradient is, by its exponent."""

    SCALED = "scaled"
    UNSCALED = "unscaled"
    #: It may be either.
    UNSURE = "unsure"
    #: It has an exponent that no gradient has.
    WRONG = "wrong"
    #: Nothing is known of it, or it is a zero.
    UNKNOWN = "unknown"


def kind_of(unit: Unit, is_read_here: bool) -> Kind:
    """Returns what a gradient is: may its exponent be 0, 1, both or neither?

    Args:
      unit: Its unit.
      is_read_here: Whether the loss scale was read where the gradient was computed. If
        not, a gradient that was computed from weights may be of a loss that was scaled
        elsewhere.
    """
    is_from_elsewhere = unit.is_plain_weight and not is_read_here
    if unit is UNKNOWN or unit.is_zero or is_from_elsewhere:
        return Kind.UNKNOWN
    may_be_unscaled = unit.low <= 0.0 <= unit.high
    may_be_scaled = unit.low <= 1.0 <= unit.high
    if may_be_unscaled and may_be_scaled:
        return Kind.UNSURE
    if may_be_scaled:
        return Kind.SCALED
    return Kind.UNSCALED if may_be_unscaled else Kind.WRONG


def is_all_zero(value: Any, unit: Unit) -> bool:
    """Tells whether a gradient is known to be all zeros."""
    if value is None or unit.is_zero:
        return True
    return is_eager(value) and not np.any(value.numpy())


def overflow_may_be_lost(unit: Unit, unscalings: Iterable[Unscale]) -> bool:
    """Tells whether the only record of an overflow is a flag that cannot be read here.

    Args:
      unit: The unit of what is applied.
      unscalings: The unscalings that no step was decided with.
    """
    return unit.hides_inf and any(
        not (each.poisons or each.is_visible())
        for each in unscalings
        if each in unit.sources
    )


def inf_may_be_replaced(unit: Unit) -> bool:
    """Tells whether an infinity may have been replaced before anybody looked."""
    unscalings: Any = unit.unscalings
    return unit.replaces_inf and not any(each.was_checked for each in unscalings)
