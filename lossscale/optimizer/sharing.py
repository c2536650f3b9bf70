"""One loss scale for several optimizers: adjusted once per step, from all of them.

A GAN's two optimizers may share a loss scale. Each skips on its own gradients. A step
of the loss scale ends when an optimizer that already applied in it applies again (not
in the other branch of one `tf.cond`), or where another graph is built. Until then each
apply takes back what the ones before did to the state, and adjusts again, with the AND
of all flags: a step was bad before if its count of skipped steps has moved. No variable
and no branch is added.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients.finite import Finiteness
from lossscale.runtime import mode
from lossscale.runtime.control import group_ops
from lossscale.runtime.graphs import (
    above_branches,
    current_graph,
    is_other_branch,
    visible_graphs,
)
from lossscale.scales import adjusting
from lossscale.scales.base import LossScale

_groups: Any = weakref.WeakKeyDictionary()  # LossScale -> Group


class _SharedStep:
    """A step of a shared loss scale in which at least one optimizer has applied.

    Attributes:
      graph: Where it began; None in eager mode.
      before: Pairs of a variable of the loss scale and its value before the step.
      applied: Those that have applied in it, and in which graph.
      update_op: What was adjusted last. None in eager mode.
      left: The values that were left, in eager mode.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self.graph = above_branches(current_graph())
        self.applied: Any = weakref.WeakKeyDictionary()
        self.update_op: Any = None
        self.left: Optional[List[Any]] = None
        # Whether a branch that applies will run is not known: read outside of it.
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


class Group:
    """The optimizers that share one loss scale.

    Attributes:
      members: The `Provenance` of each optimizer.
      step: The step that they are at.
    """

    def __init__(self) -> None:
        self.members: Any = weakref.WeakSet()
        self.step: Optional[_SharedStep] = None


def group_of(loss_scale: LossScale) -> Group:
    """Returns the group of the optimizers that share a loss scale."""
    group: Optional[Group] = _groups.get(loss_scale)
    if group is None:
        group = _groups[loss_scale] = Group()
    return group


def adjust(
    loss_scale: LossScale, member: Any, finiteness: Finiteness, largest: Any
) -> Tuple[Any, Any]:
    """Adjusts `loss_scale` to a step that one of its optimizers applies or skips.

    Args:
      loss_scale: A `LossScale`.
      member: The optimizer's `Provenance`.
      finiteness: What is agreed of this optimizer's gradients.
      largest: Their greatest magnitude. None: nobody asks.

    Returns:
      The update op, None in eager mode, and the exact flag.
    """
    group = group_of(loss_scale)
    if len(group.members) < 2:
        return adjusting.adjust(loss_scale, finiteness, largest)
    is_finite = finiteness.exact()
    step = group.step
    if step is None or not step.goes_on(member, loss_scale):
        step = group.step = _SharedStep(loss_scale)
    step.applied[member] = current_graph()
    # A tf.compat.v1 graph keeps no order of its own.
    with _after(step.update_op):
        was_good = _is_as_before(step, loss_scale.skipped_steps)
        known = [] if largest is None else [_greatest_so_far(loss_scale, largest)]
    with tf.control_dependencies([was_good, *known]):
        restored = [v.assign(old, read_value=False) for v, old in step.before]
        taken_back = group_ops([was_good, restored])
    with _after(taken_back):
        update_op, _ = loss_scale.adjust(tf.logical_and(is_finite, was_good), *known)
    if mode.current().knows_values:
        step.left = _values(loss_scale)
    # What was done in a branch is done when the branch is.
    is_outside = current_graph() is step.graph
    step.update_op = update_op if is_outside else None
    return update_op, is_finite


def _greatest_so_far(loss_scale: LossScale, largest: Any) -> Any:
    """Returns the greatest magnitude of all that has been applied in this step."""
    return tf.maximum(largest, tf.convert_to_tensor(loss_scale.last_largest))


def _is_as_before(step: _SharedStep, variable: Any) -> Any:
    (old,) = [old for each, old in step.before if each is variable]
    return tf.equal(tf.convert_to_tensor(variable), old)


def _after(update_op: Any) -> Any:
    return tf.control_dependencies([] if update_op is None else [update_op])


def _values(loss_scale: LossScale) -> List[Any]:
    return [variable.numpy().item() for variable in loss_scale.variables]
