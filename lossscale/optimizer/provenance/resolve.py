"""Are these gradients still scaled? What divides them, and what is known of them.

```
a gradient of exponent 1     is divided by the loss scale that multiplied its loss
                       0     is applied as it is
             either, unsure  as this Keras's own wrapper would, and one warning says so
a zero, or nothing is known  as the rest of the list
```

Nothing is known of what came through NumPy, from another process, or as an argument of
a function. If that is true of a whole list, the convention of the Keras at hand holds:
Keras 3's own wrapper divides in `apply`, Keras 2's does not.
"""

from __future__ import annotations

import copy
from typing import Any, Dict, List, NamedTuple, Optional, Set

from lossscale.gradients.faults import Check
from lossscale.gradients.packing import as_they_are
from lossscale.optimizer import advice
from lossscale.optimizer.provenance.exponents import Unit
from lossscale.optimizer.provenance.kinds import Kind, hides, is_free, is_zero, kind_of
from lossscale.optimizer.provenance.ledger import ledger_of
from lossscale.optimizer.provenance.sweep import values_of
from lossscale.optimizer.provenance.timeline import Reading
from lossscale.optimizer.provenance.unscalings import (
    Unscaling,
    before_division,
    earlier_check,
)
from lossscale.optimizer.sharing import group_of
from lossscale.optimizer.unscaling import unscale_and_check
from lossscale.runtime import replicas
from lossscale.runtime.graphs import are_arguments, current_graph
from lossscale.scales.base import LossScale


class HandedIn(NamedTuple):
    """Gradients that are to be applied, and all that is known of them.

    Attributes:
      grads: The gradients; some may be None.
      divisors: What each is still to be divided by, a `float32` tensor of shape `[]`.
        None: it is unscaled.
      earlier: The check of when they were unscaled. None: there was none.
      is_checked: Whether nobody has changed them since, so that `earlier` says all.
      losses: The unscaled losses that they are of, the last ones.
    """

    grads: List[Any]
    divisors: List[Any]
    earlier: Optional[Check]
    is_checked: bool
    losses: List[Any]


