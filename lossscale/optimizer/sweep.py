"""One sweep over a graph: which marks lie on the ways to a gradient.

Marked are the loss scale, where it was read to multiply a loss, and the gradients that
were handed out. The operations, in the order of their creation, hand the marks on from
inputs to outputs:

```
a loss scale that was read        {it}              # whatever it was computed from
a gradient that was handed out    {its unscaling}   # and no loss scale any more
what was divided by a loss scale  {by hand}         # and no loss scale any more
a count, a shape, a flag          {}
any other value                   those of all inputs
```

The derivative of `loss * S` has the factor `S`: a way leads from each gradient of a
scaled loss to the tensor `S`, and need not lead to the scaled loss. A body, of a loop,
a branch or a function, is swept again for what it is called with.
"""

from __future__ import annotations

import functools
import operator
from typing import (
    Any,
    Callable,
    Dict,
    Hashable,
    Iterable,
    List,
    NamedTuple,
    Optional,
    Tuple,
)

import tensorflow as tf

from lossscale.runtime.graphs import BODIES, BRANCHES, DATASETS, LOOPS, bodies


class Mark(NamedTuple):
    """A mark on a tensor: the loss scale, or a gradient that was handed out.

    Attributes:
      number: Those made later have larger ones.
      tensor: The tensor; where eager mode's are kept, a weak reference to it.
      is_scale: Whether it is the loss scale.
      check: What is known of the gradient, perhaps None.
      replica: Where a loss scale was read in a graph; None of any other mark.
    """

    number: int
    tensor: Any
    is_scale: bool
    check: Any = None
    replica: Hashable = None


#: Marks travel as bits of a number. The first three are no marks: unscaled by hand; the
#: loss scale itself; its reciprocal. The last two end where anything is computed.
_BY_HAND, _SCALE, _INVERSE, _FIRST = 1, 2, 4, 8
_ROLES = _SCALE | _INVERSE
#: These hand on a loss scale as it is.
_SAME = {"Identity", "Cast", "StopGradient", "Enter", "Switch", "Reshape"}
_QUOTIENTS = {"RealDiv", "Div", "DivNoNan"}
_RECIPROCALS = {"Reciprocal", "Inv"}
#: What comes out of these does not depend on the value of what goes in.
_EMPTY = {"ZerosLike", "OnesLike"}
#: No gradient has these dtypes.
_COUNTS = {tf.bool, tf.string, tf.int8, tf.int16, tf.int32, tf.int64}
_COUNTS |= {tf.uint8, tf.uint16, tf.uint32, tf.uint64}
_ASSIGNS = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}
#: What a body returns: the bits of its outputs, and of its inputs when it has run.
_Returned = Tuple[List[int], List[int]]


