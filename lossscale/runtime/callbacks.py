"""Who is told of each operation that eager mode runs."""

from __future__ import annotations

import threading
import weakref
from typing import Any, List, Protocol

import tensorflow as tf

# Not public: TensorFlow's own debugger lives on it. The same on TensorFlow 2.4, 2.10,
# 2.15, 2.16 and 2.21.
from tensorflow.python.eager import context
from tensorflow.python.framework import op_callbacks
from tensorflow.python.ops.resource_variable_ops import get_eager_safe_handle_data

from lossscale.runtime.aliases import Graph, Tensor
from lossscale.runtime.op_types import AMBIGUOUS, kind_of


class Listener(Protocol):
    """What is told of operations."""

    def hear(self, kind: str, inputs: Any, outputs: Any, attrs: Any) -> bool:
        """Takes note of an operation that has run.

        Args:
          kind: The operation's type (see `op_types`), or the name of a function.
          inputs: Its inputs, eager tensors.
          outputs: Its outputs.
          attrs: The names of its attributes and their values, in turn.

        Returns:
          Whether it wants to be told of the next one on this thread.
        """


class _Here(threading.local):
    """What belongs to one thread."""

    is_telling = False


_here = _Here()
#: Weak references: who is gone is told of nothing.
_listening: List[Any] = []


def add(listener: Listener) -> None:
    """Tells a listener of each operation of eager mode from now on, on this thread.

    The replicas of a strategy inherit that. It ends when the listener is gone, or when
    no listener wants to be told of more.
    """
    alive = [each for each in _listening if each() is not None]
    if not any(each() is listener for each in alive):
        # At once: other threads may be going through them.
        _listening[:] = [*alive, weakref.ref(listener)]
    if not is_telling():
        with tf.init_scope():  # where it learns of functions that eager mode calls
            op_callbacks.add_op_callback(_tell)


def is_telling() -> bool:
    """Tells whether any listener is told of what this thread does."""
    return _tell in context.context().op_callbacks


def key_of(tensor: Tensor) -> int:
    """Returns what names a tensor of eager mode: TensorFlow's own number of it."""
    return int(tensor._id)  # not public: its tapes use it (seen on 2.4 to 2.21)


def held_rank(handle: Tensor) -> int:
    """Returns the rank of what a variable's handle holds, 0 if it is not known."""
    held = held_by(handle)
    return 0 if held is None else len(held[1])


def held_by(handle: Tensor) -> Any:
    """Returns the dtype and the shape of what a variable's handle holds, a pair.

    None: it is no handle, or not known.
    """
    data = get_eager_safe_handle_data(handle)
    if data is None or not data.shape_and_type:
        return None
    (held, *_) = data.shape_and_type
    return tf.as_dtype(held.dtype), [each.size for each in held.shape.dim]


def _tell(  # noqa: PLR0917 - as TensorFlow calls it
    kind: Any,
    inputs: Any,
    attrs: Any,
    outputs: Any,
    op_name: Any = None,
    graph: Graph = None,
) -> Any:
    """Tells all listeners. TensorFlow calls it for operations of graphs, too.

    What a listener computes itself is nobody's business.
    """
    del op_name
    if graph is None and outputs is not None and not _here.is_telling:
        # A function's name may come as bytes.
        name = kind if isinstance(kind, str) else kind.decode()
        if name in AMBIGUOUS:
            token = attrs[attrs.index("token") + 1] if "token" in attrs else b""
            name = kind_of(name, outputs[0].dtype, token)
        _here.is_telling = True
        try:
            found = [each() for each in list(_listening)]
            wanted = [each.hear(name, inputs, outputs, attrs) for each in found if each]
        finally:
            _here.is_telling = False
        if not any(wanted):
            _stop()
    # Who builds a graph goes on with what is returned, and wants a list.
    return None if outputs is None else list(outputs)


def _stop() -> None:
    """Is told of nothing more on this thread, if nobody else is.

    TensorFlow goes through its list of callbacks right now: one that is removed would
    hide this operation from the one behind it.
    """
    called = context.context()
    if len(called.op_callbacks) == 1:
        # Not `op_callbacks.remove_op_callback`: that ends them on other threads, too.
        called.remove_op_callback(_tell)
