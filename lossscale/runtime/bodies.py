"""The operations of a graph or a function, in order. Both look the same: a `Body`.

A graph that is being built has operations (`GraphBody`). Of a function that eager mode
calls only the name is known; TensorFlow keeps the function's definition, a protocol
buffer, by that name (`Definition`). Keys name values: the `id`s of tensors in a graph,
the names of values in a definition.
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
    Protocol,
    Tuple,
)

import numpy as np
import tensorflow as tf

# Not public, and the same on TensorFlow 2.4, 2.10, 2.15 and 2.21.
from tensorflow.python.eager import context

from lossscale.runtime import mode
from lossscale.runtime.aliases import (
    Array,
    Attributes,
    Graph,
    NodeDef,
    Operation,
    Tensor,
)
from lossscale.runtime.graphs import BODIES, bodies, names_of_bodies
from lossscale.runtime.op_types import AMBIGUOUS, kind_of, output_names

#: These accept a mark on every TensorFlow, within `tf.vectorized_map` too.
_ALWAYS_MARKED = {*BODIES, "Const", "Identity", "ReadVariableOp"}
#: The attribute of an operation that holds its mark, a string.
MARK = "_loss_scale"
#: How many inputs are a dataset's state, and how many its function captures.
Counts = Tuple[int, int]


class Body(Protocol):
    """A graph or a function, as operations.

    Attributes:
      graph: The graph. None: a function that is known by its name alone.
      key: What identifies it: the graph's `id`, or the function's name.
      inputs: The keys of its inputs.
      outputs: The keys of its outputs.
    """

    key: Hashable
    inputs: List[Hashable]
    outputs: List[Hashable]

    @property
    def graph(self) -> Optional[Graph]: ...

    def nodes(self, start: int = 0) -> Iterator[Node]:
        """Yields the operations from number `start` on, in order."""


class Node(NamedTuple):
    """An operation of a body.

    Attributes:
      kind: Its type.
      inputs: The keys of its inputs.
      outputs: The keys of its outputs. In a definition the outputs of one operation may
        share one key.
      value: Takes the position of an input. Returns the input's value if it is a
        constant, else None.
      width: Takes the position of an input. Returns the static size of its last axis,
        None if there is none.
      bodies: Returns its bodies, None in place of an unknown one.
      counts: Returns how many of a dataset's inputs are its state, and how many its
        function captures.
      mark: Its mark. Empty: it has none.
    """

    kind: str
    inputs: List[Hashable]
    outputs: List[Hashable]
    value: Callable[[int], Optional[Array]]
    width: Callable[[int], Optional[int]]
    bodies: Callable[[], List[Optional[Body]]]
    counts: Callable[[], Counts]
    mark: str = ""


class GraphBody:
    """A graph as a `Body`, with the operations that it has now."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.key: Hashable = id(graph)
        # A graph of `tf.compat.v1` has neither inputs nor outputs.
        self.inputs: List[Hashable] = [id(x) for x in getattr(graph, "inputs", ())]
        self.outputs: List[Hashable] = [id(x) for x in getattr(graph, "outputs", ())]

    def nodes(self, start: int = 0) -> Iterator[Node]:
        """Yields the operations from number `start` on, in order of their creation."""
        for operation in self.graph.get_operations()[start:]:
            yield _node_of(operation)


def _node_of(operation: Operation) -> Node:
    # On TensorFlow 2.4 a placeholder in the condition of a loop has no `inputs`.
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


def put_mark(operation: Operation, mark: str) -> None:
    """Marks an operation. A function that is made of its graph keeps the mark."""
    if not (mode.VECTORIZES_MARKED or operation.type in _ALWAYS_MARKED):
        return
    # Not public, and the same on TensorFlow 2.4, 2.10, 2.15 and 2.21.
    operation._set_attr(MARK, tf.compat.v1.AttrValue(s=mark.encode()))


def mark_on(operation: Operation) -> str:
    """Returns the mark of an operation, empty if it has none."""
    try:
        return str(operation.get_attr(MARK).decode())
    except ValueError:
        return ""


def value_of(operation: Operation) -> Optional[Array]:
    """Returns the value of an operation's result if it is a constant, else None."""
    if operation.type in ("Identity", "Cast"):
        return value_of(operation.inputs[0].op)
    return _array(operation.node_def) if operation.type == "Const" else None


