"""One loss scale for several optimizers: adjusted once per step, from all of them.

The two optimizers of a GAN may share a loss scale. Each optimizer skips by its own
gradients. The loss scale must count one step, and this step is bad if the gradients of
any optimizer were. Nobody knows beforehand which optimizer comes last. So each apply
first sets the loss scale back to its state from before the step, then adjusts it by the
AND of all flags so far. The count of skipped steps tells if an earlier flag was bad.

A step ends when one of its optimizers applies a second time, or when another graph is
built. An apply in the other branch of the same `tf.cond` does not count as a second.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients.check import Check
from lossscale.optimizer.pending import Pending
from lossscale.runtime import mode
from lossscale.runtime.aliases import Flag, Op, Scalar
from lossscale.runtime.control import group_ops
from lossscale.runtime.graphs import (
    above_branches,
    branches_here,
    current_graph,
    visible_graphs,
)
from lossscale.scales.base import LossScale, adjust_known

_steps: Any = weakref.WeakKeyDictionary()  # LossScale -> the last _SharedStep


class _SharedStep:
    """A step of a shared loss scale in which at least one optimizer has applied."""

    def __init__(self, loss_scale: LossScale) -> None:
        #: The graph in which the step began; None in eager mode.
        self.graph = above_branches(current_graph())
        #: The optimizers that have applied in this step, and the branches they are in.
        self.applied: Any = weakref.WeakKeyDictionary()
        #: The last adjustment of the loss scale. None in eager mode.
        self.update_op: Op = None
        #: The loss scale's values after it, in eager mode only.
        self.left: Optional[List[Any]] = None
        # These are read outside of the branch that applies, which may not run.
        outside = nullcontext() if self.graph is None else self.graph.as_default()
        with outside:
            #: Pairs of a variable of the loss scale and its value before the step.
            self.before = [(v, tf.convert_to_tensor(v)) for v in loss_scale.variables]
            largest = loss_scale.last_largest
            if largest is not None:  # it holds the greatest of this step so far
                self.update_op = group_ops([largest.assign(0.0, read_value=False)])

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

    def take_back(
        self, loss_scale: LossScale, largest: Optional[Scalar]
    ) -> Tuple[Op, Flag, List[Scalar]]:
        """Sets the loss scale back to its state from before this step.

        `largest` is the greatest magnitude of what is applied now. None: not requested.

        Returns the op that did so; whether all gradients so far were good; and a list
        of the greatest magnitude so far, empty if not requested.
        """
        # In a tf.compat.v1 graph only control dependencies order the operations.
        with _after(self.update_op):
            skipped = loss_scale.skipped_steps
            (old,) = [old for variable, old in self.before if variable is skipped]
            was_good = tf.equal(tf.convert_to_tensor(skipped), old)
            known = []
            if largest is not None:
                so_far = tf.convert_to_tensor(loss_scale.last_largest)
                known = [tf.maximum(largest, so_far)]
        with tf.control_dependencies([was_good, *known]):
            restored = [v.assign(old, read_value=False) for v, old in self.before]
            return group_ops([was_good, restored]), was_good, known


def adjust_together(member: Pending, check: Check) -> Tuple[Op, Flag]:
    """Adjusts a loss scale to a step that one of its optimizers applies or skips.

    `check` covers this optimizer's gradients on all replicas. Returns the update op,
    None in eager mode, and whether this optimizer applies the step.
    """
    loss_scale = member.loss_scale
    is_finite = check.exact()
    if not member.is_shared:
        return adjust_known(loss_scale, is_finite, check.largest)
    step: Optional[_SharedStep] = _steps.get(loss_scale)
    if step is None or not step.goes_on(member, loss_scale):
        step = _steps[loss_scale] = _SharedStep(loss_scale)
    step.applied[member] = branches_here()
    taken_back, was_good, known = step.take_back(loss_scale, check.largest)
    with _after(taken_back):
        # An optimizer skips by its own gradients, the loss scale counts by all flags.
        should_apply = loss_scale._should_apply(is_finite, check.largest)
        all_good = tf.logical_and(is_finite, was_good)
        with tf.control_dependencies([should_apply]):
            update_op, _ = loss_scale.adjust(all_good, *known)
    if mode.current().knows_values:
        step.left = _values(loss_scale)
    # An op within a branch cannot be waited for: it is done when the branch is.
    step.update_op = update_op if current_graph() is step.graph else None
    return update_op, should_apply


def _after(update_op: Op) -> Any:
    return tf.control_dependencies([] if update_op is None else [update_op])


def _values(loss_scale: LossScale) -> List[Any]:
    return [variable.numpy().tolist() for variable in loss_scale.variables]
