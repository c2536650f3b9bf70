"""Notifies listeners of each operation that eager mode runs.

Nothing else shows what becomes of an eager tensor: a tape records only operations that
are differentiated, and a tensor of a class of our own is lost at the first operation.
So TensorFlow calls us for every operation, but only from the use of a loss scale until
a thousand operations have not used it.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from typing import Any, Iterator, List, Optional, Protocol, Sequence, Union

import tensorflow as tf

# Not public, but TensorFlow's own debugger depends on it. Without it, values of eager
# mode would have no kinds, and the state of the step would decide.
from tensorflow.python.eager import context
from tensorflow.python.framework import op_callbacks

from lossscale.runtime.aliases import Graph, Tensor, Tensors


class OpListener(Protocol):
    """An object that is notified of operations."""

    def note_op(self, kind: str, inputs: Tensors, outputs: Tensors) -> bool:
        """Notes an operation, or a function of this name, that has run.

        Returns whether the listener wants to see this thread's next operation.
        """


class _Here(threading.local):
    """The state of one thread: how many `paused` blocks this thread is in."""

    pauses = 0


_here = _Here()
#: Weak references: being listed here keeps no listener alive.
_listening: List[weakref.ref[OpListener]] = []


def add(listener: OpListener) -> None:
    """Notifies a listener of each operation that eager mode runs on this thread.

    The threads of a strategy's replicas inherit it, until no listener wants more.
    """
    alive = [reference for reference in _listening if reference() is not None]
    if not any(reference() is listener for reference in alive):
        # In one assignment: other threads may be iterating over the list.
        _listening[:] = [*alive, weakref.ref(listener)]
    _go_on()


def is_notifying() -> bool:
    """Whether any listener is notified of this thread's operations."""
    return _notify in context.context().op_callbacks


@contextmanager
def paused() -> Iterator[None]:
    """Stops reporting this thread's operations: they are our own."""
    was_notifying = is_notifying()
    if was_notifying:
        context.context().remove_op_callback(_notify)
    _here.pauses += 1
    try:
        yield
    finally:
        _here.pauses -= 1
        if was_notifying:
            _go_on()


def are_paused() -> bool:
    """Whether the operations of this thread are our own."""
    return _here.pauses > 0


def key_of(tensor: Tensor) -> int:
    """Returns the number by which TensorFlow itself identifies an eager tensor."""
    return int(tensor._id)  # not public: TensorFlow's tapes use it


def _go_on() -> None:
    if not is_notifying() and not _here.pauses:
        with tf.init_scope():  # also for functions that eager mode calls
            op_callbacks.add_op_callback(_notify)


def _notify(
    kind: Union[str, bytes],
    inputs: Tensors,
    attrs: Sequence[Any],
    outputs: Optional[Tensors],
    op_name: Optional[str] = None,
    graph: Optional[Graph] = None,
) -> Optional[List[Tensor]]:
    """Notifies all listeners. TensorFlow calls it for operations of graphs, too."""
    del attrs, op_name
    if graph is None and outputs is not None and not _here.pauses:
        # A function's name may come as bytes.
        name = kind if isinstance(kind, str) else kind.decode()
        _here.pauses += 1
        try:
            listeners = [reference() for reference in list(_listening)]
            wanted = [
                listener.note_op(name, inputs, outputs)
                for listener in listeners
                if listener
            ]
        finally:
            _here.pauses -= 1
        # TensorFlow is iterating over its callbacks. If it has others, they would miss
        # this operation.
        here = context.context()
        if not any(wanted) and len(here.op_callbacks) == 1:
            # Not `op_callbacks.remove_op_callback`, which acts on other threads, too.
            here.remove_op_callback(_notify)
    # TensorFlow, while it builds a graph, uses the returned list in place of `outputs`.
    return None if outputs is None else list(outputs)
