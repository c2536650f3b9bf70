"""What a graph or a function does, one operation after the other: two views of one.

A graph that is built now has operations. A function that eager mode calls is known by
its name alone, under which TensorFlow keeps its definition: a protocol buffer. Both
look the same here. Values are named by keys: the `id`s of a graph's tensors, the names
of a definition's.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import (
    Any,
    Callable,
    Dict,
    Hashable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Tuple,
)

import numpy as np
import tensorflow as tf

# Not public, and the same on TensorFlow 2.4, 2.10, 2.15 and 2.21.
from tensorflow.python.eager import context

from lossscale.runtime import mode
from lossscale.runtime.aliases import Array, Graph, Op, Tensor
from lossscale.runtime.graphs import BODIES, bodies, names_of_bodies
from lossscale.runtime.op_types import AMBIGUOUS, kind_of, output_names

#: What takes a mark on every TensorFlow, within `tf.vectorized_map` too.
_ALWAYS_MARKED = {*BODIES, "Const", "Identity", "ReadVariableOp"}
#: The attribute of an operation that says what is marked on it.
MARK = "_loss_scale"


#: How many inputs are a dataset's state, and how many its function captures.
Counts = Tuple[int, int]


class Node(NamedTuple):
    """An operation.

    Attributes:
      kind: Its type.
      inputs: The keys of its inputs.
      outputs: The keys of its outputs. In a definition those of one operation may have
        one key together.
      value: Returns what an input is if it is a constant, else None.
      width: Returns the static size of the last axis of an input, None if there is
        none.
      bodies: Returns its bodies, None for one that is not known.
      counts: Returns of a dataset how many of its inputs are the state that goes round
        in it, and how many its function captures.
      mark: What is marked on it.
    """

    kind: str
    inputs: List[Hashable]
    outputs: List[Hashable]
    value: Callable[[int], Optional[Array]]
    width: Callable[[int], Optional[int]]
    bodies: Callable[[], List[Any]]
    counts: Callable[[], Counts]
    mark: str = ""


class GraphBody:
    """A graph, as it stands now.

    Attributes:
      graph: The graph.
      key: What names it.
      inputs: The keys of its inputs.
      outputs: The keys of its outputs.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.key: Hashable = id(graph)
        # A graph of `tf.compat.v1` has neither.
        self.inputs: List[Hashable] = [id(x) for x in getattr(graph, "inputs", ())]
        self.outputs: List[Hashable] = [id(x) for x in getattr(graph, "outputs", ())]

    def nodes(self, start: int = 0) -> Iterator[Node]:
        """Yields the operations from one on, in the order of their creation."""
        for operation in self.graph.get_operations()[start:]:
            yield _node_of(operation)


def _node_of(operation: Op) -> Node:
    # A placeholder that is added to the condition of a loop has none on TensorFlow 2.4.
    inputs, kind = getattr(operation, "inputs", ()), operation.type
    if kind in AMBIGUOUS:
        token = operation.get_attr("token") if kind == "EagerPyFunc" else b""
        kind = kind_of(kind, operation.outputs[0].dtype, token)
    return Node(
        kind,
        [id(each) for each in inputs],
        [id(each) for each in operation.outputs],
        lambda number: value_of(inputs[number].op if inputs else operation),
        lambda number: width_of(inputs[number]),
        lambda: _bodies_of(operation),
        lambda: _counts_in(operation.node_def),
        mark_on(operation) if operation.type in BODIES else "",
    )


def put_mark(operation: Op, mark: str) -> None:
    """Marks an operation. Functions that are made of it keep the mark."""
    if not (mode.VECTORIZES_MARKED or operation.type in _ALWAYS_MARKED):
        return
    # Not public, and the same on TensorFlow 2.4, 2.10, 2.15 and 2.21.
    operation._set_attr(MARK, tf.compat.v1.AttrValue(s=mark.encode()))


def mark_on(operation: Op) -> str:
    """Returns what is marked on an operation, nothing if nothing is."""
    try:
        return str(operation.get_attr(MARK).decode())
    except ValueError:
        return ""


def value_of(operation: Op) -> Optional[Array]:
    """Returns what an operation's result is, if it is a constant, else None."""
    if operation.type in ("Identity", "Cast"):
        return value_of(operation.inputs[0].op)
    return _array(operation.node_def) if operation.type == "Const" else None


def _array(node: Any) -> Optional[Array]:
    return numbers_in(tf.make_ndarray(node.attr["value"].tensor))


def numbers_in(array: Array) -> Optional[Array]:
    """Returns an array of numbers that NumPy computes with, None of anything else."""
    if array.dtype.kind == "V":  # bfloat16 and float8
        return array.astype(np.float32)
    return array if array.dtype.kind in "biufc" else None