class Provenance:
    """Where one optimizer's gradients come from."""

    def __init__(self, loss_scale: LossScale) -> None:
        self.loss_scale = loss_scale
        self.ledger = ledger_of(loss_scale)
        self._warned: Set[str] = set()
        group_of(loss_scale).members.add(self)

    def __deepcopy__(self, memo: Dict[int, Any]) -> Provenance:
        # Copies of optimizers that share a loss scale share its copy.
        return type(self)(copy.deepcopy(self.loss_scale, memo))

    def unscale(self, grads: List[Any]) -> List[Any]:
        """Returns the true gradients, and remembers their check.

        Raises:
          ValueError: One has been unscaled already.
        """
        scaled = as_they_are(grads)
        units = self.ledger.units(scaled)
        divisors = self._to_unscale(scaled, units)
        unscaled, check = unscale_and_check(self.loss_scale, scaled, divisors)
        pairs = list(zip(scaled, divisors))
        self.ledger.note_unscaled(unscaled, check, pairs, units)
        return unscaled

    def _to_unscale(self, grads: List[Any], units: List[Optional[Unit]]) -> List[Any]:
        """Returns what gradients that are to be unscaled are divided by.

        Args:
          grads: The gradients.
          units: Their units.

        """
        for unit in units:
            if unit is not None and unit.is_free and unit.checks:
                raise ValueError(
                    "`grads` must be gradients of the scaled loss, got one that "
                    "get_unscaled_gradients returned already. Unscale each gradient "
                    "once."
                )
        scaled = [unit for unit in units if unit is not None and unit.high > 0.0]
        default = self._divisor(scaled)
        return [
            None
            if grad is None or is_free(unit)
            else self._divisor([unit])
            if unit in scaled
            else default
            for grad, unit in zip(grads, units)
        ]

    def hand_in(self, grads: List[Any], is_divided_in_apply: bool) -> HandedIn:
        """Returns what is known of gradients that are to be applied.

        Args:
          grads: The gradients; some may be None.
          is_divided_in_apply: Whether this Keras's own wrapper divides in `apply`.
        """
        grads = as_they_are(grads)
        ledger, losses = self.ledger, self.ledger.timeline.losses()
        units = ledger.units(grads)
        returned = [ledger.unscaling_of(grad) for grad in grads]
        is_read_here = ledger.timeline.is_read_here()
        kinds = [kind_of(unit, is_read_here) for unit in units]
        known = {k for g, k in zip(grads, kinds) if g is not None} - {Kind.UNKNOWN}
        unscalings = _unscalings(units)
        earlier = earlier_check([u for u in unscalings if u.is_visible()], grads)
        self._warn_of(units, kinds, is_divided_in_apply)
        is_untouched = all(g is None or r for g, r in zip(grads, returned))
        if not known:
            divisor = self._of_unknown(grads, units, is_divided_in_apply)
            handed = HandedIn(grads, [divisor] * len(grads), None, False, losses)
        elif is_untouched and earlier is not None:
            handed = _untouched(grads, unscalings, earlier, losses)
        else:
            divisors = self._divisors(units, kinds, is_divided_in_apply)
            handed = HandedIn(grads, divisors, earlier, False, losses)
        if known == {Kind.UNSCALED} and self._was_never_scaled(grads):
            self._warn(advice.NEVER_SCALED)
        ledger.timeline.note_apply(self._read if known else None)
        return handed

    def _was_never_scaled(self, grads: List[Any]) -> bool:
        """Tells whether nobody has scaled a loss, here or where this is called."""
        has_scaled = self.loss_scale.has_scaled or self.loss_scale.has_been_read
        return not has_scaled and not are_arguments(values_of(grads))

    def _divisors(
        self, units: List[Any], kinds: List[Kind], is_divided_in_apply: bool
    ) -> List[Any]:
        """Returns by what each gradient is divided, None if it is unscaled."""
        divided = {Kind.SCALED}
        if is_divided_in_apply:
            divided |= {Kind.UNSURE, Kind.WRONG}
        scaled = [unit for unit, kind in zip(units, kinds) if kind in divided]
        rest = self._divisor(scaled) if scaled else None
        return [
            self._divisor([unit])
            if kind in divided
            else rest
            if kind is Kind.UNKNOWN
            else None
            for unit, kind in zip(units, kinds)
        ]

    def _divisor(self, units: List[Any]) -> Any:
        """Returns the loss scale that multiplied gradients, as it can be seen here.

        Args:
          units: The units of the gradients. None at all: what scaled the last loss.
        """
        readings = [
            reading
            for unit in units
            for reading in sorted(unit.readings, key=lambda each: each.number)
        ]
        for reading in reversed(readings):
            if reading.is_visible():
                return reading.tensor
        if readings and current_graph() is not None:
            return self._as_it_was(readings[-1])
        return self._latest(
            self.ledger.timeline.last_that_scaled() if not units else None
        )

    def _as_it_was(self, reading: Reading) -> Any:
        """Returns what a tensor of an ended branch, loop or function held."""
        if not self.ledger.timeline.is_current(reading):
            tensor = self.ledger.timeline.at(reading)
            if tensor is not None:
                return tensor
            self._warn(advice.MOVED)
        return self._latest()

    def _latest(self, known: Any = None) -> Any:
        """Returns the loss scale as it is now, if it is not known."""
        if known is None:
            known = self.ledger.timeline.latest()
        return self._read() if known is None else known

    def _read(self) -> Any:
        """Reads the loss scale, for whoever needs it later, too."""
        tensor = self.loss_scale._value()
        self.ledger.note_reading(tensor)
        return tensor

    def _of_unknown(
        self, grads: List[Any], units: List[Any], is_divided_in_apply: bool
    ) -> Any:
        """Returns what gradients are divided by of which nothing is known."""
        if all(map(is_zero, values_of(grads), units)):
            return None
        if self._was_never_scaled(grads):
            self._warn(advice.NEVER_SCALED)
            return None
        is_sure = is_divided_in_apply != self.ledger.has_unscaled
        if not (is_sure and self.loss_scale.has_scaled):
            assumed = advice.ASSUMED[is_divided_in_apply]
            self._warn(advice.AMBIGUOUS.format(assumed=assumed))
        return self._divisor([]) if is_divided_in_apply else None

    def _warn_of(
        self, units: List[Any], kinds: List[Kind], is_divided_in_apply: bool
    ) -> None:
        """Says what cannot be known of gradients that are applied."""
        assumed = advice.ASSUMED[is_divided_in_apply]
        for unit, kind in zip(units, kinds):
            if kind is Kind.UNSURE:
                self._warn(advice.UNSURE.format(cause=unit.cause, assumed=assumed))
            elif kind is Kind.WRONG:
                self._warn(advice.WRONG.format(exponent=unit.low, assumed=assumed))
            elif kind is Kind.SCALED and self._was_read_as_number_since(unit):
                self._warn(advice.NUMBER)
            if unit is not None and unit.is_bounded and hides(unit):
                self._warn(advice.HIDDEN)

    def _was_read_as_number_since(self, unit: Unit) -> bool:
        last = max((reading.number for reading in unit.readings), default=None)
        return last is not None and self.ledger.number_read > last

    def _warn(self, message: str) -> None:
        """Says something once."""
        if message not in self._warned:
            self._warned.add(message)
            advice.warn(message)


def _unscalings(units: List[Optional[Unit]]) -> List[Unscaling]:
    """Returns the unscalings that gradients come from, in their order."""
    every = {each for unit in units if unit is not None for each in unit.checks}
    return sorted(every, key=lambda each: each.number)


def _untouched(
    grads: List[Any], unscalings: List[Unscaling], earlier: Check, losses: List[Any]
) -> HandedIn:
    """Returns what is known of the very gradients that were returned."""
    # Across replicas they are divided before anybody knows: once is enough.
    is_alone = replicas.count() == 1
    before = before_division(unscalings, grads) if is_alone else None
    if before and all(each.are_all_in(grads) for each in unscalings):
        # As if they never were: the step looks, and divides in its branch.
        return HandedIn(*before, None, False, losses)
    grads, divisors = before or (grads, [None] * len(grads))
    return HandedIn(grads, divisors, earlier, True, losses)
