"""What a graph or a function does, one operation after the other: two views of one.

A graph that is built now has operations. A function that eager mode calls is known by
its name alone, under which TensorFlow keeps its definition: a protocol buffer. Both
look the same here. Values are named by keys: the `id`s of a graph's tensors, the names
of a definition's.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Callable, Dict, Hashable, Iterator, List, NamedTuple, Optional

import numpy as np
import tensorflow as tf

# Not public, and the same on TensorFlow 2.4, 2.10, 2.15 and 2.21.
from tensorflow.python.eager import context

from lossscale.runtime import mode
from lossscale.runtime.aliases import Graph, Op, Tensor
from lossscale.runtime.graphs import BODIES, DATASETS, bodies, names_of_bodies

#: No gradient has these dtypes.
COUNTS = {tf.bool, tf.string, tf.int8, tf.int16, tf.int32, tf.int64}
COUNTS |= {tf.uint8, tf.uint16, tf.uint32, tf.uint64}
#: These return each of their inputs.
EACH_ITS_OWN = {"IdentityN"}
#: What takes a mark on every TensorFlow, within `tf.vectorized_map` too.
_ALWAYS_MARKED = {*BODIES, "Const", "Identity", "ReadVariableOp"}
#: The attribute of an operation that says what is marked on it.
MARK = "_loss_scale"


class Node(NamedTuple):
    """An operation.

    Attributes:
      kind: Its type.
      inputs: The keys of its inputs.
      outputs: The keys of its outputs, None of one that can be no gradient. In a
        definition those of one operation may have one key together.
      constant: Returns the number that an input is, wherever in it, if it is a
        constant, else None.
      bodies: Returns its bodies, None for one that is not known.
      states: Returns how many of its inputs go round in it: those of a dataset's loop.
      mark: What is marked on it.
    """

    kind: str
    inputs: List[Hashable]
    outputs: List[Optional[Hashable]]
    constant: Callable[[int], Optional[float]]
    bodies: Callable[[], List[Any]]
    states: Callable[[], int]
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
    inputs = operation.inputs
    return Node(
        operation.type,
        [id(each) for each in inputs],
        [_key_of(each, operation.type in BODIES) for each in operation.outputs],
        lambda number: constant_of(inputs[number].op),
        lambda: _bodies_of(operation),
        lambda: len(operation.get_attr("Tstate")),
        mark_on(operation) if operation.type in BODIES else "",
    )


def _key_of(tensor: Tensor, of_bodies: bool) -> Optional[Hashable]:
    return None if tensor.dtype in COUNTS and not of_bodies else id(tensor)


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


def constant_of(operation: Op) -> Optional[float]:
    """Returns the number that an operation's result is everywhere, if it is one."""
    if operation.type in ("Identity", "Cast"):
        return constant_of(operation.inputs[0].op)
    return _number_of(operation.node_def) if operation.type == "Const" else None


def _number_of(node: Any) -> Optional[float]:
    """Returns the number that is everywhere in a constant, None if there is none."""
    values = tf.make_ndarray(node.attr["value"].tensor)
    is_number = values.size and np.issubdtype(values.dtype, np.number)
    if not is_number or np.any(values != values.flat[0]):
        return None
    return float(values.flat[0].real)


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
        #: Operations whose outputs have keys of their own.
        self._many: Dict[str, Any] = {}
        self._constants: Dict[str, Any] = {}
        many = {*BODIES, *EACH_ITS_OWN} - DATASETS
        for node in self._nodes:
            if node.op in many or _is_function(node.op):
                self._many[node.name] = node
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
                "PartitionedCall" if _is_function(node.op) else node.op,
                list(inputs),
                self._outputs(node),
                partial(self._constant, inputs),
                partial(_bodies_in, node),
                partial(_states_in, node),
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

    def _outputs(self, node: Any) -> List[Optional[Hashable]]:
        if node.name not in self._many:
            return [node.name]
        if node.op in EACH_ITS_OWN:
            count = sum(each[0] != "^" for each in node.input)
            return [f"{node.name}:output:{number}" for number in range(count)]
        if node.op in BODIES:
            types = node.attr["Tout" if "Tout" in node.attr else "T"].list.type
            return [f"{node.name}:output:{number}" for number in range(len(types))]
        names = context.context().get_function_def(node.op).signature.output_arg
        return [f"{node.name}:{each.name}:0" for each in names]

    def _constant(self, keys: List[str], number: int) -> Optional[float]:
        node = self._constants.get(keys[number])
        return None if node is None else _number_of(node)


def _bodies_in(node: Any) -> List[Optional[Definition]]:
    if node.op not in BODIES:
        return [definition(node.op)]
    named = [node.attr[name] for name in BODIES[node.op]]
    lists = [list(each.list.func) or [each.func] for each in named]
    return [definition(each.name) for listed in lists for each in listed]


def _states_in(node: Any) -> int:
    return len(node.attr["Tstate"].list.type)


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
