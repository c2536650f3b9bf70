"""Tells listeners of each operation that eager mode runs."""

from __future__ import annotations

import threading
import weakref
from typing import List, Optional, Protocol, Tuple, Union

import tensorflow as tf

# Not public, but TensorFlow's own debugger depends on it. The same on TensorFlow 2.4,
# 2.10, 2.15, 2.16 and 2.21.
from tensorflow.python.eager import context
from tensorflow.python.framework import op_callbacks
from tensorflow.python.ops.resource_variable_ops import get_eager_safe_handle_data

from lossscale.runtime.aliases import Attributes, Graph, Handle, Tensor, Tensors
from lossscale.runtime.op_types import AMBIGUOUS, kind_of


class Listener(Protocol):
    """An object that is told of operations."""

    def hear(
        self, kind: str, inputs: Tensors, outputs: Tensors, attrs: Attributes
    ) -> bool:
        """Takes note of an operation that has run.

        Args:
          kind: The operation's type (see `op_types`), or the name of a function.
          inputs: Its inputs, eager tensors.
          outputs: Its outputs.
          attrs: The names of its attributes and their values, in turn.

        Returns:
          Whether the listener wants to be told of the next operation on this thread.
        """


class _Here(threading.local):
    """The state of one thread."""

    is_telling = False


_here = _Here()
#: Weak references: being listed here keeps no listener alive.
_listening: List[weakref.ref[Listener]] = []


def add(listener: Listener) -> None:
    """Tells a listener of each operation that eager mode runs on this thread from now.

    The threads of a strategy's replicas inherit the listener. It is told until it is
    garbage-collected, or until no listener wants to be told of more.
    """
    alive = [each for each in _listening if each() is not None]
    if not any(each() is listener for each in alive):
        # In one assignment: other threads may be iterating over the list.
        _listening[:] = [*alive, weakref.ref(listener)]
    if not is_telling():
        with tf.init_scope():  # so that it hears of functions that eager mode calls
            op_callbacks.add_op_callback(_tell)


def is_telling() -> bool:
    """Tells whether any listener is told of this thread's operations."""
    return _tell in context.context().op_callbacks


def key_of(tensor: Tensor) -> int:
    """Returns the number by which TensorFlow itself identifies an eager tensor."""
    return int(tensor._id)  # not public: its tapes use it (seen on 2.4 to 2.21)


def held_rank(handle: Handle) -> int:
    """Returns the rank of the value that a variable holds, 0 if it is not known."""
    held = held_by(handle)
    return 0 if held is None else len(held[1])


def held_by(handle: Handle) -> Optional[Tuple[tf.DType, List[int]]]:
    """Returns the dtype and the shape of the value that a variable holds.

    None if `handle` is no handle, or if TensorFlow does not know.
    """
    data = get_eager_safe_handle_data(handle)
    if data is None or not data.shape_and_type:
        return None
    (held, *_) = data.shape_and_type
    return tf.as_dtype(held.dtype), [each.size for each in held.shape.dim]


def _tell(  # noqa: PLR0917 - as TensorFlow calls it
    kind: Union[str, bytes],
    inputs: Tensors,
    attrs: Attributes,
    outputs: Optional[Tensors],
    op_name: Optional[str] = None,
    graph: Optional[Graph] = None,
) -> Optional[List[Tensor]]:
    """Tells all listeners. TensorFlow calls it for operations of graphs, too.

    Listeners are not told of operations that a listener itself runs.
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
    # TensorFlow, while it builds a graph, uses the returned list in place of `outputs`.
    return None if outputs is None else list(outputs)


def _stop() -> None:
    """Removes `_tell` on this thread, if it is the only callback.

    TensorFlow is iterating over its list of callbacks right now. If one is removed, the
    next one would not be told of this operation.
    """
    called = context.context()
    if len(called.op_callbacks) == 1:
        # Not `op_callbacks.remove_op_callback`, which acts on other threads, too.
        called.remove_op_callback(_tell)
