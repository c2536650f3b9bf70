"""How far a step has come: the loss scaled, gradients unscaled, gradients applied.

As torch's GradScaler does, an optimizer knows it of the current step, so that loops
written for Keras 2 (scale, unscale, clip, apply) and for Keras 3 (scale, apply) both
run. A step belongs to one replica and one graph: symbolic tensors of one trace must
never reach another.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from lossscale.gradients.faults import Check, clean

_numbers = itertools.count(1)
#: So many losses of a step are kept, to tell whether they were finite: the last ones. A
#: loop that scales losses and never applies must not keep them all.
_LOSSES = 8


class _HandedOut(NamedTuple):
    """An unscaled gradient that was handed to the user, who may drop it.

    Attributes:
      reference: A weak reference to it.
      scaled: What it was before it was divided. None: not kept.
      divisor: What it was divided by.
    """

    reference: Any
    scaled: Any
    divisor: Any


class Step:
    """One step of one optimizer, from the scaled loss to the applied gradients.

    Attributes:
      loss_scale: The `float32` tensor that multiplied the loss. The gradients are
        divided by it even if a shared loss scale has moved since.
      number: When the loss was scaled: later steps have larger numbers. 0 if it was not
        scaled by an optimizer.
      losses: The last losses, before they were multiplied.
      unscaled: Whether gradients of this step have been unscaled.
      applied: Whether gradients of this step have been applied.
    """

    def __init__(self) -> None:
        self.loss_scale: Any = None
        self.number = 0
        self.losses: List[Any] = []
        self.unscaled = False
        self.applied = False
        self._graph = _current_graph()
        self._handed_out: Dict[int, _HandedOut] = {}
        self._checks: List[Tuple[List[Any], Check]] = []
        self._is_finite: Any = None
        self._is_settled = False

    def is_here(self) -> bool:
        """Tells whether this step belongs to the graph that is being built now."""
        return any(self._graph is graph for graph in _visible_graphs())

    def note_unscaled(
        self, grads: List[Any], check: Optional[Check], scaled: List[Any]
    ) -> None:
        """Remembers gradients that are handed to the user, and their check.

        Args:
          grads: The gradients.
          check: Their check, before anybody could clip them. None: not checked.
          scaled: What each was before it was divided by `loss_scale`. None: not kept.
        """
        if self._is_settled:
            # The checks of gradients that were applied say nothing of other ones.
            self._checks, self._is_finite = [], None
            self._handed_out, self._is_settled = {}, False
        references = [None if grad is None else weakref.ref(grad) for grad in grads]
        for grad, reference, before in zip(grads, references, scaled):
            if reference is not None:
                handed_out = _HandedOut(reference, before, self.loss_scale)
                self._handed_out[id(grad)] = handed_out
        self.unscaled = True
        if check is None:
            return
        self._checks.append((references, check))
        so_far = self._is_finite
        now = check.is_finite
        self._is_finite = now if so_far is None else tf.logical_and(so_far, now)

    def note_applied(self) -> None:
        """Remembers that gradients of this step have been applied, or skipped."""
        self.applied = self._is_settled = True

    def check_of(self, grads: List[Any]) -> Optional[Check]:
        """Returns the check of when gradients, clipped since perhaps, were unscaled.

        Its flag tells of all gradients that were unscaled in this step on this replica;
        its codes of `grads`, if they can be told to be one of the lists. None: nothing
        was checked.
        """
        if self._is_finite is None:
            return None
        fitting = [each for each in self._checks if len(each[0]) == len(grads)]
        same = [each for each in fitting if _share(each[0], grads)]
        found = same or fitting
        check = found[0][1] if len(found) == 1 else clean(len(grads))
        return Check(self._is_finite, check.codes)

    def has_handed_out(self, grads: List[Any]) -> bool:
        """Tells whether all of `grads` are the very objects handed to the user."""
        present = [grad for grad in grads if grad is not None]
        found = [self._handed_out.get(id(grad)) for grad in present]
        return all(f is not None and f.reference() is g for f, g in zip(found, present))

    def before_unscaling(self, grads: List[Any]) -> Optional[Tuple[List[Any], Any]]:
        """Returns what gradients were before they were unscaled, and the divisor.

        Args:
          grads: Objects handed to the user, or None.

        Returns:
          The two, or None if they are not kept, or not all had the same divisor.
        """
        found = [None if g is None else self._handed_out[id(g)] for g in grads]
        present = [each for each in found if each is not None]
        divisors = {id(each.divisor) for each in present}
        if len(divisors) != 1 or any(each.scaled is None for each in present):
            return None
        scaled = [None if each is None else each.scaled for each in found]
        return scaled, present[0].divisor


def _share(references: List[Any], grads: List[Any]) -> bool:
    """Tells whether one of `grads` is the very object that was handed out."""
    pairs = zip(references, grads)
    return any(r is not None and g is not None and r() is g for r, g in pairs)


class Progress:
    """The current step of one optimizer, on each replica."""

    def __init__(self) -> None:
        self.has_warned = False
        self._steps: Dict[Any, Step] = {}

    def __deepcopy__(self, memo: Dict[int, Any]) -> Progress:
        return Progress()  # a copied optimizer begins a step of its own

    def current(self) -> Optional[Step]:
        """Returns the step that this replica is at in this graph, None without one.

        An applied step stays, since a loss may have two lists of gradients that are
        applied one after the other, until a loss is scaled again. One whose loss the
        user scaled by other means ends when it is applied.
        """
        step = self._steps.get(_replica())
        if step is None or not step.is_here() or (step.applied and not step.number):
            return None
        return step

    def note_scaled(self, loss: Any, loss_scale: Any) -> None:
        """Remembers that a loss has been multiplied with the tensor `loss_scale`."""
        step = self._open(loss_scale)
        step.losses = [*step.losses, loss][-_LOSSES:]
        step.number = next(_numbers)

    def follow(self, other: Optional[Step], loss_scale: Any) -> Step:
        """Begins a step whose loss another optimizer, or the user, has scaled."""
        step = self._open(loss_scale if other is None else other.loss_scale)
        step.losses = [] if other is None else list(other.losses)
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
