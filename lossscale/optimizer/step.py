"""One step: unscale, check, reduce, adjust, apply or skip.

Several optimizers may share one loss scale (`adjust_together`). Nothing here knows a
rule of a loss scale, or a Keras.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients import arithmetic, rows
from lossscale.gradients.check import Check
from lossscale.optimizer.bundle import Bundle, largest_unscaled, unscale_and_check
from lossscale.optimizer.pending import PendingDivision
from lossscale.optimizer.record import Entry
from lossscale.optimizer.reduction import FlagReduction
from lossscale.runtime import mode, op_callbacks, replicas
from lossscale.runtime.aliases import ApplyFunction, Flag, Op, Tensor, Variable
from lossscale.runtime.control import either, group_ops, run_either
from lossscale.runtime.graphs import (
    above_branches,
    branches_here,
    current_graph,
    visible_graphs,
)
from lossscale.scales.base import (
    LossScale,
    Verdict,
    adjust_known,
    judged,
    left_out_as,
    untold_steps,
)


class Step:
    """One step of an optimizer. Read it from `run` down.

    ```
    run(bundle, apply):
      bundle = unscale(bundle)                # one replica: later, where it applies
      bundle, contribution = check(bundle)    # on each replica
      agreed = reduce(contributions)          # from here on for all replicas at once
      verdict = judge(agreed)                 # the loss scale's
      if verdict.should_apply: adjust(True), apply(bundle)
      else: skip(bundle, why)                 # adjusts to why, and records it
    ```

    Every replica makes a `Step`. From `reduce` on the first replica's acts for all, so
    that its attributes must be equal on all of them. What differs between replicas is
    in the bundle and in `apply`.

    A skipped step changes nothing but the loss scale's own state and the record of what
    was at fault.
    """

    def __init__(
        self,
        pending: PendingDivision,
        reduction: FlagReduction,
        entry: Optional[Entry],
        skips_losses: bool = False,
    ) -> None:
        """Begins a step. `entry` is where its faults are kept. None: nowhere.

        `skips_losses` tells whether nonfinite_loss is "skip".
        """
        self._pending = pending
        self._loss_scale = pending.loss_scale
        self._entry = entry
        self._reduction = reduction
        self._skips_losses = skips_losses
        #: Whether the flag is all that the loss scale is told. A subclass that
        #: overrides `update` is given the gradients.
        self._is_told_the_flag = type(self._loss_scale).update is LossScale.update

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
        """Does the rest of the step, from `reduce` on, for all replicas at once."""
        with op_callbacks.paused():  # the thread may be another one than in `run`
            agreed = self._reduction.reduce(contributions, bundle)

            def apply_all() -> Any:
                return replicas.call_for_each_replica(
                    lambda local, apply: apply(local.unscaled()), bundle, apply
                )

            if not self.adjusts_in_branch():
                update_op, should_apply = self.adjust(agreed, bundle)
                done = run_either(
                    should_apply, apply_all, lambda: self.skip(bundle, agreed)
                )
                return group_ops([done, update_op])

            def adjust(is_finite: bool, verdict: Optional[Verdict] = None) -> Op:
                known = self._loss_scale, is_finite, agreed.largest
                # The name of a variable that a rule creates must not show the branch.
                with tf.name_scope(""):
                    return adjust_known(*known, verdict)[0]

            is_finite, has_adjusted = self.decide(agreed, adjust)
            verdict = judged(self._loss_scale, is_finite, agreed.largest)
            applied = Verdict(True, kept=verdict.kept)
            left_out = Verdict(False, kept=verdict.kept)
            done = run_either(
                verdict.should_apply,
                lambda: [None if has_adjusted else adjust(True, applied), apply_all()],
                lambda: self.skip(
                    *(bundle, agreed, is_finite),
                    lambda is_finite, is_told: adjust(
                        is_finite, left_out._replace(is_told=is_told)
                    ),
                ),
            )
            return group_ops([done])

    def adjusts_in_branch(self) -> bool:
        """Tells whether the branch that applies or skips adjusts the loss scale, too.

        The loss scale must be told by its own `adjust`. A shared one is first set back.
        XLA fuses the rule, and a branch would copy variables in and out: it pays only
        where a bad loss must be told from an overflow. In a session nothing orders what
        branches read, and in replica context none can assign to mirrored variables.
        """
        kind, here = type(self._loss_scale), mode.current()
        return (
            self._is_told_the_flag
            and kind.adjust is LossScale.adjust
            and not self._pending.is_shared
            and not (here.by_xla and not self._skips_losses)
            and not here.runs_parts
            and (replicas.count() == 1 or tf.distribute.in_cross_replica_context())
        )

    def decide(self, agreed: Check, adjust: Callable[[bool], Op]) -> Tuple[Flag, bool]:
        """Returns the exact flag, and whether a good step was adjusted to already.

        A graph has a branch for the exact check. In there it also runs the rule if a
        good step would do more than to count itself, which is rare.
        """
        del adjust
        return agreed.exact(), False

    def unscale(self, bundle: Bundle) -> Bundle:
        """Divides, unless one replica leaves that to the branch."""
        if rows.any_may_have_duplicates(bundle.grads):
            # They are summed only when they are applied: no earlier check covers that.
            bundle = bundle.but(is_checked=False)
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
        is_untold = None
        if self._skips_losses:
            agreed = agreed._replace(quick=agreed.exact(), exact_check=None)
            is_untold = either(
                agreed.quick,
                lambda: tf.constant(False),
                lambda: self._reduction.loss_is_at_fault(bundle),
            )
        if self._is_told_the_flag:
            return adjust_together(self._pending, agreed, is_untold)
        # The gradients may have been clipped since the check. A scalar that is infinite
        # on a bad step tells the subclass that they were not finite.
        grads = replicas.call_for_each_replica(lambda local: local.grads, bundle)
        flag = arithmetic.infinite_unless(agreed.exact())
        return _unless_untold(
            is_untold,
            self._loss_scale,
            lambda: tuple(self._loss_scale.update([*grads, flag])),
        )

    def skip(
        self,
        bundle: Bundle,
        agreed: Check,
        is_finite: Optional[Flag] = None,
        adjust: Optional[Callable[[bool, Flag], Op]] = None,
    ) -> Any:
        """Adjusts the loss scale to why the step is left out, and records it.

        Nothing else changes. For all replicas. `adjust` is told whether the step was
        finite, and whether the rule is told of it. Without these two the loss scale was
        told before.
        """
        entry, loss_scale = self._entry, self._loss_scale

        def overflowed() -> List[Any]:
            if entry is None and not self._skips_losses:
                return [adjust and adjust(False, True)]
            is_of_loss = self._reduction.loss_is_at_fault(bundle)
            is_told: Flag = True
            if self._skips_losses:
                is_told = tf.logical_not(is_of_loss)
            done = [adjust and adjust(False, is_told)]
            if entry is not None:
                done.append(entry.write_faults(bundle, agreed, is_of_loss))
            return done

        def left_out() -> List[Any]:
            done = [adjust and adjust(True, False)]
            if entry is not None:
                done.append(entry.write_left_out(bundle, agreed, loss_scale))
            return done

        if not left_out_as(loss_scale):
            return overflowed()
        if is_finite is None:
            is_finite = replicas.local_result(loss_scale.last_step_finite)
        return run_either(tf.convert_to_tensor(is_finite), left_out, overflowed)


class _SharedStep:
    """A step of a shared loss scale in which at least one optimizer has applied.

    Each optimizer, such as the two of a GAN, skips by its own gradients. The loss scale
    counts one step, which is bad if any optimizer's gradients were. Nobody knows which
    optimizer comes last. So each apply first sets the loss scale back to its state from
    before the step, then adjusts it by the AND of all flags so far. The count of
    skipped steps tells if an earlier flag was bad.

    The step ends when one of its optimizers applies a second time, or when another
    graph is built. An apply in the other branch of the same `tf.cond` is no second one.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        #: The graph in which the step began; None in eager mode.
        self.graph = above_branches(current_graph())
        #: The optimizers that have applied in this step, and the branches they are in.
        self.applied: Any = weakref.WeakKeyDictionary()
        #: The last adjustment of the loss scale, for which the next one must wait.
        self.update_ops: List[Op] = []
        #: The loss scale's values after it, in eager mode only.
        self.left: Optional[List[Any]] = None
        # These are read outside of the branch that applies, which may not run.
        outside = nullcontext() if self.graph is None else self.graph.as_default()
        with outside:
            #: Pairs of a variable of the loss scale and its value before the step.
            variables = list(loss_scale.variables)
            untold = untold_steps(loss_scale)
            variables += [] if untold is None else [untold]
            self.before = [(v, tf.convert_to_tensor(v)) for v in variables]
            largest = loss_scale.last_largest
            if largest is not None:  # it holds the greatest of this step so far
                self.update_ops = [group_ops([largest.assign(0.0, read_value=False)])]

    def since(self, variable: Variable) -> Tensor:
        """Returns by how much a counter has grown since before the step."""
        (old,) = [old for other, old in self.before if other is variable]
        return tf.convert_to_tensor(variable) - old

    def goes_on(self, member: Any, loss_scale: LossScale) -> bool:
        """Tells whether `member` applies in this step, and not in a new one."""
        if member in self.applied:
            # Of the two branches of a `tf.cond` only one runs.
            here, before = branches_here(), self.applied[member]
            if all(here.get(fork, branch) is branch for fork, branch in before.items()):
                return False
        if not any(self.graph is graph for graph in visible_graphs()):
            return False
        # Since then somebody may have restored a checkpoint, or set the loss scale.
        return self.left is None or self.left == _values(loss_scale)