def width_of(tensor: Tensor) -> Optional[int]:
    """Returns the static size of a tensor's last axis, None if there is none."""
    shape = tensor.shape
    return shape[-1] if shape.rank else None


def _bodies_of(operation: Op) -> List[Any]:
    pairs = zip(bodies(operation), names_of_bodies(operation))
    return [definition(name) if g is None else GraphBody(g) for g, name in pairs]


class Definition:
    """A function as TensorFlow keeps it.

    Attributes:
      graph: None: it is known by its name alone.
      key: Its name.
      inputs: The keys of its inputs.
      outputs: The keys of its outputs.
    """

    graph: Graph = None

    def __init__(self, function: Any) -> None:
        self.key: Hashable = function.signature.name
        self._nodes = function.node_def
        #: Operations whose outputs have keys of their own, and these.
        self._many: Dict[str, List[Hashable]] = {}
        self._constants: Dict[str, Any] = {}
        for node in self._nodes:
            outputs = _outputs(node)
            if len(outputs) > 1 or _is_function(node.op) or node.op in BODIES:
                self._many[node.name] = outputs
            elif node.op == "Const":
                self._constants[node.name] = node
        self.inputs: List[Hashable] = [x.name for x in function.signature.input_arg]
        names = [each.name for each in function.signature.output_arg]
        self.outputs: List[Hashable] = [self._key(function.ret[name]) for name in names]

    def _key(self, name: str) -> str:
        """Returns the key of what a definition calls `operation:output:number`."""
        operation = name.split(":", 1)[0]
        return name if operation in self._many else operation

    def nodes(self, start: int = 0) -> Iterator[Node]:
        """Yields the operations in an order in which each comes after its inputs."""
        for node in self._in_order()[start:]:
            inputs = [self._key(each) for each in node.input if each[0] != "^"]
            mark = node.attr[MARK].s.decode() if MARK in node.attr else ""
            yield Node(
                _kind_in(node),
                list(inputs),
                self._many.get(node.name, [node.name]),
                partial(self._value, inputs or [node.name]),
                lambda _: None,
                partial(_bodies_in, node),
                partial(_counts_in, node),
                mark,
            )

    def _in_order(self) -> List[Any]:
        waiting = {node.name: node for node in reversed(self._nodes)}
        ordered: List[Any] = []
        stack: List[Any] = []
        while waiting or stack:
            if not stack:
                stack.append(waiting.popitem()[1])
            names = (each.lstrip("^").split(":", 1)[0] for each in stack[-1].input)
            # One at a time: of two that it needs, one may need the other.
            before = next((name for name in names if name in waiting), None)
            if before is None:
                ordered.append(stack.pop())
            else:
                stack.append(waiting.pop(before))
        return ordered

    def _value(self, keys: List[str], number: int) -> Optional[Array]:
        node = self._constants.get(keys[number])
        return None if node is None else _array(node)


def _kind_in(node: Any) -> str:
    if node.op in AMBIGUOUS:
        to = tf.as_dtype(node.attr["DstT"].type) if node.op == "Cast" else None
        return kind_of(node.op, to, node.attr["token"].s)
    return "PartitionedCall" if _is_function(node.op) else str(node.op)


def _outputs(node: Any) -> List[Hashable]:
    if _is_function(node.op):
        names = context.context().get_function_def(node.op).signature.output_arg
        return [f"{node.name}:{each.name}:0" for each in names]
    return list(output_names(node))


def _bodies_in(node: Any) -> List[Optional[Definition]]:
    if node.op not in BODIES:
        return [definition(node.op)]
    named = [node.attr[name] for name in BODIES[node.op]]
    lists = [list(each.list.func) or [each.func] for each in named]
    return [definition(each.name) for listed in lists for each in listed]


def _counts_in(node: Any) -> Counts:
    states, captured = (node.attr[name].list.type for name in ("Tstate", "Targuments"))
    return len(states), len(captured)


def function_of_elements(attrs: Any) -> Tuple[str, Counts]:
    """Returns the name of a dataset's function and the counts of `Node.counts`.

    Args:
      attrs: The names of attributes and their values, in turn, as eager mode has them.
    """
    found = dict(zip(attrs[::2], attrs[1::2]))
    counts = len(found.get("Tstate", ())), len(found.get("Targuments", ()))
    return tf.compat.as_str(found["f"].name), counts


def _is_function(kind: str) -> bool:
    return kind.startswith("__") and context.context().has_function(kind)


def definition(name: str) -> Optional[Definition]:
    """Returns the function that eager mode knows by a name, None without one."""
    return _defined(name) if context.context().has_function(name) else None


@lru_cache(maxsize=32)  # what a loop calls is asked for at each of its calls
def _defined(name: str) -> Definition:
    return Definition(context.context().get_function_def(name))


def forget_definitions() -> None:
    """Lets the definitions go that were looked into. That of a small step is 80 KB."""
    _defined.cache_clear()
