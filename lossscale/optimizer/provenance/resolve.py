"""Are these gradients still scaled? What divides them, and what is known of them?

```
a gradient's exponent    what we do with the gradient
1                        divide it by the loss scale that multiplied its loss
0                        apply it as it is
0 or 1, or another one   what this Keras's own wrapper would do, and warn once
a zero, or unknown       treat it like the rest of the list
```

A gradient's exponent is unknown if it came through NumPy, from another process, or as
an argument of a function. If a whole list is unknown, we do what the Keras at hand does
by convention: Keras 3's own wrapper divides in `apply`, Keras 2's does not.
"""

from __future__ import annotations

from typing import List, Optional, cast

from lossscale.gradients.packing import as_they_are
from lossscale.optimizer import warning_texts
from lossscale.optimizer.bundle import Bundle
from lossscale.optimizer.checking import unscale_and_check
from lossscale.optimizer.provenance.events import (
    Read,
    Unscale,
    before_division,
    earlier_check,
    reads_of,
    unscalings_of,
)
from lossscale.optimizer.provenance.history import history_of
from lossscale.optimizer.provenance.kinds import (
    Kind,
    inf_may_be_replaced,
    is_all_zero,
    kind_of,
    overflow_may_be_lost,
)
from lossscale.runtime import replicas
from lossscale.runtime.aliases import Divisors, Grads, Scalar, Variable
from lossscale.runtime.graphs import are_arguments, is_building
from lossscale.scales.base import LossScale
from lossscale.units.sources import not_settled
from lossscale.units.sweep import values_of
from lossscale.units.unit import Unit

#: What the warnings say is done with gradients that are known to be scaled or unscaled.
_DONE = {
    Kind.SCALED: warning_texts.ASSUMED[True],
    Kind.UNSCALED: warning_texts.ASSUMED[False],
}