def adjust_together(
    member: PendingDivision, check: Check, is_untold: Optional[Flag]
) -> Tuple[Op, Flag]:
    """Adjusts a loss scale to a step that one of its optimizers applies or skips.

    `check` covers this optimizer's gradients on all replicas. `is_untold` tells whether
    a bad loss made them so, of which the rule is not told; None: it is told of all.
    Returns the update op, None in eager mode, and whether this optimizer applies the
    step.
    """
    loss_scale = member.loss_scale
    is_finite = check.exact()
    if not member.is_shared:
        adjust = partial(adjust_known, loss_scale, is_finite, check.largest)
        return _unless_untold(is_untold, loss_scale, adjust)
    step: Optional[_SharedStep] = member.observer.shared_step
    if step is None or not step.goes_on(member, loss_scale):
        step = member.observer.shared_step = _SharedStep(loss_scale)
    step.applied[member] = branches_here()
    untold = untold_steps(loss_scale)
    # In a tf.compat.v1 graph only control dependencies order the operations.
    with tf.control_dependencies(step.update_ops):
        bad_before = step.since(loss_scale.skipped_steps)
        was_good = tf.equal(bad_before, 0)
        known = []
        if check.largest is not None:
            so_far = tf.convert_to_tensor(loss_scale.last_largest)
            known = [tf.maximum(check.largest, so_far)]
        if untold is not None:
            # One overflow of any optimizer is told. Without, one bad loss is not.
            is_overflow = tf.logical_not(is_finite)
            if is_untold is not None:
                is_overflow = tf.logical_and(is_overflow, tf.logical_not(is_untold))
            was_overflow = bad_before > step.since(untold)
            is_overflow = tf.logical_or(is_overflow, was_overflow)
            is_good = tf.logical_and(is_finite, was_good)
            is_untold = tf.logical_not(tf.logical_or(is_good, is_overflow))
    with tf.control_dependencies([was_good, *known]):
        restored = [v.assign(old, read_value=False) for v, old in step.before]
    with tf.control_dependencies([group_ops([was_good, restored])]):
        # An optimizer skips by its own gradients, the loss scale counts by all flags.
        verdict = judged(loss_scale, is_finite, check.largest)
        should_apply = tf.convert_to_tensor(verdict.should_apply)
        all_good = tf.logical_and(is_finite, was_good)
        with tf.control_dependencies([should_apply]):
            update_op, _ = _unless_untold(
                is_untold, loss_scale, lambda: loss_scale.adjust(all_good, *known)
            )
    if mode.current().knows_values:
        step.left = _values(loss_scale)
    # An op within a branch cannot be waited for: it is done when the branch is.
    may_wait = update_op is not None and current_graph() is step.graph
    step.update_ops = [update_op] if may_wait else []
    return update_op, should_apply


