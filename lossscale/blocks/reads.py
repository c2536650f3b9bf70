"""Finds the tensors that operations read and none of them computed."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterable, Iterator, List, Set

from lossscale.runtime import callbacks
from lossscale.runtime.aliases import Graph, Tensor
from lossscale.runtime.callbacks import key_of
from lossscale.runtime.graphs import current_graph, graph_of

#: A graph has one of these for a tensor that it captured: a constant for a small one.
_CAPTURED = {"Placeholder", "Const"}


@contextmanager
def read_within() -> Iterator[Callable[[], List[Tensor]]]:
    """Yields a function that returns, afterwards, the tensors that were read within.

    In a graph its new operations count; in eager mode those that this thread runs.
    """
    graph = current_graph()
    if graph is None:
        listener = _Listener()
        callbacks.add(listener)
        yield lambda: list(listener.read.values())
        listener.is_done = True
        return
    start = len(graph.get_operations())
    yield lambda: _read_by(graph.get_operations()[start:])


class _Listener:
    """Keeps the tensors that one thread's eager operations read."""

    def __init__(self) -> None:
        self.read: Dict[int, Tensor] = {}
        self.is_done = False
        self._computed: Set[int] = set()
        self._thread = threading.get_ident()

    def hear(self, kind: str, inputs: Any, outputs: Any, attrs: Any) -> bool:
        """Notes an operation: a `callbacks.Listener`."""
        del kind, attrs
        if not self.is_done and threading.get_ident() == self._thread:
            for each in inputs:
                number = key_of(each)
                if number not in self._computed:
                    self.read[number] = each
            self._computed.update(map(key_of, outputs))
        return not self.is_done


def _read_by(operations: List[Any]) -> List[Tensor]:
    new = {id(each) for each in operations}
    inputs = {id(t): t for each in operations for t in each.inputs}
    return [
        tensor
        for tensor in inputs.values()
        if id(tensor.op) not in new or tensor.op.type in _CAPTURED
    ]


class Names:
    """Identifies tensors by number, even if a graph captured them."""

    def __init__(self) -> None:
        self._outer: Dict[int, Dict[int, Any]] = {}  # by graph: inner -> outer tensor

    def of(self, tensor: Tensor) -> int:
        """Returns a number for a tensor. Captured copies of it have the same number."""
        graph = graph_of(tensor)
        while graph is not None and tensor.op.type in _CAPTURED:
            outer = self._captured(graph).get(id(tensor))
            if outer is None:
                break
            tensor, graph = outer, graph_of(outer)
        return -key_of(tensor) if graph is None else id(tensor)

    def of_each(self, tensors: Iterable[Tensor]) -> Set[int]:
        """Returns the numbers of tensors."""
        return set(map(self.of, tensors))

    def _captured(self, graph: Graph) -> Dict[int, Any]:
        if id(graph) not in self._outer:
            # Graphs of `tf.compat.v1` capture nothing.
            pairs = getattr(graph, "captures", ())
            self._outer[id(graph)] = {id(inner): outer for outer, inner in pairs}
        return self._outer[id(graph)]
