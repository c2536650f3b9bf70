"""What a graph must be told, and eager mode does by itself: what runs, and when."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lossscale.runtime.mode import in_xla


def grouped(results: Any) -> Any:
    """Returns one op that runs all `results`, or None in eager mode: they have run."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    ops = []
    for result in tf.nest.flatten(results):
        op = result if isinstance(result, tf.Operation) else getattr(result, "op", None)
        # Results of another graph, or of mirrored variables, ran or will run there.
        if getattr(op, "graph", None) is graph:
            ops.append(op)
    return tf.group(*ops)


def after(results: Any, value: Any) -> Any:
    """Returns the tensor `value`, once all `results` have run."""
    op = grouped(results)
    with tf.control_dependencies([] if op is None else [op]):
        return tf.identity(value)


def branches_freely() -> bool:
    """Tells whether a branch here saves time, and runs whenever the graph does."""
    if tf.executing_eagerly() or in_xla():
        return False
    # In a session, whoever asks for a branch's result runs all that is in it.
    return bool(tf.compat.v1.executing_eagerly_outside_functions())
