"""Where gradients come from: scaled, unscaled by us, changed since, or from elsewhere.

In a graph that is a fact, read off the marks on loss scales and on the gradients that
were handed out; `sweep` says how. In eager mode the very objects are known, no others.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from lossscale.optimizer.sweep import Mark, Sweep, graph_of
from lossscale.runtime import replicas
from lossscale.runtime.autograph import do_not_convert
from lossscale.runtime.graphs import notes_of


class Origin(enum.Enum):
    """Where a gradient was before it came to `apply`."""

    #: A way leads from it to a loss scale, and passes no unscaling: to be divided.
    SCALED = "scaled"
    #: Computed from unscaled gradients, and no scaled ones: clipped, or summed.
    CHANGED = "changed"
    #: The very object that was handed out: what was checked then holds.
    UNTOUCHED = "untouched"
    #: None of these: an argument, a constant, another function's value.
    FOREIGN = "foreign"


class Found(NamedTuple):
    """What is known of one gradient.

    Attributes:
      origin: Its `Origin`.
      divisors: The tensors of loss scales that it is still multiplied with, in the
        order of their marks. Several: one loss scale was read several times, or there
        are several. They may belong to a branch or a loop that has ended.
      checks: Those of the unscalings that it was computed from, in that order.
    """

    origin: Origin
    divisors: Tuple[Any, ...] = ()
    checks: Tuple[Any, ...] = ()


FOREIGN = Found(Origin.FOREIGN)
_numbers = itertools.count()


class Marks:
    """Loss scales and unscaled gradients, where they were seen.

    Optimizers that share a loss scale share one `Marks`. It keeps no graph alive, and
    no tensor of eager mode. A copied optimizer begins with none.

    Attributes:
      has_unscaled: Whether gradients were ever handed out.
    """

    def __init__(self) -> None:
        self.has_unscaled = False
        self._eager: Dict[int, Mark] = {}

    def __deepcopy__(self, memo: Dict[int, Any]) -> Marks:
        return Marks()

    @do_not_convert
    def mark_scaled(self, loss_scale: Any) -> None:
        """Remembers a tensor that may multiply a loss: the loss scale, not the product.

        Call it wherever a loss scale becomes a tensor: a mark on one that multiplies no
        loss does no harm.
        """
        self._mark(loss_scale, is_scale=True)

    @do_not_convert
    def mark_unscaled(self, grads: Iterable[Any], check: Any) -> None:
        """Remembers gradients that are handed out.

        Args:
          grads: Tensors, `tf.IndexedSlices` or None.
          check: Anything, to be found again: what is known of them. None: nothing is.
        """
        self.has_unscaled = True
        for grad in grads:
            if grad is not None:
                self._mark(_value(grad), is_scale=False, check=check)

    @do_not_convert
    def look(self, grads: Iterable[Any]) -> List[Optional[Found]]:
        """Returns what is known of each gradient, None of a `None`."""
        values = [None if grad is None else _value(grad) for grad in grads]
        found = [None if value is None else self._handed_out(value) for value in values]
        for through_variables in (False, True):
            rest = [i for i, each in enumerate(found) if each is FOREIGN]
            if rest:
                sweep = Sweep(self.on, self.of, through_variables)
                for i in rest:
                    found[i] = _found(sweep.marks_before(values[i]))
        return found

    def of(self, graph: Any) -> Dict[int, Mark]:
        """Returns the marks in a graph, or of eager mode, by the tensors' `id`s."""
        return self._eager if graph is None else notes_of(graph, self)

    def on(self, tensor: Any) -> Optional[Mark]:
        """Returns the mark on this very tensor."""
        graph = graph_of(tensor)
        mark = self.of(graph).get(id(tensor))
        if mark is None or (graph is None and mark.tensor() is not tensor):
            return None
        return mark._replace(tensor=tensor)

    def last_scale(self, graph: Any, after: int) -> Any:
        """Returns what this replica read last in a graph, if it was after a number."""
        replica = replicas.this_one()
        later = [mark for mark in self.of(graph).values() if mark.number > after]
        scales = [mark for mark in later if mark.is_scale and mark.replica == replica]
        return max(scales, key=lambda mark: mark.number).tensor if scales else None

    def next_number(self) -> int:
        """Returns a number between those of earlier marks and of later ones."""
        return next(_numbers)

    def _mark(self, tensor: Any, is_scale: bool, check: Any = None) -> None:
        graph, key = graph_of(tensor), id(tensor)
        marks, kept, replica = self.of(graph), tensor, None
        if graph is None:
            kept = weakref.ref(tensor, lambda _: marks.pop(key, None))
        elif is_scale:
            replica = replicas.this_one()
        marks[key] = Mark(next(_numbers), kept, is_scale, check, replica)

    def _handed_out(self, tensor: Any) -> Found:
        mark = self.on(tensor)
        if mark is None or mark.is_scale:
            return FOREIGN
        return Found(Origin.UNTOUCHED, (), _checks([mark]))


def _found(marks: Optional[List[Mark]]) -> Found:
    """Returns what the marks say that a gradient comes from."""
    if marks is None:
        return FOREIGN
    divisors = tuple(mark.tensor for mark in marks if mark.is_scale)
    origin = Origin.SCALED if divisors else Origin.CHANGED
    return Found(origin, divisors, _checks(marks))


def _value(grad: Any) -> Any:
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _checks(marks: List[Mark]) -> Tuple[Any, ...]:
    """Returns the checks of marks, each once."""
    checks = (mark.check for mark in marks if mark.check is not None)
    return tuple({id(check): check for check in checks}.values())


def are_arguments(grads: Iterable[Any]) -> bool:
    """Tells whether gradients are computed from arguments of this function alone.

    Then their loss was scaled, if at all, where the function is called.
    """
    values = [_value(grad) for grad in grads if grad is not None]
    seen, found = set(), False
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        operation = None if graph_of(value) is None else value.op
        if operation is None or operation.type == "ReadVariableOp":
            return False
        if operation.type == "Placeholder":
            captured = getattr(value.graph, "internal_captures", ())
            if any(value is each for each in captured):
                return False
            found = True
        values += operation.inputs
    return found
