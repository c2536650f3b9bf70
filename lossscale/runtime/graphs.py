"""Which graph is being built, and which graphs can be read from there."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Optional, Tuple, TypeVar, cast

import tensorflow as tf

# Not public: `body_of` needs them (seen on TensorFlow 2.4 to 2.21).
from tensorflow.python.eager import context
from tensorflow.python.framework import function_def_to_graph

from lossscale.runtime.aliases import Graph, Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def do_not_convert(function: Function) -> Function:
    """Marks a function that AutoGraph must leave as it is written: it saves time."""
    return cast(Function, tf.autograph.experimental.do_not_convert(function))


def current_graph() -> Optional[Graph]:
    """Returns the graph that is being built, None in eager mode."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def is_building() -> bool:
    """Whether a graph is being built, or eager mode runs each operation."""
    return current_graph() is not None


def graph_of(tensor: Tensor) -> Optional[Graph]:
    """Returns the graph that a tensor belongs to, None in eager mode."""
    return getattr(tensor, "graph", None)  # an eager tensor raises AttributeError


def visible_graphs() -> Iterable[Optional[Graph]]:
    """Yields the current graph and those around it whose tensors it may use.

    A branch or a loop's body may use those of the graph around it, a nested
    `tf.function` may not.
    """
    graph: Any = current_graph()
    yield graph
    # Not public, but used all over TensorFlow.
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
        yield graph


def is_visible(tensor: Tensor) -> bool:
    """Whether operations that are created now can use a tensor.

    They cannot use those of a loop or a branch that has ended.
    """
    graph = graph_of(tensor)
    if graph is None:
        return True
    if graph is not current_graph() and graph not in list(visible_graphs()):
        return False
    # A loop or a branch of `tf.compat.v1` has no graph of its own.
    around, context = context_of(graph), context_of(tensor.op)
    if context is None:
        return True
    # A loop's results are outside of it.
    if tensor.op.type in {"Exit", "RefExit"}:
        context = context.outer_context
    while around is not None and around is not context:
        around = around.outer_context
    return around is context


def context_of(where: Any) -> Any:
    """Returns the loop or branch of `tf.compat.v1`, or the XLA, of an operation.

    A graph stands for the operation that is created next in it.
    """
    return where._get_control_flow_context()  # not public


def is_nested() -> bool:
    """Whether a session builds a loop, a branch or a function now.

    The code after it can use what that returns, and no other tensor in it.
    """
    graph = current_graph()
    context = context_of(graph)
    is_within = context is not None and not context.IsXLAContext()
    return is_within or getattr(graph, "outer_graph", None) is not None


def are_arguments(tensors: Iterable[Optional[Tensor]]) -> bool:
    """Whether tensors are computed from nothing but this function's arguments."""
    values = [tensor for tensor in tensors if tensor is not None]
    seen, has_argument = set(), False
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        operation = None if graph_of(value) is None else value.op
        if operation is None or operation.type == "ReadVariableOp":
            return False
        if operation.type == "Placeholder":
            if captured_by(value) is not None:
                return False
            has_argument = True
        values += operation.inputs
    return has_argument


def captured_by(tensor: Tensor) -> Optional[Tensor]:
    """Returns the tensor from elsewhere that a placeholder stands for, or None."""
    # Not public. Graphs that are no functions have no captures.
    captures = getattr(graph_of(tensor), "captures", ())
    return next((outer for outer, inner in captures if inner is tensor), None)


def above_branches(graph: Optional[Graph]) -> Optional[Graph]:
    """Returns the innermost graph around `graph` that is no branch of a `tf.cond`."""
    while graph is not None and _is_branch(graph):
        graph = graph.outer_graph
    return graph


def _is_branch(graph: Optional[Graph]) -> bool:
    return type(graph).__name__ == "CondBranchFuncGraph"  # not public


def branches_here() -> Dict[Tuple[Graph, int], Graph]:
    """Returns the branches of `tf.cond` and `tf.switch_case` that are being built.

    The branches of one fork have equal keys: how many forks are before them.
    TensorFlow creates the operation that has the branches after all of them.
    """
    fork_types = {"If", "StatelessIf", "Case", "StatelessCase"}
    branches: Dict[Tuple[Graph, int], Graph] = {}
    graph: Any
    for graph in visible_graphs():
        if _is_branch(graph):
            around = graph.outer_graph
            forks = [op for op in around.get_operations() if op.type in fork_types]
            branches[around, len(forks)] = graph
    return branches


def body_of(function: str) -> Optional[Graph]:
    """Returns a copy of a function of this name. None: unknown, as a session's are."""
    try:
        definition = context.context().get_function_def(function)
        return function_def_to_graph.function_def_to_graph(definition)
    except Exception:  # what is raised differs between versions
        return None
