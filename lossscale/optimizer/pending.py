"""Is a division pending? What divides each gradient, and did it overflow before?

*`scale_loss` makes a division pending. `get_unscaled_gradients` divides.
`apply_gradients` divides if the division is still pending.* The operations that made a
gradient show whether its division is (`provenance`). Where they cannot be seen, the
state of the step tells: a few numbers of each optimizer on each replica. That is so
with functions that are called again, loops, branches and NumPy.

```
the last call              stage      apply divides gradients of unknown origin
none of ours               NOTHING    as its Keras's own wrapper: `_divisor_of_unknown`
scale_loss                 SCALED     yes, by what multiplied the last loss
get_unscaled_gradients     UNSCALED   no, unless they are those that it was given
```

Where two lists of gradients or two optimizers meet, five rules hold:

1. Where the program shows what a value is, the state is not asked: what
   `get_unscaled_gradients` is given is scaled, and what it returns is unscaled.
2. A state belongs to one optimizer. What another one does, or `LossScale.scale` and
   `unscale`, moves it only while none of its own gradients wait to be applied, or if it
   is known that the gradients are its own.
3. What a body (a branch, a loop, a function) returns has the kind that its operations
   make of what it was given, if nobody scales or unscales inside.
4. An overflow that was seen waits until an apply has counted it. A counted one ends
   with the step: with its optimizer's next `scale_loss`, at the latest.
5. Where nobody knows, divide, and warn where Python can see it. A gradient that is
   divided twice hardly moves a weight, one that is not divided destroys it.
"""

from __future__ import annotations

from typing import Dict, List, Optional

import tensorflow as tf

from lossscale.gradients.bundle import Bundle, as_they_are, unscale_and_check
from lossscale.gradients.check import NO_CHECK, Check, all_true, dense_part
from lossscale.optimizer.state import Stage, StepObserver, StepState
from lossscale.provenance.witness import Origins, Witness
from lossscale.runtime import graphs, mode, op_callbacks, replicas
from lossscale.runtime.aliases import Grads, Scalar, Variable
from lossscale.runtime.control import select
from lossscale.scales.base import LossScale
from lossscale.scales.ignored_losses import IgnoredLosses
from lossscale.scales.uses import observer_of, takes_the_flag, value_of, was_used


