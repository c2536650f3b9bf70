"""Which graph is being built, and what is in sight from there."""

from __future__ import annotations

import weakref
from typing import Callable, Iterable, Iterator, List, Optional, Tuple, TypeVar, Union

import tensorflow as tf

from lossscale.runtime.aliases import Context, Graph, Operation, Tensor

Notes = TypeVar("Notes")
#: A graph (None: eager mode), and the loop or branch of `tf.compat.v1` in it, or None.
Place = Tuple[Optional[Graph], Optional[Context]]

#: The attribute of a graph that holds our notes on it.
_NOTES = "_lossscale_notes"

#: The attributes that name the branches of an operation that branches.
_BRANCHES = {
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
}


def current_graph() -> Optional[Graph]:
    """Returns the graph that is being built, None in eager mode."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def is_building() -> bool:
    """Tells whether a graph is being built. If not, eager mode runs each operation."""
    return current_graph() is not None


def graph_of(tensor: Tensor) -> Optional[Graph]:
    """Returns the graph that a tensor belongs to, None in eager mode."""
    return getattr(tensor, "graph", None)  # an eager tensor raises AttributeError


def visible_graphs() -> Iterator[Optional[Graph]]:
    """Yields the current graph and those around it whose tensors it may use.

    A branch of `tf.cond` or a loop's body may use the tensors of the graph around it.
    A nested `tf.function` may not use those of the graph around it: its trace is used
    again elsewhere.
    """
    graph = current_graph()
    yield graph
    # Not public, but used all over TensorFlow (seen on 2.4 to 2.21).
    while graph is not None and _is_part_of_outer(graph):
        graph = graph.outer_graph
        yield graph


def _is_part_of_outer(graph: Optional[Graph]) -> bool:
    """Tells whether a graph is a branch of `tf.cond`, or a loop's body."""
    return bool(getattr(graph, "is_control_flow_graph", False))


def this_place() -> Place:
    """Returns the place where operations are being created."""
    graph = current_graph()
    return graph, _context_of(graph)


def is_in_sight(place: Place) -> bool:
    """Tells whether operations that are created now can use the tensors of a place.

    They cannot use the tensors of a loop or a branch that has ended. A loop or a branch
    of `tf.compat.v1` has no graph of its own, so contexts are compared, too.
    """
    graph, context = place
    if not any(graph is each for each in visible_graphs()):
        return False
    around = _context_of(graph)
    while around is not None and around is not context:
        around = around.outer_context
    return around is context


def is_visible(tensor: Tensor) -> bool:
    """Tells whether operations that are created now can use a tensor."""
    graph = graph_of(tensor)
    if graph is None:
        return True
    context = _context_of(tensor.op)
    # A loop's results are outside of it.
    if context is not None and tensor.op.type in {"Exit", "RefExit"}:
        context = context.outer_context
    return is_in_sight((graph, context))


def _context_of(where: Union[Operation, Graph, None]) -> Optional[Context]:
    """Returns the loop or branch of `tf.compat.v1` that an operation is in, or None.

    Args:
      where: An operation; or a graph, which stands for the operation that is created
        next in it; or None in eager mode.
    """
    # Not public, and the same on TensorFlow 2.4 to 2.21. `mode` uses it, too.
    return None if where is None else where._get_control_flow_context()


def is_nested() -> bool:
    """Tells whether the current graph is a part of another graph.

    That is so in a loop, in a branch, and in a function that another function calls.
    The code after it can use what it returns, and no other tensor in it.
    """
    graph, context = this_place()
    if context is not None and not context.IsXLAContext():
        return True
    around = getattr(graph, "outer_graph", None)
    if around is None:
        return False
    # Not public (seen on 2.4 to 2.21): whether the outer graph is a function's. If not,
    # the outer graph is a session's, or eager mode calls this function.
    in_session = not tf.compat.v1.executing_eagerly_outside_functions()
    return in_session or bool(around.building_function)


def are_arguments(tensors: Iterable[Optional[Tensor]]) -> bool:
    """Tells whether tensors are computed from nothing but this function's arguments.

    Args:
      tensors: The tensors. A `None` among them changes nothing.
    """
    values = [tensor for tensor in tensors if tensor is not None]
    seen, found = set(), False
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        operation = None if graph_of(value) is None else value.op
        if operation is None or operation.type == "ReadVariableOp":
            return False
        if operation.type == "Placeholder":
            captured = getattr(value.graph, "internal_captures", ())
            if any(value is each for each in captured):
                return False
            found = True
        values += operation.inputs
    return found


def above_branches(graph: Optional[Graph]) -> Optional[Graph]:
    """Returns the innermost graph around `graph` that is no branch of a `tf.cond`.

    Operations in it run whether the branch does or not. A loop's body is such a graph,
    since each of its runs computes everything in it anew.
    """
    while graph is not None and _is_branch(graph):
        graph = graph.outer_graph
    return graph


def _is_branch(graph: Optional[Graph]) -> bool:
    """Tells whether a graph is a branch of a `tf.cond` or of a `tf.switch_case`."""
    # Not public (seen on TensorFlow 2.4, 2.10, 2.15 and 2.21).
    return type(graph).__name__ == "CondBranchFuncGraph"


def is_other_branch(graph: Optional[Graph]) -> bool:
    """Tells whether `graph` is in the other branch of a `tf.cond` that is being built.

    Only one of the two branches runs. TensorFlow creates the operation that has them
    after both.
    """
    visible, inner = list(visible_graphs()), None
    while graph is not None and not any(graph is each for each in visible):
        inner, graph = graph, getattr(graph, "outer_graph", None)
    if graph is None or not _is_branch(inner):
        return False
    forks = [each for each in graph.get_operations() if each.type in _BRANCHES]
    return not any(inner is each for fork in forks for each in _branches_of(fork))


def _branches_of(fork: Operation) -> List[Optional[Graph]]:
    """Returns the graphs of an operation's branches, None for an unknown one."""
    values = [fork.get_attr(name) for name in _BRANCHES[fork.type]]
    named = values[0] if isinstance(values[0], list) else values
    # Not public. A graph's name does not identify it: several functions may have it.
    functions = [fork.graph._get_function(each.name) for each in named]
    return [getattr(function, "graph", None) for function in functions]


def notes_of(graph: Graph, owner: object, make: Callable[[], Notes]) -> Notes:
    """Returns the notes of `owner` on a graph. `make` makes them at the first call.

    They are freed with the graph, or with `owner`.
    """
    # The notes hang on the graph. In a dictionary of graphs, the tensors in the notes
    # would keep the graph alive.
    if not hasattr(graph, _NOTES):
        setattr(graph, _NOTES, weakref.WeakKeyDictionary())
    of_owners = getattr(graph, _NOTES)
    if owner not in of_owners:
        of_owners[owner] = make()
    notes: Notes = of_owners[owner]
    return notes
