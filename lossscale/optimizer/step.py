"""One step: unscale, check, reduce, judge, adjust, apply or skip.

Several optimizers may share one loss scale (`_SharedStep`). Nothing here knows a rule
of a loss scale, or a Keras.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any, Callable, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients import rows
from lossscale.gradients.check import Check, greater
from lossscale.optimizer.bundle import Bundle, largest_unscaled, unscale_and_check
from lossscale.optimizer.pending import PendingDivision
from lossscale.optimizer.record import Entry
from lossscale.optimizer.reduction import FlagReduction
from lossscale.runtime import mode, op_callbacks, replicas
from lossscale.runtime.aliases import ApplyFunction, Flag, Op, Scalar, Tensor, Variable
from lossscale.runtime.control import either, group_ops, run_either
from lossscale.runtime.graphs import (
    above_branches,
    branches_here,
    current_graph,
    visible_graphs,
)
from lossscale.scales.base import (
    LossScale,
    State,
    adjust_known,
    must_be_told,
    takes_the_flag,
    untold_steps,
)


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

    Every replica makes a `Step`. From `reduce` on the first replica's acts for all, so
    that its attributes must be equal on all of them. What differs between replicas is
    in the bundle and in `apply`.

    A skipped step changes nothing but the loss scale's own state, the record of what
    was at fault, and the state of the step (`pending`).
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
        self._pending, self._loss_scale = pending, pending.loss_scale
        self._reduction, self._entry = reduction, entry
        self._skips_losses = skips_losses
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
        """Does the rest of the step, from `reduce` on, for all replicas at once."""
        with op_callbacks.paused():  # the thread may be another one than in `run`
            agreed = self._reduction.reduce(contributions, bundle)
            is_finite, is_told = self.judge(agreed, bundle)
            update_op, should_apply = self.adjust(
                is_finite, is_told, agreed.largest, bundle
            )
            done = run_either(
                should_apply,
                lambda: replicas.call_for_each_replica(
                    lambda local, apply: apply(local.unscaled()), bundle, apply
                ),
                lambda: self.skip(bundle, agreed, is_finite),
            )
            return group_ops([done, update_op])

    def unscale(self, bundle: Bundle) -> Bundle:
        """Divides, unless one replica leaves that to the branch."""
        if rows.any_may_have_duplicates(bundle.grads):
            # They are summed only when they are applied: no earlier check covers that.
            bundle = bundle.but(is_checked=False)
        loss_scale = self._loss_scale
        if not (takes_the_flag(loss_scale) and loss_scale.checks_gradients):
            return bundle.divided()
        bundle = bundle.packed()
        if loss_scale.last_largest is not None:
            check = bundle.check._replace(largest=largest_unscaled(bundle))
            bundle = bundle.but(check=check)
        # In the branch each quotient is used at once, which needs less memory. Several
        # replicas look at the quotients before.
        return bundle if replicas.count() == 1 else bundle.divided()

    def judge(self, agreed: Check, bundle: Bundle) -> Tuple[Flag, Flag]:
        """Tells whether the step is finite, and whether the rule is told of it.

        With nonfinite_loss="skip" it is not told of a bad loss. A good step looks at no
        loss.
        """
        if self._pending.is_shared and takes_the_flag(self._loss_scale):
            self._shared = _SharedStep.of(self._pending)
        if not self._skips_losses:
            return agreed.exact(), True

        def look() -> Tuple[Flag, Flag]:
            is_finite = agreed.exact_in_branch()
            in_a_row = self._loss_scale.consecutive_skipped_steps
            if self._shared is not None:
                in_a_row = self._shared.before(in_a_row)
            is_told = must_be_told(in_a_row)
            is_of_loss = self._reduction.loss_is_at_fault(bundle)
            is_told = tf.logical_or(is_told, tf.logical_not(is_of_loss))
            return is_finite, tf.logical_or(is_finite, is_told)

        good = lambda: (tf.constant(True), tf.constant(True))  # noqa: E731
        flags: Tuple[Flag, Flag] = either(agreed.quick, good, look)
        return flags

    def adjust(
        self, is_finite: Flag, is_told: Flag, largest: Optional[Scalar], bundle: Bundle
    ) -> Tuple[Op, Flag]:
        """Adjusts the loss scale. Returns its update op, and whether to apply."""
        known = self._loss_scale, is_finite, largest, is_told
        if self._shared is not None:
            return self._shared.adjust(*known)
        if takes_the_flag(self._loss_scale):
            return adjust_known(*known)
        grads = replicas.call_for_each_replica(lambda local: local.grads, bundle)
        return adjust_known(*known, grads)

    def skip(self, bundle: Bundle, agreed: Check, is_finite: Flag) -> Any:
        """Records why the step is left out. Nothing else changes."""
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


class _SharedStep:
    """A step of a shared loss scale in which at least one optimizer has applied.

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
        #: The optimizers that have applied in this step, and the branches they are in.
        self.applied: Any = weakref.WeakKeyDictionary()
        #: The last adjustment of the loss scale, for which the next one must wait.
        self.update_ops: List[Op] = []
        #: The loss scale's values after it, in eager mode only.
        self.left: Optional[List[Any]] = None
        # These are read outside of the branch that applies, which may not run.
        outside = nullcontext() if self.graph is None else self.graph.as_default()
        with outside:
            held = [*loss_scale.variables, untold_steps(loss_scale)]
            #: Pairs of a variable of the loss scale and its value before the step.
            self._before = [(v, tf.convert_to_tensor(v)) for v in held if v is not None]
            largest = loss_scale.last_largest
            if largest is not None:  # it holds the greatest of this step so far
                self.update_ops = [group_ops([largest.assign(0.0, read_value=False)])]

    @classmethod
    def of(cls, member: PendingDivision) -> _SharedStep:
        """Returns the step in which an optimizer applies now, a new one or the last."""
        step: Optional[_SharedStep] = member.observer.shared_step
        if step is None or not step._goes_on(member):
            step = member.observer.shared_step = cls(member.loss_scale)
        step.applied[member] = branches_here()
        return step

    def _goes_on(self, member: PendingDivision) -> bool:
        """Tells whether `member` applies in this step, and not in a new one."""
        if member in self.applied:
            # Of the two branches of a `tf.cond` only one runs.
            here, before = branches_here(), self.applied[member]
            if all(here.get(fork, branch) is branch for fork, branch in before.items()):
                return False
        if not any(self.graph is graph for graph in visible_graphs()):
            return False
        # Since then somebody may have restored a checkpoint, or set the loss scale.
        return self.left is None or self.left == _values(member.loss_scale)

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
        untold = untold_steps(loss_scale)
        # In a tf.compat.v1 graph only control dependencies order the operations.
        with tf.control_dependencies(self.update_ops):
            skipped = loss_scale.skipped_steps
            bad_before = tf.convert_to_tensor(skipped) - self.before(skipped)
            was_good = tf.equal(bad_before, 0)
            # That variable holds the greatest of this step so far.
            greatest = greater(largest, loss_scale.last_largest)
            if untold is not None:
                # One overflow of any optimizer is told. Without, one bad loss is not.
                of_losses = tf.convert_to_tensor(untold) - self.before(untold)
                is_told = tf.where(is_finite, was_good, is_told)
                is_told = tf.logical_or(is_told, bad_before > of_losses)
        read = [each for each in (was_good, greatest, is_told) if tf.is_tensor(each)]
        with tf.control_dependencies(read):
            restored = [v.assign(old, read_value=False) for v, old in self._before]
        with tf.control_dependencies([group_ops([read, restored])]):
            # An optimizer skips by its own gradients, the loss scale counts by all.
            verdict = loss_scale.judge(State(loss_scale), is_finite, largest)
            should_apply = tf.convert_to_tensor(verdict.should_apply)
            all_good = tf.logical_and(is_finite, was_good)
            with tf.control_dependencies([should_apply]):
                update_op, _ = adjust_known(loss_scale, all_good, greatest, is_told)
        if mode.current().knows_values:
            self.left = _values(loss_scale)
        # An op within a branch cannot be waited for: it is done when the branch is.
        may_wait = update_op is not None and current_graph() is self.graph
        self.update_ops = [update_op] if may_wait else []
        return update_op, should_apply


def _values(loss_scale: LossScale) -> List[Any]:
    return [variable.numpy().tolist() for variable in loss_scale.variables]


def aggregated(
    bundle: Bundle, variables: List[Variable], aggregate: Callable[[List[Any]], Any]
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
