"""One step: prepare, check, reduce, adjust, apply or skip."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Optional, Tuple

from lossscale.gradients.bundle import Bundle, largest_before_clipping
from lossscale.gradients.check import Check
from lossscale.optimizer.pending import PendingDivision
from lossscale.optimizer.record import Entry
from lossscale.optimizer.reduction import Reduction
from lossscale.optimizer.sharing import SharedStep
from lossscale.runtime import op_callbacks, replicas
from lossscale.runtime.aliases import ApplyFunction, Flag, Op, Tensor
from lossscale.runtime.control import group_ops, not_inlined, run_either
from lossscale.scales.adjustment import adjust_to_step
from lossscale.scales.base import LossScale
from lossscale.scales.guard import Guard
from lossscale.scales.ignored_losses import IgnoredLosses


@dataclass(eq=False)
class Step:
    """One step of an optimizer. Read it from `run` down.

    ```
    run(bundle, apply_fn):
      bundle = prepare(bundle)                     # several replicas divide here
      bundle, contribution = check(bundle)         # on each replica
      check = reduce(contributions)                # from here on, for all replicas
      should_apply = adjust(check)                 # the guard, if any, and the rule
      if should_apply: apply_fn(bundle.unscaled_gradients())     # one divides here
      else: skip(bundle, check)                    # records why
    ```

    Every replica makes a `Step`. If replicas are threads (`replicas.merge_call`), the
    first one's acts for all from `reduce` on, so its attributes must be equal on all of
    them. What differs between replicas is in the bundle and in `apply_fn`.

    A skipped step changes nothing but the state of the loss scale and the guard, the
    record of what was at fault, the state of the step, and the optimizer's level of
    ignored losses, with nonfinite_loss="skip".
    """

    loss_scale: LossScale
    guard: Optional[Guard]
    #: Which bad losses the rule does not learn of. None: it learns of all.
    ignored_losses: Optional[IgnoredLosses]
    #: By it other optimizers that share the loss scale are known.
    division: PendingDivision
    reduction: Reduction
    #: Where is recorded why the step was skipped. None: nowhere.
    entry: Optional[Entry]

    @op_callbacks.paused()
    def run(self, bundle: Bundle, apply_fn: ApplyFunction) -> Any:
        """Does it all. In a graph it returns an op that does, None in eager mode."""
        if not self.loss_scale.checks_gradients:
            return group_ops([_apply(bundle, apply_fn)])
        bundle, contribution = self.reduction.check(self.prepare(bundle))
        return replicas.merge_call(self._decide, contribution, bundle, apply_fn)

    @op_callbacks.paused()  # the thread may be another one than in `run`
    def _decide(
        self, contributions: Tensor, bundle: Bundle, apply_fn: ApplyFunction
    ) -> Any:
        """Does the rest of the step, from `reduce` on: see `replicas.merge_call`."""
        check = self.reduction.reduce(contributions, bundle)
        op, should_apply, is_usual = self.adjust(check, bundle)
        apply = partial(replicas.call_for_each_replica, _apply, bundle, apply_fn)
        skip = partial(not_inlined, partial(self.skip, bundle, check, is_usual))
        return group_ops([run_either(should_apply, apply, skip), op])

    def prepare(self, bundle: Bundle) -> Bundle:
        """Packs small gradients, and finds their greatest magnitude if requested.

        Several replicas divide now. One replica leaves that to the branch. A loss scale
        with its own `update` takes unscaled gradients, so then all divide now, and
        nothing is packed.
        """
        if bundle.has_duplicates:
            # Duplicate rows are summed only when they are applied, so no earlier check
            # covers their sum.
            bundle = bundle.but(is_checked=False)
        takes_flag = self.loss_scale._takes_flag
        bundle = bundle.packed() if takes_flag else bundle.divided()
        if self.loss_scale.last_largest is not None:
            largest = largest_before_clipping(bundle)
            bundle = bundle.but(check=bundle.check._replace(largest=largest))
        # In the branch each quotient is used at once, which needs less memory. Several
        # replicas check the quotients before the branch.
        may_wait = takes_flag and replicas.count() == 1
        return bundle if may_wait else bundle.divided()

    def adjust(self, check: Check, bundle: Bundle) -> Tuple[Op, Any, Any]:
        """Has the guard judge the step, and the loss scale learn of it."""
        is_finite, learns, grads, shared = check.exact(), True, None, None
        if self.ignored_losses is not None:
            at_fault = partial(self.reduction.loss_is_at_fault, bundle)
            learns = self.ignored_losses.rule_learns(is_finite, at_fault)
        if self.division.is_shared:
            shared = SharedStep.of(self.division)
        if not self.loss_scale._takes_flag:
            grads = replicas.call_for_each_replica(lambda local: local.grads, bundle)
        step = is_finite, check.largest, learns
        others: Any = {"guard": self.guard, "grads": grads, "shared": shared}
        op, should_apply, is_usual = adjust_to_step(self.loss_scale, *step, **others)
        if shared is not None:
            shared.note_adjusted(self.division, op)
        return op, should_apply, is_usual

    def skip(self, bundle: Bundle, check: Check, is_usual: Flag) -> Any:
        """Records why the step is skipped. Nothing else changes."""
        entry = self.entry
        if entry is None:
            return None
        at_fault = self.reduction.loss_is_at_fault
        write_faults = partial(entry.write_faults, bundle, check, at_fault)
        if self.guard is None and self.loss_scale._takes_flag:
            return write_faults()
        by_guard = partial(entry.write_left_out, bundle, check, self.guard)

        def write_left_out() -> Any:
            if self.loss_scale._takes_flag:
                return by_guard()
            return run_either(is_usual, entry.write_left_out_by_update, by_guard)

        return run_either(check.exact(), write_left_out, write_faults)


def _apply(bundle: Bundle, apply_fn: ApplyFunction) -> Any:
    return apply_fn(bundle.unscaled_gradients())
