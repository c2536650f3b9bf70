"""The mode TensorFlow is in, and what we do differently in each: one table."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import tensorflow as tf

# Not public: `current` needs it.
from tensorflow.python.eager import context

from lossscale.runtime.graphs import context_of

_ARGUMENTS = inspect.signature(tf.function).parameters
#: The argument of tf.function that asks for XLA. TensorFlow 2.4 has an older name.
COMPILED_BY_XLA = {
    "jit_compile" if "jit_compile" in _ARGUMENTS else "experimental_compile": True,
}
_VERSION = tuple(map(int, tf.__version__.split(".")[:2]))


class Mode(NamedTuple):
    """What we do differently, one row for each mode. `docs/modes.md` shows the table.

    Attributes:
      knows_values: Python knows what tensors hold, so Python's own `if` decides.
        Operations run one by one, in the order in which they are called.
      by_xla: XLA compiles the code. Where this is asked, a comment says why.
      joins_factors: XLA turns `x * a * b` into `x * (a * b)`, which hides an overflow
        of `x * a`.
      looks_at_once: The exact check of each element runs without a quick check (a sum)
        before it. On a GPU both take equally long, and a branch that depends on the sum
        makes the host wait. On a CPU the exact check takes longer.
      runs_parts: A session runs any part of a graph at any time. The value that a
        variable holds may come from another run, and the session would have to
        initialize a variable that the step creates.
    """

    knows_values: bool = False
    by_xla: bool = False
    joins_factors: bool = False
    looks_at_once: bool = False
    runs_parts: bool = False


EAGER = Mode(knows_values=True)
GRAPH = Mode()
SESSION = Mode(runs_parts=True)
XLA = Mode(by_xla=True, joins_factors=_VERSION < (2, 10))
#: `tf.xla.experimental.compile` in a `tf.compat.v1` graph.
XLA_IN_SESSION = XLA._replace(runs_parts=True)


def current() -> Mode:
    """Returns the row of the mode that this code is traced or run in."""
    if tf.executing_eagerly():
        return EAGER
    # Up to TensorFlow 2.13 eager mode seems to be outside of a branch of the implicit
    # graph (seen on 2.4 and 2.10), though `disable_eager_execution` was called.
    is_v1 = context.default_execution_mode == context.GRAPH_MODE
    in_session = is_v1 or not tf.compat.v1.executing_eagerly_outside_functions()
    if not _in_xla():
        return SESSION if in_session else GRAPH
    row = XLA_IN_SESSION if in_session else XLA
    return row._replace(looks_at_once=True) if _has_gpu() else row


def _has_gpu() -> bool:
    """Whether the code that is compiled now will probably run on a GPU."""
    return bool(tf.config.list_logical_devices("GPU"))


def _in_xla() -> bool:
    """Whether XLA will compile this code: `tf.function(jit_compile=True)`."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        # Not public. TensorFlow's own `cond` asks in the same way.
        around = context_of(graph)
        if around is not None and around.IsXLAContext():
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
