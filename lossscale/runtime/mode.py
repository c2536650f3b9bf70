"""In which mode TensorFlow is: eager, graph, session or XLA, and what each can do."""

from __future__ import annotations

import inspect

import tensorflow as tf

_ARGUMENTS = inspect.signature(tf.function).parameters
#: The argument of tf.function that asks for XLA. TensorFlow 2.4 has an older name.
COMPILED_BY_XLA = {
    "jit_compile" if "jit_compile" in _ARGUMENTS else "experimental_compile": True,
}
#: The argument of tf.function that traces batches of other shapes once, not each.
ANY_SHAPES = {
    "reduce_retracing"
    if "reduce_retracing" in _ARGUMENTS
    else "experimental_relax_shapes": True,
}
#: Whether XLA computes `x * a * b` as it is written: it makes one factor of the two on
#: TensorFlow 2.4 and 2.8, and no longer from 2.10 on (seen up to 2.21).
XLA_KEEPS_FACTORS = tuple(map(int, tf.__version__.split(".")[:2])) >= (2, 10)


def in_xla() -> bool:
    """Tells whether what is traced now is compiled: `tf.function(jit_compile=True)`."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        # Not public. TensorFlow's own cond and while_loop ask the same question in the
        # same way (`GraphOrParentsInXlaContext`, seen on 2.4 to 2.21). Where the answer
        # is a wrong False, everything is still right, and slower.
        get_context = getattr(graph, "_get_control_flow_context", None)
        context = get_context() if get_context is not None else None
        is_xla = getattr(context, "IsXLAContext", None)
        if is_xla is not None and is_xla():
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def in_session() -> bool:
    """Tells whether a `tf.compat.v1` graph is built, for a session to run."""
    return not tf.compat.v1.executing_eagerly_outside_functions()


def in_plain_graph() -> bool:
    """Tells whether a `tf.function` is traced that XLA does not compile.

    There a branch saves time. In a session it would not run whenever the step does:
    who asks for a branch's result runs all that is in it.
    """
    return not (tf.executing_eagerly() or in_xla() or in_session())