class Sweep:
    """Finds the marks on all ways to a few gradients.

    Args:
      on: Returns the mark on a tensor of eager mode, or None.
      of: Returns the marks in a graph, by the `id`s of their tensors.
      through_variables: Whether what is assigned to a variable is read from it later.
        Asked only of what comes from nowhere else, as sums kept in variables do: every
        gradient comes from weights, and those from the gradients of the step before.
    """

    def __init__(
        self,
        on: Callable[[Any], Optional[Mark]],
        of: Callable[[Any], Dict[int, Mark]],
        through_variables: bool,
    ) -> None:
        self._on, self._of = on, of
        self._through_variables = through_variables
        self._bit_of: Dict[Tuple[int, int], int] = {}  # by the marks, or their checks
        self._marks: Dict[int, Mark] = {}  # by their bits
        self._scales = 0
        self._tables: Dict[int, Dict[int, int]] = {}
        self._returned: Dict[Any, _Returned] = {}

    def marks_before(self, tensor: Any) -> Optional[List[Mark]]:
        """Returns the marks that a tensor comes from, in the order of their numbers.

        None: there are none, and nothing was unscaled by hand either.
        """
        bits = self._bits_at(tensor)
        marks = sorted(mark for bit, mark in self._marks.items() if bits & bit)
        return marks if bits else None

    def _bits_at(self, tensor: Any) -> int:
        graph = graph_of(tensor)
        if graph is not None:
            return self._visible(graph).get(id(tensor), 0)
        mark = self._on(tensor)
        return 0 if mark is None else self._bits(mark)

    def _bits(self, mark: Mark) -> int:
        """Returns the bits that a mark puts on its tensor."""
        # All gradients of one unscaling share a bit: a few bits, however many they are.
        key = (mark.number, 0) if mark.check is None else (0, id(mark.check))
        bit = self._bit_of.setdefault(key, _FIRST << len(self._bit_of))
        self._marks[bit] = mark
        self._scales |= bit * mark.is_scale
        return bit | _SCALE * mark.is_scale

    def _visible(self, graph: Any) -> Dict[int, int]:
        """Returns the bits of all that a graph can see, as it stands now."""
        if id(graph) not in self._tables:
            # Graphs of `tf.compat.v1` have neither.
            outside = getattr(graph, "outer_graph", None)
            captures = getattr(graph, "captures", ())
            table = {} if outside is None else dict(self._visible(outside))
            for outer, inner in captures:
                table[id(inner)] = table.get(id(outer), 0) or self._bits_at(outer)
            table = self._sweep(graph, table)
            # Branches within capture eager mode's variables from there, not from here.
            table.update((id(o), table[id(i)]) for o, i in captures if id(i) in table)
            self._tables[id(graph)] = table
        return self._tables[id(graph)]

    def _sweep(self, graph: Any, table: Dict[int, int]) -> Dict[int, int]:
        """Returns the bits of all tensors that have some, by their `id`s."""
        marks = self._of(graph)
        table = {**table, **{key: self._bits(mark) for key, mark in marks.items()}}
        operations, before = graph.get_operations(), None
        # A loop of `tf.compat.v1` leads back: again, until nothing is new.
        leads_back = any(each.type == "NextIteration" for each in operations)
        while table != before:
            before = dict(table) if leads_back else table
            for each in operations:
                self._pass_on(each, table, marks)
        return table

    def _pass_on(self, operation: Any, table: Dict[int, int], marks: Any) -> None:
        """Hands on the bits of an operation's inputs to its outputs."""
        kind, each = operation.type, [table.get(id(x), 0) for x in operation.inputs]
        if kind in BODIES:
            bits = self._enter(operation, kind, each, table)
        elif not any(each) or kind in _EMPTY:
            return
        else:
            bits = [self._computed(kind, each)] * len(operation.outputs)
        if kind in _ASSIGNS and self._through_variables:
            kept = 0 if kind == "AssignVariableOp" else each[0]
            table[id(operation.inputs[0])] = kept | each[1] & ~_ROLES
        for output, own in zip(operation.outputs, bits):
            if own and id(output) not in marks and output.dtype not in _COUNTS:
                table[id(output)] = own

    def _computed(self, kind: str, each: List[int]) -> int:
        """Returns the bits of a result from those of its operands."""
        union = _union(each)
        if kind in _SAME or not union & _ROLES:
            return union
        first, second = (*each, 0)[:2]
        if kind in _QUOTIENTS and second & _SCALE:
            return self._unscaled(first) if first else _INVERSE
        if kind in _RECIPROCALS and first & _SCALE:
            return _INVERSE
        if kind == "Mul" and union & _INVERSE:
            return self._unscaled(first if second & _INVERSE else second)
        return union & ~_ROLES

    def _unscaled(self, bits: int) -> int:
        """Returns bits after a division by hand. What was not scaled stays so."""
        by_hand = _BY_HAND if bits & self._scales else 0
        return bits & ~self._scales & ~_ROLES | by_hand

    def _enter(
        self, operation: Any, kind: str, each: List[int], table: Dict[int, int]
    ) -> List[int]:
        """Returns the bits of what a loop, a branch or a function returns."""
        graphs, inputs = bodies(operation), list(operation.inputs)
        if kind in DATASETS:
            return [self._mixed(graphs[0], _union(each))] * len(operation.outputs)
        if kind in BRANCHES:
            inputs, each = inputs[1:], each[1:]
        run = self._loop if kind in LOOPS else self._body
        results = [run(graph, each, len(operation.outputs)) for graph in graphs]
        for tensor, bits in zip(inputs, zip(*(after for _, after in results))):
            if tensor.dtype == tf.resource:
                table[id(tensor)] = _union(bits)
        return [_union(bits) & ~_ROLES for bits in zip(*(outs for outs, _ in results))]

    def _body(self, graph: Any, inputs: List[int], count: int) -> _Returned:
        """Returns what a body with `count` outputs does to the bits of its inputs."""
        if graph is None or len(graph.inputs) != len(inputs):
            return [_union(inputs)] * count, inputs
        key = (id(graph), count, *inputs)
        if key not in self._returned:
            names = [id(each) for each in graph.inputs]
            table = self._sweep(graph, dict(zip(names, inputs)))
            outs = [table.get(id(each), 0) for each in graph.outputs]
            # What a function keeps for its gradient comes after what it returns.
            outs += [_union(table.values())] * (count - len(outs))
            self._returned[key] = outs, [table.get(name, 0) for name in names]
        return self._returned[key]

    def _loop(self, graph: Any, inputs: List[int], count: int) -> _Returned:
        """Does so where outputs are the next inputs, until nothing is new."""
        before: List[int] = []
        while inputs != before:
            before = inputs
            outs, after = self._body(graph, inputs, count)
            inputs = [_union(bits) for bits in zip(before, outs, after)]
        return inputs, inputs

    def _mixed(self, graph: Any, bits: int) -> int:
        """Does so where it is not told which output is which input next."""
        before = None
        while bits != before and graph is not None:
            before = bits
            outs, _ = self._body(graph, [bits] * len(graph.inputs), 0)
            bits |= _union(outs) & ~_ROLES
        return bits


def graph_of(tensor: Any) -> Any:
    """Returns the graph that a tensor belongs to, None in eager mode."""
    return getattr(tensor, "graph", None)  # eager mode's raise AttributeError


def _union(bits: Iterable[int]) -> int:
    return functools.reduce(operator.or_, bits, 0)