def _unless_untold(
    is_untold: Optional[Flag],
    loss_scale: LossScale,
    adjust: Callable[[], Tuple[Op, Flag]],
) -> Tuple[Op, Flag]:
    """Returns what `adjust` does, unless the rule is told nothing of this step."""
    if is_untold is None:
        return adjust()

    def told() -> Flag:
        update_op, should_apply = adjust()
        with tf.control_dependencies([group_ops([update_op])]):
            return tf.identity(should_apply)

    def untold() -> Flag:
        largest = None if loss_scale.last_largest is None else float("inf")
        verdict = Verdict(False, is_told=False)
        update_op, _ = adjust_known(loss_scale, False, largest, verdict)
        with tf.control_dependencies([group_ops([update_op])]):
            return tf.constant(False)

    should_apply = either(is_untold, untold, told)
    return group_ops([should_apply]), should_apply


def _values(loss_scale: LossScale) -> List[Any]:
    return [variable.numpy().tolist() for variable in loss_scale.variables]


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
        kept = [positions.get(id(variable), len(variables)) for variable in trained]
        check = check._replace(
            worst=lambda: tf.gather(tf.pad(of_all(), [[0, 1]]), kept)
        )
    nothing = [None] * len(found)
    unscaled = Bundle(bundle.loss_scale, found, nothing, check, losses=bundle.losses)
    return unscaled, trained
