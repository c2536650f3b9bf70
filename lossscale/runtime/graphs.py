"""Which graph is built now, and which around it are in sight."""

from __future__ import annotations

from typing import Any, Iterator

import tensorflow as tf


def current_graph() -> Any:
    """Returns the graph that is being built, None in eager mode."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def visible_graphs() -> Iterator[Any]:
    """Yields the current graph and those around it whose tensors it may use.

    Within a branch of `tf.cond` or a loop's body the tensors of the graph around it
    are visible. Those around a nested `tf.function` are not: its trace is used again.
    """
    graph = current_graph()
    yield graph
    # Not public, but used all over TensorFlow (seen on 2.4 to 2.21).
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
        yield graph


def above_branches(graph: Any) -> Any:
    """Returns the innermost graph around `graph` that is no branch of a `tf.cond`.

    What is created there has been computed before the branch, whether that runs or not.
    A loop's body is such a graph: each of its runs is a run of its own.
    """
    # Not public (seen on TensorFlow 2.4, 2.10, 2.15 and 2.21); a switch's branches too.
    while type(graph).__name__ == "CondBranchFuncGraph":
        graph = graph.outer_graph
    return graph
