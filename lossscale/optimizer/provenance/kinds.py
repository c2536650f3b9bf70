"""What a gradient's unit says of it: scaled, unscaled, or not known to be either."""

from __future__ import annotations

import enum
from typing import Iterable, Optional

import numpy as np

from lossscale.optimizer.provenance.events import Unscale, unscalings_of
from lossscale.runtime.aliases import Tensor
from lossscale.runtime.graphs import is_eager
from lossscale.units.unit import UNKNOWN, Unit


class Kind(enum.Enum):
    """What a gradient's exponent says of it."""

    #: The exponent may be 1, and cannot be 0.
    SCALED = "scaled"
    #: The exponent may be 0, and cannot be 1.
    UNSCALED = "unscaled"
    #: The exponent may be 0 or 1.
    UNSURE = "unsure"
    #: The exponent can be neither 0 nor 1, as if a loss was scaled twice.
    WRONG = "wrong"
    #: Nothing is known of the gradient, or it is a zero.
    UNKNOWN = "unknown"


def kind_of(unit: Unit, is_read_here: bool) -> Kind:
    """Returns a gradient's kind: may its exponent be 0, 1, both or neither?

    Args:
      unit: The gradient's unit.
      is_read_here: Whether the loss scale was read where the gradient was computed. If
        not, a gradient that was computed from weights may belong to a loss that was
        scaled elsewhere.
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


def is_all_zero(value: Optional[Tensor], unit: Unit) -> bool:
    """Tells whether a gradient is known to be all zeros."""
    if value is None or unit.is_zero:
        return True
    return is_eager(value) and not np.any(value.numpy())


def overflow_may_be_lost(unit: Unit, unscalings: Iterable[Unscale]) -> bool:
    """Tells whether the only record of an overflow is a flag that cannot be read here.

    Args:
      unit: The unit of a gradient that is applied.
      unscalings: The unscalings with which no step was decided.
    """
    return unit.hides_inf and any(
        not (each.poisons or each.is_visible())
        for each in unscalings
        if each in unit.sources
    )


def inf_may_be_replaced(unit: Unit) -> bool:
    """Tells whether an infinity may have been replaced before any check saw it."""
    return unit.replaces_inf and not any(
        each.was_checked for each in unscalings_of(unit)
    )