class PendingDivision:
    """Whether the gradients of one optimizer are still to be divided.

    `unscale` is `get_unscaled_gradients`, `resolve` the first part of an apply.
    """

    def __init__(
        self, loss_scale: LossScale, *, unscales_in_apply: bool, unscales_itself: bool
    ) -> None:
        """See `LossScaleEngine._set_up`."""
        self.loss_scale, self._unscales_itself = loss_scale, unscales_itself
        self._unscales_in_apply = unscales_in_apply
        self.observer: StepObserver = observer_of(loss_scale, StepObserver)
        self.witness: Witness = self.observer.witness
        # A session runs any part of a graph, and parameter servers are asked over the
        # network: there is no state where nothing orders the calls.
        has_state = not (mode.current().runs_parts or replicas.train_apart())
        self._state = StepState() if has_state else None
        #: Whether the loss scale was used before this optimizer was made. A function
        #: that was traced then does not move the state of this optimizer.
        self._is_late = was_used(loss_scale)
        #: Which bad losses the loss scale ignores. None: it ignores none.
        self.ignored_losses: Optional[IgnoredLosses] = None
        #: Whether gradients of its own were ever unscaled. If not, no overflow waits to
        #: be counted.
        self._may_hold_overflow = False
        self.observer.divisions.add(self)
        self.witness.note_optimizer(self, is_silent=unscales_itself)
        self.witness.note_state(self.variables().values())

    @property
    def state(self) -> Optional[StepState]:
        """The state of the step. None in a session and under parameter servers."""
        return None if mode.current().runs_parts else self._state

    def variables(self) -> Dict[str, Variable]:
        """Returns the variables that a SavedModel of a training step needs."""
        return {} if self._state is None else self._state.variables()

    def replace(self, other: PendingDivision) -> None:
        """Takes the state of another one. Traced functions continue to write it."""
        self._state = other._state
        self._may_hold_overflow = other._may_hold_overflow
        self.witness.note_state(self.variables().values())
        self.witness.note_replaced(other, other.witness, self)
        # What others that share its loss scale do is no step of this one.
        other.observer.divisions.discard(other)

    @property
    def is_shared(self) -> bool:
        """Whether it counts steps together with others that share its loss scale."""
        if not self.observer.has_several or self._unscales_itself:
            return False
        counting = [d for d in self.observer.divisions if not d._unscales_itself]
        is_listed = len(counting) > 1 and self in counting
        return is_listed and takes_the_flag(self.loss_scale)

    def note_waiting(self, waits: bool) -> None:
        """Notes whether gradients of its own loss wait to be applied: see rule 2."""
        if self.observer.has_several and self.state is not None:
            self.state.note_waiting(waits)

    def unscale(self, grads: Grads) -> Grads:
        """Returns the true gradients, and remembers whether they were finite."""
        scaled = as_they_are(grads)
        with op_callbacks.paused():
            origins = self.witness.origins(scaled)
            if origins.has_unscaled:
                raise ValueError(
                    "`grads` must be gradients of the scaled loss, got one that was "
                    "unscaled already. Unscale each gradient once."
                )
            divisors = origins.divisors(self._last_scale)
            bundle = Bundle(self.loss_scale, scaled, divisors)
            unscaled, check = unscale_and_check(bundle)
            check = check.without_gradients(len(scaled))
            divisor = next((by for by in divisors if by is not None), None)
            owners = self.witness.owners(origins, self)
            if divisor is not None:
                for owner in owners:
                    owner._note_unscaled(scaled, divisor, check)
        self.witness.note_unscaled(owners, origins, scaled, divisors, unscaled, check)
        return unscaled

    def _note_unscaled(self, scaled: Grads, divisor: Scalar, check: Check) -> None:
        """Notes that gradients were unscaled which count as those of its own loss."""
        self._may_hold_overflow = True
        state = self.state
        if state is not None:
            state.move(Stage.UNSCALED, divisor)
            if not check.checks_nothing:
                state.note_check(check.quick)
            state.note_given(scaled)
        self.note_waiting(True)

    def resolve(self, grads: Grads, variables: List[Variable]) -> Bundle:
        """Returns the gradients to apply, with their divisors and earlier checks."""
        grads = as_they_are(grads)
        with op_callbacks.paused():
            origins = self.witness.origins(grads)
            unknown = self._divisor_of_unknown(grads) if origins.has_unknown else None
            divisors = origins.divisors(self._last_scale, unknown)
            self.witness.note_applied(self, origins, variables, unknown is not None)
            bundle = Bundle(self.loss_scale, grads, divisors, origins.losses, unknown)
            may_hold = origins.lists or origins.has_unknown or self._may_hold_overflow
            if may_hold and self.loss_scale.checks_gradients:
                bundle = self._with_earlier_check(bundle, origins)
            self.note_waiting(False)
        return bundle

    def _last_scale(self) -> Scalar:
        """Returns what multiplied the last loss, a `float32` tensor of shape `[]`.

        If no loss is known, the current loss scale.
        """
        now = value_of(self.loss_scale)
        if self.state is not None:
            last = self.state.read()
            return select(last.is_at(Stage.NOTHING), now, last.loss_scale)
        seen = self.witness.last_scale()
        return now if seen is None else seen

    def _divisor_of_unknown(self, grads: Grads) -> Optional[Scalar]:
        """Returns what divides gradients of unknown origin: 1 or None if unscaled."""
        if self._unscales_itself:
            return None
        # Whether to divide at the stage NOTHING. While nobody has used the loss scale,
        # no gradient is scaled. But a function that is given gradients may be traced
        # before the loss is scaled.
        by_nobody = (self._unscales_in_apply or self._is_late) and (
            was_used(self.loss_scale) or graphs.are_arguments(map(dense_part, grads))
        )
        if self.state is None:
            is_scaled = by_nobody or self.witness.is_scaled
            return self._last_scale() if is_scaled else None
        last, divisor = self.state.read(), 1.0
        if by_nobody:
            is_unscaled = last.is_at(Stage.UNSCALED)
            divisor = select(is_unscaled, 1.0, value_of(self.loss_scale))
        is_pending = last.is_at(Stage.SCALED)
        # Those that `get_unscaled_gradients` was given are still scaled.
        is_pending = tf.logical_or(is_pending, self.state.was_given(grads))
        divisor = select(is_pending, last.loss_scale, divisor)
        is_known = mode.current().knows_values
        return None if is_known and float(divisor) == 1.0 else divisor

    def _with_earlier_check(self, bundle: Bundle, origins: Origins) -> Bundle:
        """Returns a bundle with the check of its gradients as they were unscaled."""
        check, lists = NO_CHECK, origins.lists
        for unscaled in lists:
            quick = unscaled.check.quick
            if unscaled.check.checks_nothing or graphs.is_visible(quick):
                check &= unscaled.check
        # The worst numbers are known if all gradients are of one list, in its order.
        if len(lists) != 1 or lists[0].length != len(bundle.grads):
            check = check._replace(worst=None)
        before = list(map(self.witness.before, bundle.grads))
        is_known = all(b or g is None for g, b in zip(bundle.grads, before))
        if is_known and not check.checks_nothing:  # nobody has changed them since
            bundle = bundle.but(is_checked=True)
            # Under XLA one replica divides them once more, in its branch, as if nobody
            # had unscaled them, and needs no memory for the quotients.
            if replicas.count() == 1 and mode.current().by_xla:
                bundle = bundle.but(
                    grads=[b and b.grad for b in before],
                    divisors=[b and b.divisor for b in before],
                )
        # The optimizers whose overflow may be in these gradients, each with whether the
        # gradients are known to be scaled.
        are_scaled = dict.fromkeys((unscaled.owner for unscaled in lists), False)
        if origins.has_unknown:
            are_scaled.setdefault(self, False)
        elif self._may_hold_overflow:
            are_scaled.setdefault(self, True)
        flags = [
            owner.state.count_overflow(scaled)
            for owner, scaled in are_scaled.items()
            if owner.state is not None
        ]
        # Of changed gradients the state tells whether an overflow is still to be
        # counted. Parts of them may be of earlier steps, as in a momentum, and an
        # overflow in those was counted then.
        if bundle.is_checked or not (flags or check.checks_nothing):
            flags.append(check.quick)
        if flags:
            check = check._replace(quick=all_true(flags))
        return bundle.but(check=check)
