"""Which graph is built now, and which around it are in sight."""

from __future__ import annotations

from typing import Any, Iterator

import tensorflow as tf

_SIDES = ("then_branch", "else_branch")
_BRANCHES = {
    **dict.fromkeys(("If", "StatelessIf"), _SIDES),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
}


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


def graphs_around_branches() -> Iterator[Any]:
    """Yields the visible graphs that are no branches of a `tf.cond`, from the inside.

    The first is the function, or the body of the loop, that is traced now.
    """
    for graph in visible_graphs():
        if graph is above_branches(graph):
            yield graph


def is_traced_in_place(graph: Any) -> bool:
    """Tells whether a graph is in sight, or of a loop or a branch of one that is.

    Any other is a function's, traced once and called anywhere.
    """
    visible = list(visible_graphs())
    while getattr(graph, "is_control_flow_graph", False):
        if any(graph is each for each in visible):
            break
        graph = graph.outer_graph
    return any(graph is each for each in visible)


def is_other_branch(graph: Any) -> bool:
    """Tells whether `graph` is in another branch of a `tf.cond` that is built now.

    Of two branches only one runs. The operation that has them is created after both.
    """
    visible, inner = list(visible_graphs()), None
    while graph is not None and not any(graph is each for each in visible):
        inner, graph = graph, getattr(graph, "outer_graph", None)
    if graph is None or type(inner).__name__ != "CondBranchFuncGraph":
        return False
    return not any(inner is each for each in _branches_in(graph))


def _branches_in(graph: Any) -> Iterator[Any]:
    """Yields the branches of all operations of a graph that have some."""
    for operation in graph.get_operations():
        for attribute in _BRANCHES.get(operation.type, ()):
            value = operation.get_attr(attribute)
            for each in value if isinstance(value, list) else [value]:
                # Not public (seen on TensorFlow 2.4, 2.15 and 2.21).
                yield getattr(graph._get_function(each.name), "graph", None)