class Provenance:
    """Where one optimizer's gradients come from.

    Attributes:
      loss_scale: The loss scale of their losses.
      history: What happened to the loss scale.
      key: The optimizer's number among those that share the loss scale.
      is_keras: Whether it is an optimizer of Keras.
    """

    def __init__(
        self, loss_scale: LossScale, divides_in_apply: bool, *, is_keras: bool = True
    ) -> None:
        """Begins without any knowledge of gradients.

        Args:
          loss_scale: The loss scale of the losses.
          divides_in_apply: Whether this Keras's own wrapper divides in `apply`.
          is_keras: Whether it is an optimizer of Keras. One of TensorFlow 1 adjusts the
            loss scale by itself, as a session may run it by itself. Its programs
            unscale all gradients, so it never warns of gradients of unknown origin.
        """
        self.loss_scale = loss_scale
        self.history = history_of(loss_scale)
        self.history.optimizers.add(self)
        self.key = self.history.now()
        self._divides_in_apply = divides_in_apply
        ambiguous = warning_texts.AMBIGUOUS.format(assumed=self._assumed)
        self.is_keras = is_keras
        #: The warnings that are never given, or not again.
        self._warned = set() if is_keras else {warning_texts.NEVER_SCALED, ambiguous}
        self._trained: List[int] = []

    def note_trained(self, variables: List[Variable]) -> None:
        """Remembers the variables to which gradients are applied."""
        trained = list(map(id, variables))
        if trained != self._trained:
            self._trained = trained
            self.history.values.note_trained(variables)

    def unscale(self, grads: Grads) -> Grads:
        """Returns the true gradients, and remembers their check.

        Raises:
          ValueError: One of the gradients has been unscaled already.
        """
        scaled = as_they_are(grads)
        units = self.history.values.units(scaled)
        divisors = self._to_unscale(scaled, units)
        bundle = Bundle(self.loss_scale, scaled, divisors)
        unscaled, check = unscale_and_check(bundle)
        pairs = list(zip(scaled, divisors))
        self.history.note_unscaled(unscaled, check, pairs, units)
        return unscaled

    def _to_unscale(self, grads: Grads, units: List[Unit]) -> Divisors:
        """Returns the divisors of gradients that the user asks to unscale.

        Args:
          grads: The gradients.
          units: Their units.
        """
        for unit in units:
            if unit.is_free and unit.unscalings:
                raise ValueError(
                    "`grads` must be gradients of the scaled loss, got one that "
                    "get_unscaled_gradients returned already. Unscale each gradient "
                    "once."
                )
        scaled = [unit for unit in units if unit.high > 0.0]
        default = self._divisor(scaled)
        return [
            None
            if grad is None or (unit.is_free and not unit.from_variable)
            else self._divisor([unit])
            if unit.high > 0.0
            else default
            for grad, unit in zip(grads, units)
        ]

    def resolve(self, grads: Grads) -> Bundle:
        """Returns the gradients to apply, with their divisors and checks.

        Args:
          grads: The gradients; some may be None.
        """
        grads, history = as_they_are(grads), self.history
        units = self.history.values.units(grads)
        is_read_here = history.is_read_here()
        kinds = [kind_of(unit, is_read_here) for unit in units]
        known = {k for g, k in zip(grads, kinds) if g is not None} - {Kind.UNKNOWN}
        every = (each for unit in units for each in unscalings_of(unit))
        unscalings = cast(List[Unscale], not_settled(every, self.key))
        self._warn_of(units, kinds, unscalings)
        losses = history.losses()
        if known:
            bundle = self._known(grads, self._divisors(units, kinds), unscalings)
        else:
            bundle = self._unknown(grads, units)
        if known == {Kind.UNSCALED} and self._was_never_scaled(grads):
            self._warn(warning_texts.NEVER_SCALED)
        for each in unscalings:
            each.note_decided(self.key, history.now())
        history.note_apply(self._read if known else None)
        return bundle.but(losses=losses)

    def _known(
        self, grads: Grads, divisors: Divisors, unscalings: List[Unscale]
    ) -> Bundle:
        """Returns gradients of which at least one is known to be scaled or unscaled."""
        unscalings = [each for each in unscalings if each.is_visible()]
        check = earlier_check(unscalings, grads)
        are_returned = all(g is None or self.history.unscaling_of(g) for g in grads)
        were_checked = unscalings and all(each.was_checked for each in unscalings)
        if not (were_checked and are_returned):
            return Bundle(self.loss_scale, grads, divisors, check)
        # With several replicas the gradients were divided before the branch.
        before = before_division(unscalings, grads) if replicas.count() == 1 else None
        if before and all(each.are_all_in(grads) for each in unscalings):
            # The step divides the scaled gradients in its branch, as if nobody had
            # unscaled them: 1,957 MB instead of 2,228 with XLA and Adam, eight of 9 M.
            return Bundle(self.loss_scale, *before)
        grads, divisors = before or (grads, [None] * len(grads))
        return Bundle(self.loss_scale, grads, divisors, check, is_checked=True)

    def _was_never_scaled(self, grads: Grads) -> bool:
        """Tells whether nobody has scaled a loss, in this function or its caller."""
        has_scaled = self.loss_scale.has_scaled or self.loss_scale.has_been_read
        return not has_scaled and not are_arguments(values_of(grads))

    def _divisors(self, units: List[Unit], kinds: List[Kind]) -> Divisors:
        """Returns the divisor of each gradient, None if it is unscaled."""
        divided = {Kind.SCALED}
        if self._divides_in_apply:
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

    def _divisor(self, units: List[Unit]) -> Scalar:
        """Returns the loss scale that multiplied gradients, as a tensor of this graph.

        Args:
          units: The units of the gradients. Empty: returns what scaled the last loss.
        """
        reads: List[Read] = []
        for unit in units:
            reads += sorted(reads_of(unit), key=lambda each: each.time)
        for read in reversed(reads):
            if read.is_visible():
                return self._held_by(read)
        if reads and is_building():
            return self._as_it_was(reads[-1])
        scaled_last = None if units else self.history.last_that_scaled()
        return self._latest() if scaled_last is None else scaled_last

    def _held_by(self, read: Read) -> Scalar:
        """Returns a read's value, or the value now if a dataset's function read it."""
        if not read.is_from_then_on:
            return read.tensor
        now = self._read()
        if is_building() or float(now) != float(read.tensor):
            self._warn(warning_texts.MOVED)
        return now

    def _as_it_was(self, read: Read) -> Scalar:
        """Returns the value of a read in a branch, a loop or a function that ended."""
        if not self.history.is_current(read):
            tensor = self.history.at(read)
            if tensor is not None:
                return tensor
            self._warn(warning_texts.MOVED)
        return self._latest()

    def _latest(self) -> Scalar:
        """Returns the loss scale's value now. Reads it if no tensor holds the value."""
        tensor = self.history.latest()
        return self._read() if tensor is None else tensor

    def _read(self) -> Scalar:
        """Reads the loss scale, and notes the read so that later code finds it."""
        tensor = self.loss_scale._value()
        self.history.note_read(tensor)
        return tensor

    def _unknown(self, grads: Grads, units: List[Unit]) -> Bundle:
        """Returns gradients of unknown origin, by this Keras's convention."""
        are_zeros = all(map(is_all_zero, values_of(grads), units))
        divides = self._divides_in_apply or are_zeros
        if self._was_never_scaled(grads):
            divides = False
            if not are_zeros:
                self._warn(warning_texts.NEVER_SCALED)
        elif not are_zeros:
            is_sure = self._divides_in_apply != self.history.has_unscaled
            is_sure = is_sure and not self.history.values.may_have_missed()
            if not (is_sure and self.loss_scale.has_scaled):
                self._warn(warning_texts.AMBIGUOUS.format(assumed=self._assumed))
        divisor = self._divisor([]) if divides else None
        return Bundle(self.loss_scale, grads, [divisor] * len(grads))

    @property
    def _assumed(self) -> str:
        return warning_texts.ASSUMED[self._divides_in_apply]

    def _warn_of(
        self, units: List[Unit], kinds: List[Kind], unscalings: List[Unscale]
    ) -> None:
        """Warns of gradients whose exponent or overflow cannot be known."""
        for unit, kind in zip(units, kinds):
            if kind is Kind.WRONG:
                self._warn(
                    warning_texts.WRONG.format(exponent=unit.low, assumed=self._assumed)
                )
            elif unit.cause:
                assumed = _DONE.get(kind, self._assumed)
                self._warn(
                    warning_texts.UNSURE.format(cause=unit.cause, assumed=assumed)
                )
            elif kind is Kind.SCALED and self._was_read_as_float_since(unit):
                self._warn(warning_texts.NUMBER)
            if overflow_may_be_lost(unit, unscalings):
                self._warn(warning_texts.HIDDEN)
            if (
                inf_may_be_replaced(unit)
                and not unit.cause
                and self.loss_scale.checks_gradients
            ):
                self._warn(warning_texts.UNSEEN)

    def _was_read_as_float_since(self, unit: Unit) -> bool:
        last: Optional[int] = max((read.time for read in unit.reads), default=None)
        return last is not None and self.history.read_as_float_at > last

    def _warn(self, message: str) -> None:
        """Gives a warning, unless it was given before."""
        if message not in self._warned:
            self._warned.add(message)
            warning_texts.warn(message)
