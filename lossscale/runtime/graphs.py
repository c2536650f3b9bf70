"""Which graph is built now, which around it are in sight, and the bodies in one."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Iterable, Iterator, List, Tuple, TypeVar

import tensorflow as tf

from lossscale.runtime.aliases import Graph, Op, Tensor

Notes = TypeVar("Notes")
#: A graph, None in eager mode, and the loop or branch of `tf.compat.v1` in it, or None.
Place = Tuple[Any, Any]

#: The attribute of a graph that holds what is noted of it.
_NOTES = "_lossscale_notes"

LOOPS = {"While", "StatelessWhile"}
BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}
#: Those that call a function of elements. AutoGraph's `for batch in dataset` is among
#: them, and what returns datasets of its own.
DATASETS = {
    *("ScanDataset", "ReduceDataset", "MapDataset", "ParallelMapDataset"),
    *("ParallelMapDatasetV2", "MapAndBatchDataset", "FlatMapDataset"),
    *("InterleaveDataset", "ParallelInterleaveDatasetV2"),
    *("ParallelInterleaveDatasetV3", "ParallelInterleaveDatasetV4"),
}
#: Operations with bodies, and the attributes that name those.
BODIES = {
    **dict.fromkeys(LOOPS, ("body", "cond")),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
    **dict.fromkeys(DATASETS, ("f",)),
}


def current_graph() -> Any:
    """Returns the graph that is being built, None in eager mode."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def is_building() -> bool:
    """Tells whether a graph is built now. If not, eager mode runs each operation."""
    return current_graph() is not None


def graph_of(tensor: Tensor) -> Any:
    """Returns the graph that a tensor belongs to, None in eager mode."""
    return getattr(tensor, "graph", None)  # eager mode's raise AttributeError


def is_eager(tensor: Tensor) -> bool:
    """Tells whether a tensor is one of eager mode."""
    return graph_of(tensor) is None


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


def this_place() -> Place:
    """Returns where something is built now."""
    graph = current_graph()
    return graph, _context_of(graph)


def is_in_sight(place: Place) -> bool:
    """Tells whether tensors of a place can be used where something is built now.

    A loop or a branch that has ended is out of sight. Those of `tf.compat.v1` have no
    graph of their own.
    """
    graph, context = place
    if not any(graph is each for each in visible_graphs()):
        return False
    around = _context_of(graph)
    while around is not None and around is not context:
        around = around.outer_context
    return around is context


def is_visible(tensor: Tensor) -> bool:
    """Tells whether a tensor can be used where something is built now."""
    graph = graph_of(tensor)
    if graph is None:
        return True
    context = _context_of(tensor.op)
    if tensor.op.type in {"Exit", "RefExit"}:  # what a loop returns is outside of it
        context = context.outer_context
    return is_in_sight((graph, context))


def _context_of(where: Any) -> Any:
    """Returns the loop or branch of `tf.compat.v1` that an operation is in, or None.

    Args:
      where: An operation, or a graph: then what is built in it now. None: eager mode.
    """
    # Not public, and the same on TensorFlow 2.4 to 2.21: `mode` asks for it, too.
    return None if where is None else where._get_control_flow_context()


def is_in_reach(graph: Graph) -> bool:
    """Tells whether what is built now can use the tensors of a graph.

    That is the current one and each around it: a function captures what it uses.
    """
    around = current_graph()
    while around is not None and around is not graph:
        around = getattr(around, "outer_graph", None)
    return around is not None


def is_nested() -> bool:
    """Tells whether what is built now is a part of another graph.

    That is a loop, a branch, or a function that another one calls: what they return
    goes on, and a tensor of theirs cannot be used.
    """
    graph, context = this_place()
    if context is not None and not context.IsXLAContext():
        return True
    around = getattr(graph, "outer_graph", None)
    if around is None:
        return False
    # Not public (seen on 2.4 to 2.21): whether a graph is that of a function. If not,
    # it is a session's graph, or eager mode calls this function.
    in_session = not tf.compat.v1.executing_eagerly_outside_functions()
    return in_session or bool(around.building_function)


def are_arguments(tensors: Iterable[Tensor]) -> bool:
    """Tells whether tensors are computed from arguments of this function alone.

    Args:
      tensors: The tensors; a `None` says nothing.
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


def above_branches(graph: Graph) -> Any:
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


def is_traced_in_place(graph: Graph) -> bool:
    """Tells whether a graph is in sight, or of a loop or a branch of one that is.

    Any other is a function's, traced once and called anywhere.
    """
    visible = list(visible_graphs())
    while getattr(graph, "is_control_flow_graph", False):
        if any(graph is each for each in visible):
            break
        graph = graph.outer_graph
    return any(graph is each for each in visible)


def is_other_branch(graph: Graph) -> bool:
    """Tells whether `graph` is in another branch of a `tf.cond` that is built now.

    Of two branches only one runs. The operation that has them is created after both.
    """
    visible, inner = list(visible_graphs()), None
    while graph is not None and not any(graph is each for each in visible):
        inner, graph = graph, getattr(graph, "outer_graph", None)
    if graph is None or type(inner).__name__ != "CondBranchFuncGraph":
        return False
    forks = (each for each in graph.get_operations() if each.type in BRANCHES)
    return not any(inner is each for fork in forks for each in bodies(fork))


def bodies(operation: Op) -> List[Any]:
    """Returns the graphs of an operation's bodies, None for one that is not known.

    Args:
      operation: One of the types in `BODIES`.
    """
    # Not public, and the same on TensorFlow 2.4, 2.8, 2.10, 2.15 and 2.21. A graph's
    # own name is not enough: functions of one name have several.
    functions = map(operation.graph._get_function, names_of_bodies(operation))
    return [getattr(function, "graph", None) for function in functions]


def let_bodies_go(result: Tensor) -> None:
    """Lets the graphs of the branch go that a tensor is the result of.

    TensorFlow keeps them with the graph that they are in, to find gradients, and makes
    them anew if it is asked for gradients without them. The names of their functions
    stay, which is what runs.
    """
    operation = result.op
    while operation.type == "Identity":  # `tf.cond` returns that of what it returns
        operation = operation.inputs[0].op
    if operation.type not in BRANCHES:  # a `tf.compat.v1` graph has other branches
        return
    for name in names_of_bodies(operation):
        function = operation.graph._get_function(name)
        # Not public (seen on 2.15 to 2.21). Where there is no such name, nothing is let
        # go, as on 2.13.
        if hasattr(function, "_cached_graph"):
            function._cached_graph = None
            operation._true_graph = operation._false_graph = None


def names_of_bodies(operation: Op) -> List[str]:
    """Returns the names of the functions that are an operation's bodies."""
    values = [operation.get_attr(name) for name in BODIES[operation.type]]
    named = values[0] if isinstance(values[0], list) else values
    return [each.name for each in named]


def notes_of(graph: Graph, owner: Any, make: Callable[[], Notes]) -> Notes:
    """Returns what `owner` has noted of a graph, at first what `make` returns.

    It dies with the graph, and with `owner`.
    """
    # On the graph: in a dictionary of graphs, tensors that are noted would keep it.
    if not hasattr(graph, _NOTES):
        setattr(graph, _NOTES, weakref.WeakKeyDictionary())
    of_owners = getattr(graph, _NOTES)
    if owner not in of_owners:
        of_owners[owner] = make()
    notes: Notes = of_owners[owner]
    return notes
