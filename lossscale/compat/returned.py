"""The gradients that were returned to the user: were they finite, before any change?"""

from __future__ import annotations

import weakref
from typing import Any, Dict, Hashable, List, NamedTuple, Optional

import tensorflow as tf

from lossscale.gradients.finite import all_finite, dense_part
from lossscale.gradients.largest import largest_if_finite
from lossscale.runtime import replicas
from lossscale.runtime.ancestry import ancestors_among
from lossscale.runtime.graphs import current_graph, notes_of, visible_graphs
from lossscale.scales.base import LossScale


class _Last(NamedTuple):
    """What eager mode returned last on one replica.

    Attributes:
      grads: Weak references to the gradients.
      evidence: What all says together that was returned since the last step.
    """

    grads: List[Any]
    evidence: Any


class Returned:
    """Remembers the gradients of one optimizer, until those that come back are applied.

    In a graph those that come back are followed to those that were returned: what they
    are not computed from has no say, and runs in no session because of it. Eagerly all
    that was returned since the last step counts, unless the very objects come back.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self._loss_scale = loss_scale
        self._last: Dict[Hashable, _Last] = {}  # by replica

    def note(self, grads: List[Any]) -> None:
        """Remembers gradients that are returned, unscaled."""
        values = _tensors(grads)
        graph = current_graph()
        if graph is not None:
            notes_of(graph, self, list).extend(values)
            return
        replica, evidence = replicas.this_one(), self._evidence(values)
        last = self._last.get(replica)
        if last is not None:
            evidence = tf.maximum(last.evidence, evidence)
        refs = [weakref.ref(value) for value in values]
        self._last[replica] = _Last(refs, evidence)

    def evidence(self, grads: List[Any]) -> Optional[Any]:
        """Returns what is known of gradients that come back from when they were new.

        Returns:
          A `float32` tensor of shape `[]`, finite if and only if they were: a gradient
          more for `LossScale.update`. None: they come back as they were.
        """
        values = _tensors(grads)
        if current_graph() is None:
            return self._evidence_eagerly(values)
        notes: List[Any] = [notes_of(g, self, list) for g in visible_graphs()]
        found = ancestors_among(values, [each for note in notes for each in note])
        changed = _without(found, values)
        return self._evidence(changed) if changed else None

    def _evidence_eagerly(self, values: List[Any]) -> Optional[Any]:
        last = self._last.pop(replicas.this_one(), None)
        if last is None:
            return None
        known = [ref() for ref in last.grads]
        return last.evidence if _without(values, known) else None

    def _evidence(self, values: List[Any]) -> Any:
        if self._loss_scale.last_largest is not None:
            return largest_if_finite(values)
        return tf.where(all_finite(values), 0.0, float("inf"))


def _tensors(grads: List[Any]) -> List[Any]:
    """Returns the tensors that gradients consist of, of sparse ones the values."""
    values = [dense_part(grad) for grad in grads]
    return [value for value in values if isinstance(value, tf.Tensor)]


def _without(values: List[Any], others: List[Any]) -> List[Any]:
    """Returns the values that are none of the others."""
    known = {id(other) for other in others}
    return [value for value in values if id(value) not in known]
