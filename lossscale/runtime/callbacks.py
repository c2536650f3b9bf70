"""Who is told of each operation that eager mode runs."""

from __future__ import annotations

import weakref
from typing import Any, Callable

import tensorflow as tf

# Not public: TensorFlow's own debugger lives on it. The same on TensorFlow 2.4, 2.10,
# 2.15, 2.16 and 2.21.
from tensorflow.python.eager import context
from tensorflow.python.framework import op_callbacks

#: Those that want to be called no longer.
_over: Any = weakref.WeakSet()


def add(callback: Callable[..., Any]) -> None:
    """Calls a function after each operation of eager mode, on this thread.

    Replicas of a strategy inherit it. It is called as `callback(kind, inputs, attrs,
    outputs, op_name=None, graph=None)`, for operations that a graph is built of, too,
    with that graph. It must return `outputs` as a list: the callbacks after it get it.
    """
    _over.discard(callback)
    called = context.context().op_callbacks
    if callback in called and not _over:
        return
    with tf.init_scope():  # where it learns of functions that eager mode calls
        for each in [each for each in called if each in _over]:
            op_callbacks.remove_op_callback(each)
        if callback not in called:
            op_callbacks.add_op_callback(callback)


def remove(callback: Callable[..., Any]) -> None:
    """Calls it no longer, from the next time on that another one is added.

    Not at once: one that was removed while all are called would hide an operation from
    the one behind it.
    """
    _over.add(callback)


def number_of(tensor: Any) -> int:
    """Returns the number that TensorFlow gives a tensor of eager mode, and no other."""
    return int(tensor._id)  # not public: its tapes use it (seen on 2.4 to 2.21)


def listens(callback: Callable[..., Any]) -> bool:
    """Tells whether a function is called on this thread."""
    return callback in context.context().op_callbacks
