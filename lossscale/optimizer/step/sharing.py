"""One loss scale for several optimizers: adjusted once per step, from all of them.

The two optimizers of a GAN may share a loss scale. Each skips by its own gradients, but
the loss scale must count one step, which is bad if one of them was. Which optimizer
comes last is not known beforehand. So each apply gives the loss scale the state from
before the step, and adjusts it anew by the AND of all flags so far. That an earlier one
was bad shows in the count of skipped steps. No variable and no branch is added.

A step ends when one of its optimizers applies a second time (in the other branch of
one `tf.cond` does not count), and when another graph is built.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients.check import Check
from lossscale.optimizer.provenance.resolve import Provenance
from lossscale.runtime import mode
from lossscale.runtime.aliases import Op, Scalar, Variable
from lossscale.runtime.control import group_ops
from lossscale.runtime.graphs import (
    above_branches,
    current_graph,
    is_other_branch,
    visible_graphs,
)
from lossscale.scales import adjusting
from lossscale.scales.base import LossScale

_steps: Any = weakref.WeakKeyDictionary()  # LossScale -> the last _SharedStep


class _SharedStep:
    """A step of a shared loss scale in which at least one optimizer has applied.

    Attributes:
      graph: Where it began; None in eager mode.
      before: Pairs of a variable of the loss scale and its value before the step.
      applied: Those that have applied in it, and in which graph.
      update_op: What was adjusted last. None in eager mode.
      left: The loss scale's values after the last adjustment, in eager mode only.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self.graph = above_branches(current_graph())
        self.applied: Any = weakref.WeakKeyDictionary()
        self.update_op: Any = None
        self.left: Optional[List[Any]] = None
        # Outside of the branch that applies, which may not run.
        outside = nullcontext() if self.graph is None else self.graph.as_default()
        with outside:
            self.before = [(v, tf.convert_to_tensor(v)) for v in loss_scale.variables]
            largest = loss_scale.last_largest
            if largest is not None:  # of those that have applied in this step
                self.update_op = group_ops([largest.assign(0.0, read_value=False)])

    def goes_on(self, member: Any, loss_scale: LossScale) -> bool:
        """Tells whether `member`, which applies now, does so in this step."""
        if member in self.applied and not is_other_branch(self.applied[member]):
            return False
        if not any(self.graph is graph for graph in visible_graphs()):
            return False
        # A checkpoint may have been restored, or the loss scale set, since.
        return self.left is None or self.left == _values(loss_scale)

    def take_back(self, loss_scale: LossScale, largest: Scalar) -> Tuple[Any, Any, Any]:
        """Gives the loss scale the state that it had before this step.

        Args:
          loss_scale: The `LossScale`.
          largest: The greatest magnitude of what is applied now. None: not requested.

        Returns:
          What did so, None in eager mode; whether those that have applied were good;
          and a list of the greatest magnitude of all, empty if not requested.
        """
        # A tf.compat.v1 graph keeps no order of its own.
        with _after(self.update_op):
            was_good = self._is_as_before(loss_scale.skipped_steps)
            known = [] if largest is None else [_greatest_so_far(loss_scale, largest)]
        with tf.control_dependencies([was_good, *known]):
            restored = [v.assign(old, read_value=False) for v, old in self.before]
            return group_ops([was_good, restored]), was_good, known

    def leave(self, loss_scale: LossScale, update_op: Op) -> None:
        """Remembers what one of its optimizers leaves the next one."""
        if mode.current().knows_values:
            self.left = _values(loss_scale)
        # What was done in a branch is done when the branch is.
        self.update_op = update_op if current_graph() is self.graph else None

    def _is_as_before(self, variable: Variable) -> Any:
        (old,) = [old for each, old in self.before if each is variable]
        return tf.equal(tf.convert_to_tensor(variable), old)


def _greatest_so_far(loss_scale: LossScale, largest: Scalar) -> Any:
    """Returns the greatest magnitude of all that has been applied in this step."""
    return tf.maximum(largest, tf.convert_to_tensor(loss_scale.last_largest))


def adjust_together(member: Provenance, check: Check) -> Tuple[Any, Any]:
    """Adjusts a loss scale to a step that one of its optimizers applies or skips.

    Args:
      member: The optimizer's `Provenance`.
      check: What the replicas know together of this optimizer's gradients.

    Returns:
      The update op, None in eager mode, and whether this optimizer applies.
    """
    loss_scale = member.loss_scale
    if not (member.is_keras and member.history.is_shared()):
        return adjusting.adjust_by_check(loss_scale, check)
    is_finite = check.exact()
    step = _step_of(member)
    taken_back, was_good, known = step.take_back(loss_scale, check.largest)
    with _after(taken_back):
        # Each optimizer skips by its own gradients, the loss scale counts by all.
        own = adjusting.arguments_of(loss_scale, is_finite, check.largest)
        decision = adjusting.decision_of(loss_scale, own)
        all_good = tf.logical_and(is_finite, was_good)
        with tf.control_dependencies(decision):
            update_op, _ = loss_scale.adjust(all_good, *known)
    step.leave(loss_scale, update_op)
    return update_op, decision[0] if decision else is_finite


def _step_of(member: Provenance) -> _SharedStep:
    """Returns the step in which an optimizer applies now."""
    loss_scale = member.loss_scale
    step: Optional[_SharedStep] = _steps.get(loss_scale)
    if step is None or not step.goes_on(member, loss_scale):
        step = _steps[loss_scale] = _SharedStep(loss_scale)
    step.applied[member] = current_graph()
    return step


def _after(update_op: Op) -> Any:
    return tf.control_dependencies([] if update_op is None else [update_op])


def _values(loss_scale: LossScale) -> List[Any]:
    return [variable.numpy().tolist() for variable in loss_scale.variables]