def _array(node: NodeDef) -> Optional[Array]:
    return numbers_in(tf.make_ndarray(node.attr["value"].tensor))


def numbers_in(array: Array) -> Optional[Array]:
    """Returns an array with which NumPy computes, None if it holds no numbers."""
    if array.dtype.kind == "V":  # bfloat16 and float8
        return array.astype(np.float32)
    return array if array.dtype.kind in "biufc" else None


def width_of(tensor: Tensor) -> Optional[int]:
    """Returns the static size of a tensor's last axis, None if there is none."""
    shape = tensor.shape
    return shape[-1] if shape.rank else None


def _bodies_of(operation: Operation) -> List[Optional[Body]]:
    pairs = zip(bodies(operation), names_of_bodies(operation))
    return [definition(name) if g is None else GraphBody(g) for g, name in pairs]


class Definition:
    """A function's definition as a `Body`."""

    graph = None

    def __init__(self, function: Any) -> None:
        self.key: Hashable = function.signature.name
        self._nodes: List[NodeDef] = function.node_def
        #: The outputs' keys of operations whose outputs share no key.
        self._many: Dict[str, List[Hashable]] = {}
        self._constants: Dict[str, NodeDef] = {}
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
        """Returns the key of a value: a definition calls it `operation:output:0`."""
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

    def _in_order(self) -> List[NodeDef]:
        waiting = {node.name: node for node in reversed(self._nodes)}
        ordered: List[NodeDef] = []
        stack: List[NodeDef] = []
        while waiting or stack:
            if not stack:
                stack.append(waiting.popitem()[1])
            names = (each.lstrip("^").split(":", 1)[0] for each in stack[-1].input)
            # One at a time: if a node needs two others, one of them may need the other.
            before = next((name for name in names if name in waiting), None)
            if before is None:
                ordered.append(stack.pop())
            else:
                stack.append(waiting.pop(before))
        return ordered

    def _value(self, keys: List[str], number: int) -> Optional[Array]:
        node = self._constants.get(keys[number])
        return None if node is None else _array(node)


def _kind_in(node: NodeDef) -> str:
    if node.op in AMBIGUOUS:
        to = tf.as_dtype(node.attr["DstT"].type) if node.op == "Cast" else None
        return kind_of(node.op, to, node.attr["token"].s)
    return "PartitionedCall" if _is_function(node.op) else str(node.op)


def _outputs(node: NodeDef) -> List[Hashable]:
    if _is_function(node.op):
        names = context.context().get_function_def(node.op).signature.output_arg
        return [f"{node.name}:{each.name}:0" for each in names]
    return list(output_names(node))


def _bodies_in(node: NodeDef) -> List[Optional[Body]]:
    if node.op not in BODIES:
        return [definition(node.op)]
    named = [node.attr[name] for name in BODIES[node.op]]
    lists = [list(each.list.func) or [each.func] for each in named]
    return [definition(each.name) for listed in lists for each in listed]


def _counts_in(node: NodeDef) -> Counts:
    states, captured = (node.attr[name].list.type for name in ("Tstate", "Targuments"))
    return len(states), len(captured)


def function_of_elements(attrs: Attributes) -> Tuple[str, Counts]:
    """Returns the name of a dataset's function, and what `Node.counts` returns.

    Args:
      attrs: The dataset's attributes, as eager mode has them.
    """
    found = dict(zip(attrs[::2], attrs[1::2]))
    counts = len(found.get("Tstate", ())), len(found.get("Targuments", ()))
    return tf.compat.as_str(found["f"].name), counts


def _is_function(kind: str) -> bool:
    return kind.startswith("__") and context.context().has_function(kind)


def definition(name: str) -> Optional[Definition]:
    """Returns the function that eager mode knows by a name, None if there is none."""
    return _defined(name) if context.context().has_function(name) else None


@lru_cache(maxsize=32)  # a loop looks its functions up at each of its calls
def _defined(name: str) -> Definition:
    return Definition(context.context().get_function_def(name))


def forget_definitions() -> None:
    """Frees the definitions that were read. That of a small step takes 80 KB."""
    _defined.cache_clear()
