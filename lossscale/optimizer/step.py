"""One step: unscale, check, reduce, adjust, apply or skip.

Nothing here knows a rule of a loss scale, or a Keras.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients import rows
from lossscale.gradients.check import Check
from lossscale.optimizer.bundle import Bundle, largest_unscaled, unscale_and_check
from lossscale.optimizer.pending import Pending
from lossscale.optimizer.record import Entry
from lossscale.optimizer.reduction import FlagReduction
from lossscale.optimizer.sharing import adjust_together
from lossscale.runtime import callbacks, mode, replicas
from lossscale.runtime.aliases import ApplyFunction, Flag, Op, Tensor, Variable
from lossscale.runtime.control import group_ops, run_either
from lossscale.scales.base import LossScale
from lossscale.scales.spike_guard import SpikeGuard


class Step:
    """One step of an optimizer. Read it from `run` down.

    ```
    run(bundle, apply):
      bundle = unscale(bundle)                # one replica: later, where it applies
      bundle, contribution = check(bundle)    # on each replica
      agreed = reduce(contributions)          # from here on for all replicas at once
      should_apply = adjust(agreed)
      if should_apply: apply(bundle)   else: skip(bundle)
    ```

    Every replica makes a `Step`. From `reduce` on the first replica's acts for all, so
    that its attributes must be equal on all of them. What differs between replicas is
    in the bundle and in `apply`.

    Gradients are applied only if they were finite on every replica when they were
    unscaled, still are, and stay so when they are added up across replicas: two float16
    gradients of 4e4 are finite, their sum is not. A skipped step changes nothing but
    the loss scale's own state and the record of what was at fault.
    """

    def __init__(
        self, pending: Pending, reduction: FlagReduction, entry: Optional[Entry]
    ) -> None:
        """Begins a step. `entry` is where its faults are kept. None: nowhere."""
        self._pending = pending
        self._loss_scale = pending.loss_scale
        self._entry = entry
        self._reduction = reduction
        #: Whether the flag is all that the loss scale is told. A subclass that
        #: overrides `update` is given the gradients.
        self._is_told_the_flag = type(self._loss_scale).update is LossScale.update

    def run(self, bundle: Bundle, apply: ApplyFunction) -> Any:
        """Applies gradients, or skips them on all replicas.

        `apply` is called with the unscaled gradients, unless the step is skipped. In a
        graph it returns an op that does it all. None in eager mode.
        """
        with callbacks.paused():
            bundle = self.unscale(bundle)
            if not self._loss_scale.checks_gradients:
                return group_ops([apply(bundle.unscaled())])
            bundle, contribution = self._reduction.check(bundle)
            if not mode.current().knows_values:
                return replicas.merge_call(self._decide, contribution, bundle, apply)
            should_apply, agreed = replicas.merge_call(
                self._decide_eagerly, contribution, bundle
            )
            # Python's `if` can stay in replica context: no thread of a replica starts
            # anew.
            if bool(should_apply):
                apply(bundle.unscaled())
            else:
                replicas.merge_call(self.skip, bundle, agreed)
            return None

    def _decide(
        self, contributions: Tensor, bundle: Bundle, apply: ApplyFunction
    ) -> Any:
        """Builds the step from `reduce` on, in a graph, for all replicas at once."""
        with callbacks.paused():  # the thread may be another one than in `run`
            agreed = self._reduction.reduce(contributions, bundle)

            def apply_one(local: Bundle, apply: ApplyFunction) -> Any:
                return apply(local.unscaled())

            branches = (
                lambda: replicas.call_for_each_replica(apply_one, bundle, apply),
                lambda: self.skip(bundle, agreed),
            )
            update_op, should_apply = self.adjust(agreed, bundle)
            return group_ops([run_either(should_apply, *branches), update_op])

    def _decide_eagerly(
        self, contributions: Tensor, bundle: Bundle
    ) -> Tuple[Any, Check]:
        agreed = self._reduction.reduce(contributions, bundle)
        _, should_apply = self.adjust(agreed, bundle)
        return should_apply, agreed

    def unscale(self, bundle: Bundle) -> Bundle:
        """Divides, unless one replica leaves that to the branch."""
        # Duplicate rows are summed only when they are applied, so no earlier check
        # covers their sum.
        has_duplicates = rows.any_may_have_duplicates(bundle.grads)
        bundle = bundle.but(is_checked=bundle.is_checked and not has_duplicates)
        if not (self._is_told_the_flag and self._loss_scale.checks_gradients):
            return bundle.divided()
        bundle = bundle.packed()
        if self._loss_scale.last_largest is not None:
            check = bundle.check._replace(largest=largest_unscaled(bundle))
            bundle = bundle.but(check=check)
        # In the branch each quotient is used at once, which needs less memory. Several
        # replicas look at the quotients before.
        return bundle if replicas.count() == 1 else bundle.divided()

    def adjust(self, agreed: Check, bundle: Bundle) -> Tuple[Op, Flag]:
        """Tells the loss scale. Returns its update op, and whether to apply."""
        if self._is_told_the_flag:
            return adjust_together(self._pending, agreed)
        # The gradients may have been clipped since the check. A scalar that is NaN on
        # a bad step tells the subclass that they were not finite.
        grads = replicas.call_for_each_replica(lambda local: local.grads, bundle)
        flag = tf.where(agreed.exact(), 0.0, float("nan"))
        return tuple(self._loss_scale.update([*grads, flag]))

    def skip(self, bundle: Bundle, agreed: Check) -> Any:
        """Changes nothing but the record of what was at fault. For all replicas."""
        entry, loss_scale = self._entry, self._loss_scale
        if entry is None:
            return None

        def write_faults() -> Any:
            skipped = replicas.local_result(loss_scale.skipped_steps)
            return entry.write_faults(bundle, agreed, skipped)

        if not isinstance(loss_scale, SpikeGuard):
            return write_faults()
        write_spike = partial(entry.write_spike, bundle, agreed, loss_scale)
        is_spike = replicas.local_result(loss_scale.last_step_finite)
        return run_either(tf.convert_to_tensor(is_spike), write_spike, write_faults)


def aggregated(
    bundle: Bundle,
    variables: List[Variable],
    aggregate: Callable[[List[Any]], Any],
) -> Tuple[Bundle, List[Variable]]:
    """Returns gradients as the user's function aggregates them, and their variables.

    If a gradient was not finite before, the step is skipped, whatever the function
    returns. As in Keras, the function gets `(gradient, variable)` pairs of unscaled
    gradients, and returns pairs. It may wait for the other replicas, so it is called at
    every step.
    """
    grads, now = unscale_and_check(bundle)
    pairs = [(g, v) for g, v in zip(grads, variables) if g is not None]
    pairs = list(aggregate(pairs))
    found, trained = [g for g, _ in pairs], [v for _, v in pairs]
    check = bundle.check & now
    of_all = check.worst
    if of_all is not None:
        positions = {id(variable): i for i, variable in enumerate(variables)}
        # A variable that only the function returned had no gradient, and so no fault.
        of_others = len(variables)
        kept = [positions.get(id(variable), of_others) for variable in trained]
        check = check._replace(
            worst=lambda: tf.gather(tf.pad(of_all(), [[0, 1]]), kept)
        )
    nothing = [None] * len(found)
    unscaled = Bundle(bundle.loss_scale, found, nothing, check, losses=bundle.losses)
    return unscaled, trained
