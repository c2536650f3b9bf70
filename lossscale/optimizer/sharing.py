"""SharedStep: one step of a loss scale that several optimizers share."""

from __future__ import annotations

import weakref
from contextlib import contextmanager, nullcontext
from typing import Any, Iterator, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients.arithmetic import bounded
from lossscale.optimizer.pending import PendingDivision
from lossscale.runtime import graphs, mode
from lossscale.runtime.aliases import Flag, Op, Scalar, Tensor, Variable
from lossscale.runtime.control import group_ops
from lossscale.scales.base import LossScale


class SharedStep:
    """A step of a shared loss scale that at least one optimizer has applied or skipped.

    Each optimizer, such as the two of a GAN, skips by its own gradients. The loss scale
    counts one step, which is bad if any optimizer's gradients were. Nobody knows which
    optimizer comes last. So each apply sets the loss scale back to its state from
    before the step, then adjusts it by the AND of all flags so far. The count of
    skipped steps tells if an earlier flag was bad. What a guard leaves out is no apply.

    The step ends when one of its optimizers applies a second time, when another graph
    is built, or in eager mode when somebody has set the loss scale since. An apply in
    the other branch of the same `tf.cond` is no second one.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self._loss_scale = loss_scale
        #: The graph in which the step began; None in eager mode.
        self.graph = graphs.above_branches(graphs.current_graph())
        #: The optimizers that have called it, and the branches in which they did.
        self.applied: Any = weakref.WeakKeyDictionary()
        #: The last adjustment of the loss scale, for which the next one must wait.
        self.update_ops: List[Op] = []
        #: Whether the loss scale has learned of an apply, as far as Python sees.
        self._has_learned = False
        #: What must be read before the loss scale is set back.
        self.read: List[Tensor] = []
        #: The loss scale's values after the last adjustment, in eager mode only.
        self.values_after: Optional[List[Any]] = None
        # These are read outside of the branch that applies, which may not run.
        outside = nullcontext() if self.graph is None else self.graph.as_default()
        with outside:
            #: Pairs of a variable of the loss scale and its value before the step.
            self._before = [(v, tf.convert_to_tensor(v)) for v in loss_scale.variables]
            if self.graph is not None and loss_scale.greatest_so_far is not None:
                zeroed = loss_scale.greatest_so_far.assign(0.0, read_value=False)
                self.update_ops = [group_ops([zeroed])]

    @classmethod
    def of(cls, division: PendingDivision) -> SharedStep:
        """Returns the step in which an optimizer applies now, a new one or the last."""
        step: Optional[SharedStep] = division.uses.shared_step
        is_last = step is not None and step._continues(division)
        return step if is_last else cls(division.loss_scale)  # type: ignore[return-value]

    def _continues(self, division: PendingDivision) -> bool:
        if division in self.applied:
            # Of the two branches of a `tf.cond` only one runs.
            here, before = graphs.branches_here(), self.applied[division]
            if all(here.get(fork, branch) is branch for fork, branch in before.items()):
                return False
        if not any(self.graph is graph for graph in graphs.visible_graphs()):
            return False
        # Since then a checkpoint may have been restored, or the loss scale set.
        values = self.values_after
        return values is None or values == _values(division.loss_scale)

    def before(self, variable: Variable) -> Tensor:
        """Returns the value of a variable of the loss scale before the step."""
        return next(old for other, old in self._before if other is variable)

    def joined(
        self, is_finite: Flag, largest: Optional[Scalar], rule_learns: Flag
    ) -> Tuple[Flag, Optional[Scalar], Flag]:
        """Returns these arguments of `adjust_to_step` for all optimizers so far."""
        scale = self._loss_scale
        skipped, ignored = scale.skipped_steps, scale.ignored_loss_steps
        # In a tf.compat.v1 graph only control dependencies order the operations.
        with tf.control_dependencies(self.update_ops):
            bad_before = tf.convert_to_tensor(skipped) - self.before(skipped)
            was_good = tf.equal(bad_before, 0)
            if scale.greatest_so_far is None:
                largest = None
            else:
                largest = bounded(is_finite, largest)
                if self.graph is not None or self._has_learned:
                    largest = tf.maximum(largest, scale.greatest_so_far)
            if ignored is not None:
                # The rule learns of it if the gradients of any optimizer overflowed,
                # but not if all that was bad were losses.
                of_losses = tf.convert_to_tensor(ignored) - self.before(ignored)
                rule_learns = tf.where(is_finite, was_good, rule_learns)
                rule_learns = tf.logical_or(rule_learns, bad_before > of_losses)
        all_good = tf.logical_and(is_finite, was_good)
        self.read = [v for v in (all_good, largest, rule_learns) if tf.is_tensor(v)]
        return all_good, largest, rule_learns

    @contextmanager
    def set_back(self, largest: Optional[Scalar]) -> Iterator[None]:
        """Sets the loss scale back, for what adjusts it to all optimizers so far."""
        old, now = list(self._before), []
        if largest is not None:
            old.append((self._loss_scale.greatest_so_far, largest))
        if mode.current().knows_values:
            now = [(variable, tf.convert_to_tensor(variable)) for variable, _ in old]
        try:
            with tf.control_dependencies(self.read):
                restored = [v.assign(value, read_value=False) for v, value in old]
            with tf.control_dependencies([group_ops([self.read, restored])]):
                yield
            self._has_learned = True
        except BaseException:
            for variable, value in now:
                variable.assign(value)
            raise

    def note_adjusted(self, division: PendingDivision, update_op: Op) -> None:
        """An optimizer has applied or left out its part. One that raised has not."""
        division.uses.shared_step = self
        self.applied[division] = graphs.branches_here()
        if mode.current().knows_values:
            self.values_after = _values(self._loss_scale)
        # An op within a branch cannot be waited for: it is done when the branch is.
        may_wait = update_op is not None and graphs.current_graph() is self.graph
        self.update_ops = [update_op] if may_wait else []


def _values(loss_scale: LossScale) -> List[Any]:
    return [variable.numpy().tolist() for variable in loss_scale.variables]
