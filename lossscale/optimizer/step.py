"""One attempt to apply gradients: unscale, check, agree, adjust, apply or skip.

Nothing here knows a rule of a loss scale, or a Keras.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from lossscale.gradients import faults, rows
from lossscale.gradients.faults import Check
from lossscale.gradients.finite import each_is_finite, floating_values
from lossscale.gradients.packing import unpack
from lossscale.optimizer import sharing
from lossscale.optimizer.agreement import Agreed, Alone, Among, Own, both
from lossscale.optimizer.fault_record import Entry
from lossscale.optimizer.provenance.resolve import HandedIn, Provenance
from lossscale.optimizer.unscaling import (
    alone,
    divided,
    largest_unscaled,
    packed,
    proof_as_applied,
)
from lossscale.runtime import mode, replicas
from lossscale.runtime.control import either, group_ops, rarely, with_dependencies
from lossscale.scales.base import LossScale


class Local(NamedTuple):
    """What differs between replicas.

    Attributes:
      grads: This replica's gradients.
      divisors: What each is to be divided by in the branch. None: they are unscaled.
      earlier: The check of when the user had them unscaled. None: there was none.
      losses: The unscaled losses.
      variables: What the gradients are applied to.
      largest: The greatest magnitude of the unscaled gradients. None: nobody asks.
      vote: What this replica tells the others.
    """

    grads: List[Any]
    divisors: Optional[List[Any]]
    earlier: Optional[Check]
    losses: List[Any]
    variables: Whole
    largest: Any = None
    vote: Any = None


class Attempt:
    """One attempt to apply gradients. Read it from `run` down.

    ```
    run(handed, variables):
      local = unscale(handed)      # one replica does so in apply
      local.vote = check(local)    # this replica's word
      agreed = agree(local)        # from here on for all replicas at once
      should_apply = adjust(agreed)
      if should_apply: apply(local)      else: skip(local)
    ```

    Each replica makes an attempt; where replicas meet, in `agree`, the first one's runs
    for all. So its attributes must be equal on all replicas. What differs travels in a
    `Local`, which then holds each replica's own.

    Gradients are applied only if they were finite on every replica when they were
    unscaled, are so now, and stay so when they are added up across replicas: two
    float16 gradients of 4e4 are finite, their sum is not. A skipped step changes
    nothing but the loss scale's own state and the record of what was at fault.
    """

    def __init__(
        self,
        provenance: Provenance,
        apply_gradients: Callable[..., Any],
        are_added: bool,
        entry: Optional[Entry],
    ) -> None:
        """Begins an attempt.

        Args:
          provenance: Where the optimizer's gradients come from.
          apply_gradients: Called as `apply_gradients(grads, variables)` on each replica
            unless the step is skipped. It must hold nothing that differs between
            replicas.
          are_added: Whether it adds the gradients up across replicas.
          entry: Where a skipped step's faults are kept. None: nowhere.
        """
        self._provenance = provenance
        self._loss_scale = provenance.loss_scale
        self._apply_gradients = apply_gradients
        self._entry = entry
        self._mode = mode.current()
        #: Whether the flag is all that moves the loss scale. A subclass that overrides
        #: `update` whole looks at the gradients itself.
        self._follows_its_rule = type(self._loss_scale).update is LossScale.update
        self._agreement = Alone() if replicas.count() == 1 else Among(are_added)
        self._groups: List[List[int]] = []
        self._is_checked = False
        #: Whether the vote of a replica that is alone needs no look.
        self._is_exact = False

    def run(self, handed: HandedIn, variables: Any) -> Any:
        """Applies gradients, or skips them on all replicas.

        Returns:
          In a graph, an op that does it all. None in eager mode.
        """
        if self._mode.knows_values:
            with self._provenance.ledger.step():
                return self._run_eagerly(self.unscale(handed, Whole(variables)))
        local = self.unscale(handed, Whole(variables))
        if not self._loss_scale.checks_gradients:
            with self._provenance.ledger.step():
                return group_ops([self.apply(local)])
        local = local._replace(vote=self.check(local))
        return replicas.merge_call(self._meet, local)

    def _run_eagerly(self, local: Local) -> None:
        if not self._loss_scale.checks_gradients:
            self.apply(local)
            return
        local = local._replace(vote=self.check(local))
        # Python's own branch may stand in replica context: no thread starts anew.
        should_apply, codes = replicas.merge_call(self._meet_eagerly, local)
        if bool(should_apply):
            self.apply(local)
        else:
            replicas.merge_call(self.skip, local, codes)

    def unscale(self, handed: HandedIn, variables: Whole) -> Local:
        """Divides gradients if replicas meet. One replica leaves that to the branch.

        There the quotients are used as soon as they are there, and need less memory. A
        skipped step has none. Where replicas meet, they agree on the quotients: two
        that left them to the branch took 4.3 ms for 3.7, 12 M with Adam.
        """
        grads, divisors = handed.grads, handed.divisors
        # What equal rows add up to is nobody's before they are applied.
        self._is_checked = handed.is_checked and not rows.any_may_repeat(grads)
        self._groups = alone(grads)
        checks_itself = self._follows_its_rule and self._loss_scale.checks_gradients
        if checks_itself:
            grads, self._groups, divisors = packed(grads, divisors)
        earlier = handed.earlier
        if earlier is not None and not self._is_checked:
            earlier = faults.settled(earlier, len(handed.grads))
        local = Local(grads, divisors, earlier, handed.losses, variables)
        if checks_itself and self._loss_scale.last_largest is not None:
            found = largest_unscaled(grads, divisors, handed.earlier, handed.is_checked)
            local = local._replace(largest=found)
        if checks_itself and isinstance(self._agreement, Alone):
            return local
        quotients = divided(self._loss_scale, grads, divisors)
        return local._replace(grads=quotients, divisors=None)

    def check(self, local: Local) -> Any:
        """Returns this replica's vote."""
        earlier = None if local.earlier is None else local.earlier.finiteness
        looks_now = self._mode.looks_at_once and not rows.any_may_repeat(local.grads)
        was_exact = earlier is None or earlier.look is None
        self._is_exact = was_exact and (self._is_checked or looks_now)
        own = Own(
            local.grads,
            None if earlier is None else earlier.proof,
            None if self._is_checked else partial(self._prove, local),
            None if self._is_checked and was_exact else partial(self._look, local),
            local.largest,
        )
        return self._agreement.vote(own)

    def _prove(self, local: Local) -> Any:
        """Returns a cheap proof that one replica's gradients are finite now."""
        return proof_as_applied(self._loss_scale, local.grads, local.divisors)

    def _look(self, local: Local) -> Any:
        """Returns the exact flag of one replica, of then and now, within a branch."""
        earlier = None if local.earlier is None else local.earlier.finiteness.looked()
        if self._is_checked:
            return earlier
        grads = self._divided(local)
        values = floating_values([*grads, *rows.added(grads)])
        return both(earlier, each_is_finite(values))

    def agree(self, local: Local) -> Agreed:
        """Returns what the replicas know together."""

        def look() -> Any:
            found = replicas.call_for_each_replica(self._look, local)
            return replicas.local_result(found)

        return self._agreement.agree(
            local.vote,
            None if self._is_exact else look,
            grads=local.grads,
            groups=self._groups,
            largest=local.largest,
        )

    def adjust(self, agreed: Agreed, local: Local) -> Tuple[Any, Any]:
        """Tells the loss scale. Returns its update op, and whether to apply."""
        if self._follows_its_rule:
            return sharing.adjust(
                self._loss_scale, self._provenance, agreed.finiteness, agreed.largest
            )
        # A subclass that overrides update whole sees the gradients, and with them a
        # scalar that is finite only if the step was: they may have been clipped since.
        flag = tf.where(agreed.finiteness.exact(), 0.0, float("nan"))
        return tuple(self._loss_scale.update([*local.grads, flag]))

    def apply(self, local: Local) -> Any:
        """Applies one replica's gradients, with the inner optimizer."""
        grads = unpack(self._divided(local), self._groups)
        return self._apply_gradients(grads, local.variables.whole)

    def skip(self, local: Local, codes_of_sum: Any) -> Any:
        """Changes nothing but the record of what was at fault. For all replicas."""
        if self._entry is None:
            return None
        codes = replicas.call_for_each_replica(self._codes, local)
        skipped = replicas.local_result(self._loss_scale.skipped_steps)
        of_sum = replicas.local_result(codes_of_sum)
        return self._entry.write(codes, of_sum, local.losses, skipped)

    def _codes(self, local: Local) -> Any:
        """Returns the fault codes of one replica's gradients."""
        grads = self._divided(local)
        codes = faults.codes_of_each(grads, self._groups)
        if rows.any_may_repeat(grads):
            of_rows = faults.codes_of_each(rows.added(grads), self._groups)
            codes = tf.maximum(codes, of_rows)
        return faults.first_cause(local.earlier, codes)

    def _divided(self, local: Local) -> List[Any]:
        return divided(self._loss_scale, local.grads, local.divisors)

    def _meet(self, local: Local) -> Any:
        """Agrees, adjusts, and applies or skips, in a graph, for all replicas."""
        with self._provenance.ledger.step():
            return self._meet_in_graph(local)

    def _meet_in_graph(self, local: Local) -> Any:
        agreed = self.agree(local)
        update_op, should_apply = self.adjust(agreed, local)

        def apply() -> Any:
            done = replicas.call_for_each_replica(self.apply, local)
            return with_dependencies([done], True)

        def skip() -> Any:
            return with_dependencies([self.skip(local, agreed.codes_of_sum)], True)

        # A rule that applies every step needs no branch.
        if should_apply is True:
            return group_ops([apply(), update_op])
        is_alone = isinstance(self._agreement, Alone)
        otherwise = rarely(skip) if is_alone else skip
        return group_ops([either(should_apply, apply, otherwise), update_op])

    def _meet_eagerly(self, local: Local) -> Tuple[Any, Any]:
        agreed = self.agree(local)
        _, should_apply = self.adjust(agreed, local)
        return should_apply, agreed.codes_of_sum


class Whole:
    """Keeps tf.distribute from handing on one replica's copy of each variable.

    Optimizers expect the mirrored variable, in replica context too.
    """

    def __init__(self, variables: Any) -> None:
        self.whole = variables
