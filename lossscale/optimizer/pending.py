"""Is a division pending? What divides each gradient, and did it overflow before?

*`scale_loss` makes a division pending. `get_unscaled_gradients` divides.
`apply_gradients` divides if the division is still pending.* The operations that made a
gradient show whether its division is (`provenance`). Where they cannot be seen, as with
functions that are called again, loops, branches and NumPy, the state of the step tells.

Where two lists of gradients or two optimizers meet, five rules hold:

1. Where the program shows what a value is, the state is not asked: what
   `get_unscaled_gradients` is given is scaled, and what it returns is unscaled.
2. A state belongs to one optimizer. What another one does, or `LossScale.scale` and
   `unscale`, moves it only while none of its own gradients wait to be applied, or if it
   is known that the gradients are its own. While those of several wait,
   `LossScale.unscale` moves no state, and the list that it returned is recognized.
3. What a body (a branch, a loop, a function) returns has the kind that its operations
   make of what it was given, if nobody scales or unscales inside.
4. An overflow that was seen waits until an apply has counted it. A counted one ends
   with the step: with its optimizer's next `scale_loss`, at the latest.
5. Where nobody knows, divide, and warn where Python can see it. A gradient that is
   divided twice hardly moves a weight, one that is not divided destroys it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Dict, List, Optional

import tensorflow as tf

from lossscale.gradients import check as checks
from lossscale.gradients.bundle import Bundle, as_they_are, unscale_and_check
from lossscale.gradients.check import NO_CHECK, SMALL, Check, dense_part, is_small
from lossscale.optimizer.uses import Uses
from lossscale.provenance.kinds import SCALE, Kind
from lossscale.provenance.origins import Origins, Unscaled, before
from lossscale.provenance.warnings import Warnings
from lossscale.runtime import graphs, mode, op_callbacks, replicas
from lossscale.runtime.aliases import Flag, Grads, Scalar, Variable
from lossscale.runtime.control import select
from lossscale.scales.base import LossScale

#: What `StepState.overflow` holds: no overflow was seen; one was, and an apply has
#: counted it; one was, and none has. At a step's end the second is rounded down.
NO_OVERFLOW, COUNTED, SEEN = 0.0, 0.5, 1.0


@dataclass(frozen=True)
class Host:
    """What a wrapper that holds an engine does itself, or its inner optimizer.

    Attributes:
      applied_steps: Returns the variable of the number of applied steps. None: there is
        none, and no record.
      unscales_in_apply: Whether `apply` divides gradients if it is not known whether
        anybody has scaled or unscaled them. Keras 3's own wrapper does.
      unscales_itself: Whether the code that computes the gradients calls `unscale` for
        all of them, as in TensorFlow 1. Then `apply` divides none that may be unscaled,
        never warns, and counts each step, also if the loss scale is shared.
    """

    applied_steps: Any = None
    unscales_in_apply: bool = True
    unscales_itself: bool = False


class StepState:
    """The state of one optimizer's step: `float32` scalars on each replica.

    `pending` holds the last call of ours and its loss scale: S after `scale_loss`, -S
    after `get_unscaled_gradients`, 0 if there was neither. An apply leaves it as it is:
    a second apply does what the first one did. `overflow` tells whether unscaled
    gradients had overflowed, and whether an apply has counted that.

    While several optimizers share the loss scale, `waiting` is 1 if gradients of this
    optimizer's own loss wait to be applied, more if `LossScale.unscale` may have
    unscaled them, and 0.5 if those of a loss that `LossScale.scale` multiplied may.
    `given` is a number of the list that `get_unscaled_gradients` was given last, to
    recognize that list, or minus the number of a list that `LossScale.unscale` returned
    and that may be of this optimizer.
    """

    def __init__(self) -> None:
        variable = partial(
            tf.Variable,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        with tf.init_scope():
            self.pending = variable(0.0, name="pending")
            self.overflow = variable(NO_OVERFLOW, name="overflow_seen")
            self.waiting = variable(0.0, name="waiting")
            self.given = variable(0.0, name="given")

    def read(self) -> Scalar:
        return tf.convert_to_tensor(self.pending)

    def note_scaled(self, loss_scale: Scalar, where: Optional[Flag] = None) -> None:
        """Notes `scale_loss`, by this loss scale, unless `where` is False."""
        if where is not None:
            loss_scale = select(where, loss_scale, self.read())
        self.pending.assign(loss_scale, read_value=False)

    def note_unscaled(self, divisor: Scalar, where: Optional[Flag] = None) -> None:
        """Notes `get_unscaled_gradients`, by this divisor, unless `where` is False."""
        self.note_scaled(-divisor, where)  # the sign tells the two calls apart

    def note_given(self, grads: Grads) -> None:
        number = _number_of(grads)
        if number is not None:
            self.given.assign(number, read_value=False)

    def was_given(self, grads: Grads) -> Flag:
        """Whether `get_unscaled_gradients` is known to have had this list last."""
        return self._is_list(grads, tf.convert_to_tensor(self.given))

    def note_returned(self, grads: Grads, where: Flag) -> None:
        """Notes what `LossScale.unscale` returned if that may be of this optimizer."""
        if not mode.current().knows_values:  # there Python knows it: see `Uses.unscale`
            waiting = select(where, 2.0 * self.waiting, self.waiting)
            self.waiting.assign(waiting, read_value=False)
        number = _number_of(grads)
        if number is not None:
            given = select(where, -number, self.given)
            self.given.assign(given, read_value=False)

    def was_returned(self, grads: Grads) -> Flag:
        """Whether `LossScale.unscale` is known to have returned this list."""
        return self._is_list(grads, -self.given)

    def _is_list(self, grads: Grads, known_by: Scalar) -> Flag:
        number = _number_of(grads)
        if number is None:
            return False
        return tf.logical_and(tf.equal(number, known_by), number > 0.0)

    def note_check(self, is_finite: Optional[Flag]) -> None:
        """Notes whether unscaled gradients were finite. None: they were not checked."""
        now = tf.floor(self.overflow)
        if is_finite is not None:
            now = select(is_finite, now, SEEN)
        self.overflow.assign(now, read_value=False)

    def count_overflow(self, are_scaled: bool) -> Flag:
        """Lets an apply count the overflow. Returns True if there is none to count.

        A second apply of the same step, as of other variables, counts the same overflow
        again, unless it is known that its gradients `are_scaled`.
        """
        least = SEEN if are_scaled else select(self.read() < 0.0, COUNTED, SEEN)
        is_none = tf.convert_to_tensor(self.overflow) < least
        now = select(is_none, NO_OVERFLOW, COUNTED)
        self.overflow.assign(now, read_value=False)
        return is_none


def _number_of(grads: Grads) -> Optional[Scalar]:
    """Returns the greatest magnitude at the beginning of the last dense gradient.

    It has the same bits however the gradients came back: through NumPy, a variable, XLA
    or a function. (A sum may not.) Of a list that was divided by S it is S times
    smaller. So the right list is recognized unless that number is 0, and another one is
    mistaken for it only if it has by chance the same number.
    """
    for grad in reversed(grads):
        is_dense = grad is not None and not isinstance(grad, tf.IndexedSlices)
        if is_dense and grad.dtype.is_floating and grad.shape.num_elements():
            first = grad if is_small(grad) else tf.reshape(grad, [-1])[:SMALL]
            return tf.cast(tf.reduce_max(tf.abs(first)), tf.float32)
    return None


class PendingDivision:
    """`get_unscaled_gradients` of one optimizer, and the first part of an apply."""

    def __init__(self, loss_scale: LossScale, host: Host) -> None:
        self.loss_scale, self._host = loss_scale, host
        uses = loss_scale._observer
        if not isinstance(uses, Uses):
            uses = loss_scale._observer = Uses(loss_scale)
        #: What is known of the loss scale, one for all optimizers that share it.
        self.uses: Uses = uses
        self.warnings = Warnings(loss_scale, self.uses.reads, host.unscales_itself)
        # A session runs any part of a graph, and parameter servers are asked over the
        # network: there is no state where nothing orders the calls.
        has_state = not (mode.current().runs_parts or replicas.train_apart())
        self._state = StepState() if has_state else None
        #: Whether the loss scale was used before this optimizer was made. A function
        #: that was traced then does not move the state of this optimizer.
        self._was_used_before = loss_scale._was_used
        #: Whether gradients of its own loss wait to be applied, as far as Python sees.
        self.waits = False
        #: Whether gradients of its own were ever unscaled: an overflow may wait.
        self._may_hold_overflow = False
        self.uses.optimizers.add(self)
        self._note_state()

    @property
    def state(self) -> Optional[StepState]:
        """The state of the step. None in a session and under parameter servers."""
        return None if mode.current().runs_parts else self._state

    def _note_state(self) -> None:
        # What reads or writes these may scale or unscale.
        self.uses.kinds.note_variables(self.variables().values(), Kind(SCALE))

    def variables(self) -> Dict[str, Variable]:
        """Returns the variables that a SavedModel of a training step needs."""
        variables = {} if self._state is None else vars(self._state)
        return {v.name.split(":")[0]: v for v in variables.values()}

    def replace(self, other: PendingDivision) -> None:
        """Takes the state of another one. Traced functions continue to write it."""
        self._state = other._state
        self._may_hold_overflow = other._may_hold_overflow
        self._note_state()
        self.waits, self.warnings.has_own = other.waits, other.warnings.has_own
        # What others that share its loss scale do is no step of this one.
        other.uses.optimizers.discard(other)

    @property
    def is_shared(self) -> bool:
        """Whether it counts steps together with others that share its loss scale."""
        if not self.uses.has_several:
            return False
        counting = [d for d in self.uses.optimizers if not d._host.unscales_itself]
        return len(counting) > 1 and self in counting and self.loss_scale._takes_flag

    def _note_waiting(self, waits: bool) -> None:
        """Notes whether gradients of its own loss wait to be applied: see rule 2."""
        self.waits = waits
        if self.uses.has_several and self.state is not None:
            self.state.waiting.assign(float(waits), read_value=False)

    def loss_scaled(self, loss_scale: Scalar, owner: Optional[PendingDivision]) -> None:
        """A loss was multiplied by the loss scale. No owner: `LossScale.scale` did."""
        if owner is self or not self.waits:
            self.warnings.owner_known(owner is self)
        state = self.state
        if state is None:
            self.uses.note_last_scale(loss_scale)
        elif owner is self or not self.uses.has_several:
            state.note_scaled(loss_scale)
        else:
            is_free = state.waiting < 1.0  # rule 2
            state.note_scaled(loss_scale, is_free)
            if owner is None:
                state.waiting.assign(tf.maximum(state.waiting, 0.5), read_value=False)
        if owner is self:
            self._note_waiting(True)

    def unscale(self, grads: Grads) -> Grads:
        """Returns the true gradients, and remembers whether they were finite."""
        scaled = as_they_are(grads)
        with op_callbacks.paused():
            origins = Origins(scaled, self.uses.kinds)
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
            for optimizer in list(self.uses.optimizers if divisor is not None else ()):
                # With its own gradients it may unscale those of others that wait.
                waits = optimizer.waits and optimizer in origins.owners
                if optimizer is self or waits:
                    optimizer._note_unscaled(scaled, divisor, check)
                elif not optimizer.warnings.has_own:
                    optimizer.warnings.is_unclear = True
        self.warnings.unscaled_count += origins.count
        source = Unscaled(self, check, len(unscaled), origins.losses)
        self.uses.note_unscaled(source, origins, scaled, divisors, unscaled)
        return unscaled

    def _note_unscaled(self, scaled: Grads, divisor: Scalar, check: Check) -> None:
        """Notes that gradients were unscaled which count as those of its own loss."""
        self._may_hold_overflow = True
        self.warnings.owner_known(is_own=True)
        state = self.state
        if state is not None:
            state.note_unscaled(divisor)
            if not check.checks_nothing:
                state.note_check(check.quick)
            state.note_given(scaled)
        self._note_waiting(True)

    def resolve(self, grads: Grads, variables: List[Variable]) -> Bundle:
        """Returns the gradients to apply, with their divisors and earlier checks."""
        grads = as_they_are(grads)
        with op_callbacks.paused():
            self.uses.kinds.note_variables(variables)  # there is no S in weights
            origins = Origins(grads, self.uses.kinds)
            unknown = self._divisor_of_unknown(grads) if origins.has_unknown else None
            divisors = origins.divisors(self._last_scale, unknown)
            self.warnings.warn(origins, variables, unknown is not None)
            bundle = Bundle(self.loss_scale, grads, divisors, origins.losses, unknown)
            may_hold = origins.lists or origins.has_unknown or self._may_hold_overflow
            if may_hold and self.loss_scale.checks_gradients:
                bundle = self._with_earlier_check(bundle, origins)
            self._note_waiting(False)
        return bundle

    def _last_scale(self) -> Scalar:
        """Returns what multiplied the last loss. If none is known, the scale of now."""
        self._refuse_unknown()
        now = self.loss_scale._value()
        if self.state is not None:
            last = tf.abs(self.state.read())
            return select(last > 0.0, last, now)
        return self.uses.last_scale(now)

    def _divisor_of_unknown(self, grads: Grads) -> Optional[Scalar]:
        """Returns what divides gradients of unknown origin: 1 or None if unscaled.

        ```
        pending   these gradients                            are divided by
        any       what `LossScale.unscale` returned          1
        S         any others                                 S
        -S        what `get_unscaled_gradients` was given    S
        -S        any others                                 1
        0         any, with `_divides_by_default`            the loss scale of now
        0         any, without                               1
        ```

        Without a state only losses and lists that Python has seen count.
        """
        if self._host.unscales_itself:
            return None
        by_default = self._divides_by_default(grads)
        if self.state is None:
            is_scaled = by_default or self.uses.is_scaled
            return self._last_scale() if is_scaled else None
        pending, divisor = self.state.read(), 1.0
        if by_default:
            divisor = select(pending < 0.0, 1.0, self.loss_scale._value())
        is_pending = tf.logical_or(pending > 0.0, self.state.was_given(grads))
        divisor = select(is_pending, tf.abs(pending), divisor)
        is_known = mode.current().knows_values
        if self.uses.has_several and (is_known or not self.warnings.is_unclear):
            # If it is unclear in a graph, that is told, and so they are divided.
            divisor = select(self.state.was_returned(grads), 1.0, divisor)
        if is_known:
            if float(divisor) == 1.0:
                return None
            if self.uses.has_several and float(self.state.waiting) > 1.0:
                self.warnings.is_unclear = True
        return divisor

    def _refuse_unknown(self) -> None:
        """Raises where another worker may have changed S since, and no state knows."""
        if replicas.train_apart() or not (self._state or mode.current().runs_parts):
            raise ValueError(
                "`grads` must be seen to come from one scaled loss under a "
                "ParameterServerStrategy, got others. Scale, unscale and apply once in "
                "one function that a worker runs, not in functions or branches in it."
            )

    def _divides_by_default(self, grads: Grads) -> bool:
        """Whether to divide if this optimizer has neither scaled nor unscaled so far.

        If nobody has used the loss scale, no gradient is scaled. But a function that is
        given gradients may be traced before the loss is scaled.
        """
        may_be_scaled = self._host.unscales_in_apply or self._was_used_before
        return may_be_scaled and (
            self.loss_scale._was_used or graphs.are_arguments(map(dense_part, grads))
        )

    def _with_earlier_check(self, bundle: Bundle, origins: Origins) -> Bundle:
        """Returns a bundle with the check of its gradients as they were unscaled."""
        check, lists = NO_CHECK, origins.lists
        for each in lists:
            if each.check.checks_nothing or graphs.is_visible(each.check.quick):
                check &= each.check
        # The worst numbers are known if all gradients are of one list, in its order.
        if len(lists) != 1 or lists[0].length != len(bundle.grads):
            check = check._replace(worst=None)
        scaled = list(map(before, bundle.grads))
        is_known = all(s or g is None for g, s in zip(bundle.grads, scaled))
        if is_known and not check.checks_nothing:  # nobody has changed them since
            bundle = bundle.but(is_checked=True)
            # Under XLA one replica divides them once more, in its branch, as if nobody
            # had unscaled them, and needs no memory for the quotients.
            if replicas.count() == 1 and mode.current().by_xla:
                bundle = bundle.but(
                    grads=[s and s.grad for s in scaled],
                    divisors=[s and s.divisor for s in scaled],
                )
        if not all(graphs.is_visible(each.check.quick) for each in lists):
            self._refuse_unknown()  # elsewhere the state tells of an overflow
        flags = self._count_overflows(origins)
        # Of changed gradients the state tells whether an overflow is still to be
        # counted: parts of them may be of earlier steps, as in a momentum.
        if bundle.is_checked or not (flags or check.checks_nothing):
            flags.append(check.quick)
        if flags:
            check = check._replace(quick=checks.all_true(flags))
        return bundle.but(check=check, is_measured=origins.is_measured)

    def _count_overflows(self, origins: Origins) -> List[Flag]:
        """Counts overflows that were seen: for each state whether it holds none."""
        # Whose overflow may be in these gradients, and if they are known to be scaled.
        are_scaled = dict.fromkeys((each.owner for each in origins.lists), False)
        if origins.has_unknown:
            are_scaled.setdefault(self, False)
        elif self._may_hold_overflow:
            are_scaled.setdefault(self, True)
        return [
            owner.state.count_overflow(scaled)
            for owner, scaled in are_scaled.items()
            if owner.state is not None
        ]
