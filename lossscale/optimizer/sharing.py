"""One loss scale for several optimizers: adjusted once per step, from all of them.

A GAN's two optimizers may share a loss scale. Each skips on its own gradients. A step
of the loss scale ends when an optimizer that already applied in it applies again, or
when the graph changes. Until then each apply takes back what the one before did to the
state, and adjusts again with the AND of all flags. No variable and no branch is added.
"""

from __future__ import annotations

import weakref
from typing import Any, List, Tuple

import tensorflow as tf

from lossscale.gradients.finite import Finiteness
from lossscale.runtime.control import group_ops
from lossscale.scales import adjusting
from lossscale.scales.base import LossScale

_users: Any = weakref.WeakKeyDictionary()  # LossScale -> WeakSet of optimizers
_shared_steps: Any = weakref.WeakKeyDictionary()  # LossScale -> _SharedStep


class _SharedStep:
    """A step of a shared loss scale in which at least one optimizer has applied."""

    def __init__(self, graph: Any, state: List[Tuple[Any, Any]]) -> None:
        self.graph = graph
        self.state = state
        self.applied: Any = weakref.WeakSet()
        self.is_finite: Any = True
        self.update_op: Any = None


def share(loss_scale: LossScale, optimizer: Any) -> None:
    """Makes `optimizer` one of those that `loss_scale` is adjusted by."""
    _users.setdefault(loss_scale, weakref.WeakSet()).add(optimizer)


def latest_step(loss_scale: LossScale) -> Any:
    """Returns the latest step here in which an optimizer of these scaled a loss."""
    steps = [user._current_step() for user in _users.get(loss_scale, ())]
    scaled = [step for step in steps if step is not None and step.number]
    return max(scaled, key=lambda step: step.number, default=None)


def adjust(
    loss_scale: LossScale, optimizer: Any, finiteness: Finiteness
) -> Tuple[Any, Any]:
    """Adjusts `loss_scale` to a step that `optimizer` applies or skips.

    Args:
      loss_scale: A `LossScale`.
      optimizer: The optimizer that asks.
      finiteness: What is agreed of this optimizer's gradients.

    Returns:
      The update op, None in eager mode, and the exact flag.
    """
    if len(_users.get(loss_scale, ())) < 2:
        return adjusting.adjust(loss_scale, finiteness)
    is_finite = finiteness.exact()
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    step = _shared_steps.get(loss_scale)
    if step is None or step.graph is not graph or optimizer in step.applied:
        state = [(v, tf.convert_to_tensor(v)) for v in loss_scale.variables]
        step = _shared_steps[loss_scale] = _SharedStep(graph, state)
    # A tf.compat.v1 graph keeps no order of its own.
    with tf.control_dependencies([] if step.update_op is None else [step.update_op]):
        taken_back = group_ops(
            [v.assign(old, read_value=False) for v, old in step.state]
        )
    step.applied.add(optimizer)
    step.is_finite = tf.logical_and(step.is_finite, is_finite)
    with tf.control_dependencies([] if taken_back is None else [taken_back]):
        step.update_op = loss_scale.adjust(step.is_finite)[0]
    return step.update_op, is_finite
