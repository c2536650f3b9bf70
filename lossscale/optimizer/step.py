"""One step: unscale, check, reduce, judge, adjust, apply or skip.

Several optimizers may share one loss scale (`_SharedStep`). Nothing here knows a rule
of a loss scale, or a Keras.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any, Dict, List, Optional, Tuple, Union

import tensorflow as tf

from lossscale.gradients import arithmetic
from lossscale.gradients.bundle import (
    Bundle,
    check_as_applied,
    largest_before_clipping,
    magnitudes_of_rows,
    may_have_duplicates,
    row_sums_stay_finite,
)
from lossscale.gradients.check import (
    Check,
    clean,
    floating_values,
    greater,
    sum_stays_finite,
    worst_of_each,
)
from lossscale.optimizer.pending import PendingDivision
from lossscale.optimizer.record import Entry
from lossscale.runtime import mode, op_callbacks, replicas
from lossscale.runtime.aliases import ApplyFunction, Flag, Op, Scalar, Tensor, Variable
from lossscale.runtime.control import either, group_ops, not_inlined, run_either
from lossscale.runtime.graphs import (
    above_branches,
    branches_here,
    current_graph,
    visible_graphs,
)
from lossscale.scales.adjustment import adjust_to_step, would_apply
from lossscale.scales.base import LossScale, takes_the_flag


class Step:
    """One step of an optimizer. Read it from `run` down.

    ```
    run(bundle, apply):
      bundle = unscale(bundle)                   # one replica: later, where it applies
      bundle, contribution = check(bundle)       # on each replica
      agreed = reduce(contributions)             # from here on, for all replicas
      is_finite, is_told = judge(agreed)         # is the rule told of this step?
      should_apply = adjust(is_finite, is_told)  # the loss scale may leave it out
      if should_apply: apply(bundle)
      else: skip(bundle)                         # records why
    ```

    Every replica makes a `Step`. If replicas are threads (`replicas.merge_call`), the
    first one's acts for all from `reduce` on, so its attributes must be equal on all of
    them. What differs between replicas is in the bundle and in `apply`.

    A skipped step changes nothing but the loss scale's own state, the record of what
    was at fault, and the state of the step (`pending`).
    """

    def __init__(
        self,
        division: PendingDivision,
        reduction: Reduction,
        entry: Optional[Entry],
    ) -> None:
        """Begins a step. `entry` is where its faults are kept. None: nowhere."""
        self._division, self._loss_scale = division, division.loss_scale
        self._reduction, self._entry = reduction, entry
        #: The step of all optimizers that share the loss scale, None if none do.
        self._shared: Optional[_SharedStep] = None

    def run(self, bundle: Bundle, apply: ApplyFunction) -> Any:
        """Applies gradients, or skips them on all replicas.

        `apply` is called with the unscaled gradients, unless the step is skipped. In a
        graph it returns an op that does it all. None in eager mode.
        """
        with op_callbacks.paused():
            bundle = self.unscale(bundle)
            if not self._loss_scale.checks_gradients:
                return group_ops([apply(bundle.unscaled())])
            bundle, contribution = self._reduction.check(bundle)
            return replicas.merge_call(self._together, contribution, bundle, apply)

    def _together(
        self, contributions: Tensor, bundle: Bundle, apply: ApplyFunction
    ) -> Any:
        """Does the rest of the step, from `reduce` on: see `replicas.merge_call`."""
        with op_callbacks.paused():  # the thread may be another one than in `run`
            agreed = self._reduction.reduce(contributions, bundle)
            if self._division.is_shared:
                self._shared = _SharedStep.of(self._division)
            is_finite, is_told = self.judge(agreed, bundle)
            update_op, should_apply = self.adjust(
                is_finite, is_told, agreed.largest, bundle
            )
            done = run_either(
                should_apply,
                lambda: replicas.call_for_each_replica(
                    lambda local, apply: apply(local.unscaled()), bundle, apply
                ),
                lambda: not_inlined(lambda: self.skip(bundle, agreed, is_finite)),
            )
            return group_ops([done, update_op])

    def unscale(self, bundle: Bundle) -> Bundle:
        """Divides, or prepares for it: one replica leaves the division to the branch.

        It also packs small gradients, and finds their greatest magnitude if requested.
        """
        if bundle.has_duplicates:
            # They are summed only when they are applied: no earlier check covers that.
            bundle = bundle.but(is_checked=False)
        loss_scale = self._loss_scale
        if not (takes_the_flag(loss_scale) and loss_scale.checks_gradients):
            return bundle.divided()
        bundle = bundle.packed()
        if loss_scale.last_largest is not None:
            largest = largest_before_clipping(bundle)
            bundle = bundle.but(check=bundle.check._replace(largest=largest))
        # In the branch each quotient is used at once, which needs less memory. Several
        # replicas look at the quotients before.
        return bundle if replicas.count() == 1 else bundle.divided()

    def judge(self, agreed: Check, bundle: Bundle) -> Tuple[Flag, Flag]:
        """Tells whether the step is finite, and whether the rule is told of it.

        With nonfinite_loss="skip" it is not told of a bad loss, unless there are many.
        A good step looks at no loss.
        """
        is_finite, ignored_losses = agreed.exact(), self._division.ignored_losses
        if ignored_losses is None:
            return is_finite, True

        def look_at_losses() -> Flag:
            return ignored_losses.counts(self._reduction.loss_is_at_fault(bundle))

        return is_finite, either(is_finite, lambda: tf.constant(True), look_at_losses)

    def adjust(
        self, is_finite: Flag, is_told: Flag, largest: Optional[Scalar], bundle: Bundle
    ) -> Tuple[Op, Flag]:
        """Adjusts the loss scale. Returns its update op, and whether to apply."""
        known = self._loss_scale, is_finite, largest, is_told
        if self._shared is not None:
            return self._shared.adjust(*known)
        grads = None
        if not takes_the_flag(self._loss_scale):
            grads = replicas.call_for_each_replica(lambda local: local.grads, bundle)
        return adjust_to_step(*known, grads)

    def skip(self, bundle: Bundle, agreed: Check, is_finite: Flag) -> Any:
        """Records why the step is skipped. Nothing else changes."""
        entry, loss_scale = self._entry, self._loss_scale
        if entry is None:
            return None

        def overflowed() -> Op:
            is_of_loss = self._reduction.loss_is_at_fault(bundle)
            return entry.write_faults(bundle, agreed, is_of_loss)

        if not loss_scale.left_out_as:
            return overflowed()
        left_out = lambda: entry.write_left_out(bundle, agreed, loss_scale)  # noqa: E731
        return run_either(is_finite, left_out, overflowed)


class EqualReplicas:
    """One replica, or several with equal gradients, their sums: no flag crosses."""

    def check(self, bundle: Bundle) -> Tuple[Bundle, Flag]:
        """Returns the checked bundle, and what this replica contributes to `reduce`."""
        checked = check_as_applied(bundle)
        return checked, checked.check.exact()

    def reduce(self, contributions: Flag, bundle: Bundle) -> Check:
        """Returns the check of the whole step, given what all replicas contribute."""
        largest = replicas.local_result(bundle).check.largest
        return Check(replicas.local_result(contributions), largest=largest)

    def loss_is_at_fault(self, bundle: Bundle) -> Flag:
        """Tells whether an unscaled loss was not finite on any replica.

        Called in a branch of bad steps only. A sum of gradients does not show whether
        those of a good loss overflowed, too.
        """
        at_fault = lambda local: tf.cast(local.has_bad_loss(), tf.float32)  # noqa: E731
        bad = replicas.call_for_each_replica(at_fault, bundle)
        return replicas.all_reduce_sum(bad) > 0.0


class SeveralReplicas:
    """Several replicas: one scalar of each is all-reduced.

    ```
    a replica contributes   0             its gradients are finite, and small enough
                            1             finite, but the sum over replicas may overflow
                            replicas + 1  not finite
    the sum of these says   0             apply
                            1 to replicas add the gradients up, and look at the sum
                            more          skip
    ```

    Two float16 gradients of 4e4 are finite, and their sum is not. If the loss scale
    requests it, the greatest magnitude of each replica crosses in the same message.
    """

    def __init__(self, are_added: bool) -> None:
        """`are_added` tells whether the optimizer adds their gradients up."""
        self._are_added = are_added
        self._count = replicas.count()

    def check(self, bundle: Bundle) -> Tuple[Bundle, Tensor]:
        finite = 0.0
        if self._are_added:
            is_safe = sum_stays_finite(bundle.grads, self._count)
            if bundle.has_duplicates:
                rows_are_safe = row_sums_stay_finite(bundle, self._count)
                is_safe = tf.logical_and(is_safe, rows_are_safe)
            # What is safe to add up is finite: no other quick check is needed.
            finite = tf.where(is_safe, 0.0, 1.0)
            checked = check_as_applied(bundle, is_safe)
        else:
            checked = check_as_applied(bundle)
        is_finite, largest = checked.check.exact(), checked.check.largest
        contribution = tf.where(is_finite, finite, self._count + 1.0)
        if largest is None:
            return checked, contribution
        slots = replicas.in_own_slot(arithmetic.bounded(is_finite, largest))
        return checked, tf.concat([[contribution], slots], 0)

    def reduce(self, contributions: Tensor, bundle: Bundle) -> Check:
        """Sums what the replicas contribute: here it crosses. For all replicas."""
        total, largest = replicas.all_reduce_sum(contributions), None
        # Only the structure of this bundle is used, which is equal on all replicas.
        local = replicas.local_result(bundle)
        if local.check.largest is not None:
            total, largest = total[0], tf.reduce_max(total[1:])
        is_clear = tf.equal(total, 0.0)
        if not self._are_added:
            return Check(is_clear, largest=largest)

        def look_at_sum() -> Tuple[Flag, Tensor]:
            sums = [None] * len(local.groups)
            terms = replicas.call_for_each_replica(self._terms, bundle)
            for position, term in terms.items():
                sums[position] = replicas.all_reduce_sum(term)
            worst = worst_of_each(sums, local.groups)
            return tf.math.is_finite(tf.reduce_sum(worst)), worst

        is_in_doubt = tf.logical_and(total > 0.0, total < self._count + 1.0)
        nothing = clean(local.count)
        clear = lambda: (is_clear, nothing)  # noqa: E731
        is_finite, worst = tf.cond(is_in_doubt, look_at_sum, clear)
        return Check(is_finite, None, lambda: worst, largest)

    def loss_is_at_fault(self, bundle: Bundle) -> Flag:
        """Tells it, unless gradients of a good loss overflowed on another replica."""

        def faults(local: Bundle) -> Tensor:
            is_bad = local.has_bad_loss()
            is_good = tf.logical_or(is_bad, local.check.exact())
            return tf.cast(tf.stack([is_bad, tf.logical_not(is_good)]), tf.float32)

        found = replicas.call_for_each_replica(faults, bundle)
        losses, overflows = tf.unstack(replicas.all_reduce_sum(found))
        return tf.logical_and(losses > 0.0, tf.equal(overflows, 0.0))

    def _terms(self, bundle: Bundle) -> Dict[int, Tensor]:
        """Returns what one replica adds to the sum that is looked at, by position.

        The strategy chooses the order of the sum. Of three or more terms the magnitudes
        are summed: if that is finite, so is the sum in every order. Sparse gradients
        are concatenated, and their duplicate rows summed when they are applied.
        """
        as_added = tf.identity if self._count == 2 else tf.abs
        terms: Dict[int, Tensor] = {}
        for position, grad in enumerate(bundle.grads):
            is_sparse = isinstance(grad, tf.IndexedSlices)
            values = [] if is_sparse else floating_values([grad])
            if values:  # a complex gradient has two
                value = values[0] if len(values) == 1 else tf.stack(values)
                terms[position] = as_added(value)
            elif may_have_duplicates(grad) and grad.dense_shape is not None:
                terms[position] = magnitudes_of_rows(grad)
        return terms


Reduction = Union[EqualReplicas, SeveralReplicas]


class _SharedStep:
    """A step of a shared loss scale that at least one optimizer has applied or skipped.

    Each optimizer, such as the two of a GAN, skips by its own gradients. The loss scale
    counts one step, which is bad if any optimizer's gradients were. Nobody knows which
    optimizer comes last. So each apply first sets the loss scale back to its state from
    before the step, then adjusts it by the AND of all flags so far. The count of
    skipped steps tells if an earlier flag was bad.

    The step ends when one of its optimizers applies a second time, when another graph
    is built, or in eager mode when somebody has set the loss scale since. An apply in
    the other branch of the same `tf.cond` is no second one.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        #: The graph in which the step began; None in eager mode.
        self.graph = above_branches(current_graph())
        #: The optimizers that have called it, and the branches in which they did.
        self.applied: Any = weakref.WeakKeyDictionary()
        #: The last adjustment of the loss scale, for which the next one must wait.
        self.update_ops: List[Op] = []
        #: The loss scale's values after the last adjustment, in eager mode only.
        self.values_after: Optional[List[Any]] = None
        # These are read outside of the branch that applies, which may not run.
        outside = nullcontext() if self.graph is None else self.graph.as_default()
        with outside:
            #: Pairs of a variable of the loss scale and its value before the step.
            self._before = [(v, tf.convert_to_tensor(v)) for v in loss_scale.variables]
            largest = loss_scale.last_largest
            if largest is not None:  # it holds the greatest of this step so far
                self.update_ops = [group_ops([largest.assign(0.0, read_value=False)])]

    @classmethod
    def of(cls, division: PendingDivision) -> _SharedStep:
        """Returns the step in which an optimizer applies now, a new one or the last."""
        step: Optional[_SharedStep] = division.observer.shared_step
        if step is None or not step._goes_on(division):
            step = division.observer.shared_step = cls(division.loss_scale)
        step.applied[division] = branches_here()
        return step

    def _goes_on(self, division: PendingDivision) -> bool:
        """Tells whether `division` applies in this step, and not in a new one."""
        if division in self.applied:
            # Of the two branches of a `tf.cond` only one runs.
            here, before = branches_here(), self.applied[division]
            if all(here.get(fork, branch) is branch for fork, branch in before.items()):
                return False
        if not any(self.graph is graph for graph in visible_graphs()):
            return False
        # Since then somebody may have restored a checkpoint, or set the loss scale.
        return self.values_after is None or self.values_after == _values(
            division.loss_scale
        )

    def before(self, variable: Variable) -> Tensor:
        """Returns the value of a variable of the loss scale before the step."""
        return next(old for other, old in self._before if other is variable)

    def adjust(
        self,
        loss_scale: LossScale,
        is_finite: Flag,
        largest: Optional[Scalar],
        is_told: Flag,
    ) -> Tuple[Op, Flag]:
        """Adjusts the loss scale, as `Step.adjust`, to all optimizers so far."""
        ignored = loss_scale.ignored_loss_steps
        # In a tf.compat.v1 graph only control dependencies order the operations.
        with tf.control_dependencies(self.update_ops):
            skipped = loss_scale.skipped_steps
            bad_before = tf.convert_to_tensor(skipped) - self.before(skipped)
            was_good = tf.equal(bad_before, 0)
            # That variable holds the greatest of this step so far.
            greatest = greater(largest, loss_scale.last_largest)
            if ignored is not None:
                # The rule is told if the gradients of any optimizer overflowed, but
                # not if all that was bad were losses.
                of_losses = tf.convert_to_tensor(ignored) - self.before(ignored)
                is_told = tf.where(is_finite, was_good, is_told)
                is_told = tf.logical_or(is_told, bad_before > of_losses)
        read = [each for each in (was_good, greatest, is_told) if tf.is_tensor(each)]
        with tf.control_dependencies(read):
            restored = [v.assign(old, read_value=False) for v, old in self._before]
        with tf.control_dependencies([group_ops([read, restored])]):
            # An optimizer skips by its own gradients, the loss scale counts by all.
            should_apply = would_apply(loss_scale, is_finite, largest)
            should_apply = tf.convert_to_tensor(should_apply)
            all_good = tf.logical_and(is_finite, was_good)
            with tf.control_dependencies([should_apply]):
                update_op, _ = adjust_to_step(loss_scale, all_good, greatest, is_told)
        if mode.current().knows_values:
            self.values_after = _values(loss_scale)
        # An op within a branch cannot be waited for: it is done when the branch is.
        may_wait = update_op is not None and current_graph() is self.graph
        self.update_ops = [update_op] if may_wait else []
        return update_op, should_apply


def _values(loss_scale: LossScale) -> List[Any]:
    return [variable.numpy().tolist() for variable in loss_scale.variables]
