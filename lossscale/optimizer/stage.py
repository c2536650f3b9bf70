"""The stage of a step: ready, scaled, unscaled, applied.

As torch's GradScaler does, an optimizer knows how far the current step has come, so
that loops written for Keras 2 (scale, unscale, clip, apply) and for Keras 3 (scale,
apply) both run. A step is known to one replica and one graph: symbolic tensors of one
trace must never reach another.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, Dict, Iterator, List, Optional

import tensorflow as tf

_numbers = itertools.count(1)


class Step:
    """What is known of one step, from the scaled loss to the applied gradients.

    Attributes:
      loss_scale: The `float32` tensor that multiplied the loss. The gradients are
        divided by it even if a shared loss scale has moved since.
      number: When the loss was scaled: later steps have larger numbers. 0 if it was not
        scaled by an optimizer.
      is_finite: A `bool` tensor of shape `[]`, whether all gradients unscaled so far
        were finite on this replica, before anybody could clip them. None: not checked.
      unscaled: Whether gradients of this step have been unscaled.
      applied: Whether gradients of this step have been applied.
    """

    def __init__(self) -> None:
        self.loss_scale: Any = None
        self.number = 0
        self.is_finite: Any = None
        self.unscaled = False
        self.applied = False
        self._graph = _current_graph()
        self._returned: Dict[int, Any] = {}

    def is_here(self) -> bool:
        """Tells whether this step belongs to the graph that is being built now."""
        return any(self._graph is graph for graph in _visible_graphs())

    def note_unscaled(self, grads: List[Any], is_finite: Any) -> None:
        """Remembers gradients that are handed to the user, and their flag."""
        # What has been applied is settled: its flag says nothing of other gradients.
        known = None if self.applied else self.is_finite
        both = (known, is_finite)
        self.is_finite = is_finite if known is None else tf.logical_and(*both)
        self.unscaled = True
        for grad in grads:
            if grad is not None:
                self._returned[id(grad)] = weakref.ref(grad)

    def has_returned(self, grad: Any) -> bool:
        """Tells whether `grad` is one of the very objects handed to the user."""
        reference = self._returned.get(id(grad))
        return reference is not None and reference() is grad


class Stages:
    """The current step of one optimizer, on each replica."""

    def __init__(self) -> None:
        self.has_warned = False
        self._steps: Dict[Any, Step] = {}

    def __deepcopy__(self, memo: Dict[int, Any]) -> Stages:
        return Stages()  # a copied optimizer begins a step of its own

    def current(self) -> Optional[Step]:
        """Returns the step that this replica is at in this graph, if it is known.

        An applied step stays, since a loss may have two lists of gradients that are
        applied one after the other, until a loss is scaled again. One whose loss the
        user scaled by other means ends when it is applied.
        """
        step = self._steps.get(_replica())
        if step is None or not step.is_here() or (step.applied and not step.number):
            return None
        return step

    def scaled(self, loss_scale: Any) -> None:
        """Notes that a loss has been multiplied with the tensor `loss_scale`."""
        step = self._open(loss_scale)
        step.number = next(_numbers)

    def follow(self, other: Optional[Step], loss_scale: Any) -> Step:
        """Begins a step whose loss another optimizer, or the user, has scaled."""
        step = self._open(loss_scale if other is None else other.loss_scale)
        step.number = 0 if other is None else other.number
        return step

    def _open(self, loss_scale: Any) -> Step:
        """Returns the open step, or a new one once the last one has been applied."""
        step = self.current()
        if step is None or step.applied:
            step = self._steps[_replica()] = Step()
        step.loss_scale = loss_scale
        return step


def _replica() -> Any:
    """Returns what names this replica, across `strategy.run`s, or else this thread."""
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        context = tf.distribute.get_replica_context()
        number = tf.get_static_value(context.replica_id_in_sync_group)
        if number is not None:
            return ("replica", int(number))
    return threading.get_ident()


def _current_graph() -> Any:
    """Returns the graph that is being built, None in eager mode."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _visible_graphs() -> Iterator[Any]:
    """Yields the current graph and those around it whose tensors it may use.

    Within a branch of `tf.cond` or a loop's body the tensors of the graph around it
    are visible. Those around a nested `tf.function` are not: its trace is used again.
    """
    graph = _current_graph()
    yield graph
    # Not public, but used all over TensorFlow (seen on 2.4 to 2.21).
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
        yield graph
