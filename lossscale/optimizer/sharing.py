"""SharedStep: one step of a loss scale that several optimizers share."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients.check import greater
from lossscale.optimizer.pending import PendingDivision
from lossscale.runtime import mode
from lossscale.runtime.aliases import Flag, Op, Scalar, Tensor, Variable
from lossscale.runtime.control import group_ops
from lossscale.runtime.graphs import (
    above_branches,
    branches_here,
    current_graph,
    visible_graphs,
)
from lossscale.scales.adjustment import adjust_to_step
from lossscale.scales.base import LossScale


class SharedStep:
    """A step of a shared loss scale that at least one optimizer has applied or skipped.

    Each optimizer, such as the two of a GAN, skips by its own gradients. The loss scale
    counts one step, which is bad if any optimizer's gradients were. Nobody knows which
    optimizer comes last. So each apply first sets the loss scale back to its state from
    before the step, then adjusts it by the AND of all flags so far. The count of
    skipped steps tells if an earlier flag was bad. What an optimizer's guard leaves out
    is no apply to the loss scale.

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
    def of(cls, division: PendingDivision) -> SharedStep:
        """Returns the step in which an optimizer applies now, a new one or the last."""
        step: Optional[SharedStep] = division.uses.shared_step
        if step is None or not step._continues(division):
            step = division.uses.shared_step = cls(division.loss_scale)
        step.applied[division] = branches_here()
        return step

    def _continues(self, division: PendingDivision) -> bool:
        if division in self.applied:
            # Of the two branches of a `tf.cond` only one runs.
            here, before = branches_here(), self.applied[division]
            if all(here.get(fork, branch) is branch for fork, branch in before.items()):
                return False
        if not any(self.graph is graph for graph in visible_graphs()):
            return False
        # Since then a checkpoint may have been restored, or the loss scale set.
        values = self.values_after
        return values is None or values == _values(division.loss_scale)

    def before(self, variable: Variable) -> Tensor:
        """Returns the value of a variable of the loss scale before the step."""
        return next(old for other, old in self._before if other is variable)

    def adjust(
        self,
        loss_scale: LossScale,
        is_finite: Flag,
        largest: Optional[Scalar],
        rule_learns: Flag,
    ) -> Tuple[Op, Flag]:
        """Adjusts the loss scale, as `adjust_to_step`, to all optimizers so far."""
        ignored = loss_scale.ignored_loss_steps
        # In a tf.compat.v1 graph only control dependencies order the operations.
        with tf.control_dependencies(self.update_ops):
            skipped = loss_scale.skipped_steps
            bad_before = tf.convert_to_tensor(skipped) - self.before(skipped)
            was_good = tf.equal(bad_before, 0)
            # That variable holds the greatest of this step so far.
            greatest = greater(largest, loss_scale.last_largest)
            if ignored is not None:
                # The rule learns of it if the gradients of any optimizer overflowed,
                # but not if all that was bad were losses.
                of_losses = tf.convert_to_tensor(ignored) - self.before(ignored)
                rule_learns = tf.where(is_finite, was_good, rule_learns)
                rule_learns = tf.logical_or(rule_learns, bad_before > of_losses)
        values = [was_good, greatest, rule_learns]
        read = [value for value in values if tf.is_tensor(value)]
        with tf.control_dependencies(read):
            restored = [v.assign(old, read_value=False) for v, old in self._before]
        with tf.control_dependencies([group_ops([read, restored])]):
            # An optimizer skips by its own gradients, the loss scale counts by all.
            all_good = tf.logical_and(is_finite, was_good)
            update_op, _ = adjust_to_step(loss_scale, all_good, greatest, rule_learns)
        return update_op, is_finite

    def note_adjusted(self, loss_scale: LossScale, update_op: Op) -> None:
        """The loss scale was adjusted, or a guard has left this apply out."""
        if mode.current().knows_values:
            self.values_after = _values(loss_scale)
        # An op within a branch cannot be waited for: it is done when the branch is.
        may_wait = update_op is not None and current_graph() is self.graph
        self.update_ops = [update_op] if may_wait else []


def _values(loss_scale: LossScale) -> List[Any]:
    return [variable.numpy().tolist() for variable in loss_scale.variables]
