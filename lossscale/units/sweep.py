"""One sweep over a graph or a function: the units of all its values.

The sweep visits the operations in their order, and computes the units of their outputs
from those of their inputs, as `rules` says. Tensors of the loss scale and unscaled
gradients are marked: they have the units of their marks. The other units come from:

```
a variable    the value assigned to it last; exponent 0 if none was
a branch      the results of both sides; `sides` says when it is one side's
a function    the results of its body
a loop        the results of its body, which are its next inputs, until no unit changes
```

A body is swept again for each list of units that it is called with.
"""

from __future__ import annotations

from typing import Callable, Dict, Hashable, Iterable, List, Optional, Tuple

from lossscale.gradients.check import dense_part
from lossscale.runtime.aliases import Grad, Graph, Tensor
from lossscale.runtime.bodies import Body, Counts, GraphBody, Node
from lossscale.runtime.graphs import BODIES, BRANCHES, DATASETS, LOOPS, graph_of
from lossscale.units.operations import join, result, results
from lossscale.units.rules import chosen
from lossscale.units.sides import Sides
from lossscale.units.unit import UNKNOWN, Operands, Unit, Units
from lossscale.units.variables import ASSIGNS, Table, assign, leave

#: The mark of an operation with bodies that applies or skips a step.
STEP = "step"

#: What a sweep of a body finds: the units of its outputs, and the units of its inputs
#: after it has run, as it may assign to variables.
Found = Tuple[List[Optional[Unit]], List[Optional[Unit]]]
#: What identifies a sweep of a body: its key, its outputs' count, its inputs' units.
Call = Tuple[Hashable, int, Tuple[Optional[Unit], ...]]


class Swept:
    """The units in a graph, as far as it has been swept.

    Attributes:
      marks: The units of its marked tensors, by the tensors' `id`s.
      table: The units of its values.
      sides: The units of its branches' results, on each side.
      done: How many of its operations have been swept.
      leads_back: Whether it has a loop of `tf.compat.v1`, whose end leads back to its
        beginning. Such a graph is swept again, until no unit changes.
    """

    def __init__(self) -> None:
        self.marks: Table = {}
        self.table: Table = {}
        self.sides = Sides()
        self.done = 0
        self.leads_back = False


class Sweep:
    """Finds the units of values. Their graphs must not grow while it is in use.

    Args:
      eager: Returns the unit of a tensor of eager mode, or of a variable's handle.
      swept: Returns the units that earlier sweeps found in a graph.
      marked: Returns the unit that a mark on an operation of a function means.
    """

    def __init__(
        self,
        eager: Callable[[Tensor], Optional[Unit]],
        swept: Callable[[Graph], Swept],
        marked: Callable[[str], Optional[Unit]],
    ) -> None:
        self._eager, self._swept, self._marked = eager, swept, marked
        self._returned: Dict[Call, Found] = {}
        self._seen: Dict[int, Table] = {}  # by the graphs' `id`s

    def unit(self, tensor: Tensor) -> Optional[Unit]:
        """Returns the unit of a tensor, None if nothing is known of it."""
        graph = graph_of(tensor)
        if graph is None:
            return self._eager(tensor)
        return self.units_in(graph).get(id(tensor))

    def known(self, value: Optional[Tensor]) -> Unit:
        """Returns the unit of a tensor; `UNKNOWN` of None, and if nothing is known."""
        return UNKNOWN if value is None else self.unit(value) or UNKNOWN

    def units_in(self, graph: Graph) -> Table:
        """Returns the units of all values in a graph, with its operations of now."""
        if id(graph) not in self._seen:
            self._seen[id(graph)] = self._see(graph)
        return self._seen[id(graph)]

    def _see(self, graph: Graph) -> Table:
        swept = self._swept(graph)
        # Graphs of `tf.compat.v1` have neither an outer graph nor captures.
        outside = getattr(graph, "outer_graph", None)
        around: Table = {} if outside is None else self.units_in(outside)
        captures = getattr(graph, "captures", ())
        for outer, inner in captures:
            if id(inner) not in swept.table:
                unit = around.get(id(outer))
                if unit is None:
                    unit = self._captured(outer)
                if unit is not None:
                    swept.table[id(inner)] = unit
        self._run(GraphBody(graph), swept)
        # A branch in this graph captures an eager variable by its outer handle. So the
        # outer handle gets the unit that was assigned to the inner one.
        for outer, inner in captures:
            if id(inner) in swept.table:
                swept.table[id(outer)] = swept.table[id(inner)]
        return swept.table

    def _captured(self, outer: Tensor) -> Optional[Unit]:
        """Returns the unit of a tensor that a graph captures from around it."""
        unit = self.unit(outer)
        if unit is not None and unit.from_variable and graph_of(outer) is None:
            # The variable held this value during tracing. A later call reads another.
            return unit._replace(sources=unit.unscalings)
        return unit

    def _run(self, body: Body, swept: Swept) -> None:
        """Sweeps the operations of a body that were added since the last sweep.

        If its end leads back to its beginning, sweeps all operations again, until no
        unit changes.
        """
        marks = {} if body.graph is None else self._swept(body.graph).marks
        for node in body.nodes(swept.done):
            self._pass_on(node, swept, marks)
            swept.done += 1
            swept.leads_back = swept.leads_back or node.kind == "NextIteration"
        before: Optional[Table] = None
        while swept.leads_back and swept.table != before:
            before = dict(swept.table)
            for node in body.nodes():
                self._pass_on(node, swept, marks)

    def _pass_on(self, node: Node, swept: Swept, marks: Table) -> None:
        """Computes the units of an operation's outputs from those of its inputs."""
        found, table = self._results(node, swept), swept.table
        if node.mark and node.kind not in BODIES:
            marked = self._marked(node.mark)
            found = found if marked is None else [marked] * len(node.outputs)
        for key, unit in zip(node.outputs, found):
            if unit is not None:
                table[key] = unit
        for key in node.outputs:
            if key in marks:
                table[key] = marks[key]

    def _results(self, node: Node, swept: Swept) -> Units:
        """Returns the units of an operation's outputs (empty: none has any)."""
        kind, units = node.kind, [swept.table.get(key) for key in node.inputs]
        if kind in BODIES:
            return [] if node.mark == STEP else self._enter(node, units, swept)
        if kind in ASSIGNS:
            assign(swept.table, node.inputs[0], kind, units)
            return []
        operands = Operands(node.value, node.width)
        return results(kind, units, operands, len(node.outputs))

    def _enter(self, node: Node, units: Units, swept: Swept) -> List[Optional[Unit]]:
        """Returns the units of the results of a loop, a branch or a function."""
        if node.kind in BRANCHES:
            return self._branch(node, units, swept)
        bodies, count = node.bodies(), len(node.outputs)
        if node.kind in DATASETS:
            return self.dataset(node.kind, bodies[0], units, node.counts(), count)
        if node.kind in LOOPS:
            body, condition = bodies
            outs, after, flag = self._loop(body, condition, list(units), count)
            flags = [flag]
        else:
            (outs, after), flags = self.body(bodies[0], list(units), count), []
        leave(swept.table, node.inputs, units, [join([each]) for each in after])
        return [chosen(join([each]), flags) for each in outs]

    def _branch(self, node: Node, units: Units, swept: Swept) -> List[Optional[Unit]]:
        """Returns the units of the results of a branch, of which one side runs."""
        flag, keys, flags = node.inputs[0], node.inputs[1:], units[:1]
        returned, afters = [], []
        for side, body in enumerate(node.bodies()):
            before = swept.sides.on(side, flag, keys, units[1:])
            outs, after = self.body(body, before, len(node.outputs))
            # An input that this side did not assign to keeps its unit.
            both = zip(units[1:], before, after)
            afters.append([unit if new == old else new for unit, old, new in both])
            returned.append(outs)
        leave(swept.table, keys, units[1:], [join(each) for each in zip(*afters)])
        found = [chosen(join(each), flags) for each in zip(*returned)]
        on_sides = [[chosen(each, flags) for each in outs] for outs in returned]
        swept.sides.note(flag, node.outputs, found, on_sides)
        return found

    def body(self, body: Optional[Body], units: Units, count: int) -> Found:
        """Returns what a body does to units.

        Args:
          body: The body. None: it is unknown, and its results are unsure.
          units: The units of its inputs.
          count: How many outputs it has.
        """
        if body is None or len(body.inputs) != len(units):
            return [result("PyFunc", units, Operands())] * count, list(units)
        key = (body.key, count, tuple(units))
        if key not in self._returned:
            swept = Swept()
            pairs = zip(body.inputs, units)
            swept.table = {name: unit for name, unit in pairs if unit is not None}
            self._run(body, swept)
            outs = [swept.table.get(each) for each in body.outputs]
            # TensorFlow adds outputs to a function for its gradient. They come last,
            # and each of them may be any value in the function.
            rest = count - len(outs)
            if rest > 0:
                outs += [join(list(swept.table.values()))] * rest
            after = [swept.table.get(name) for name in body.inputs]
            self._returned[key] = outs, after
        return self._returned[key]

    def _loop(
        self,
        body: Optional[Body],
        condition: Optional[Body],
        units: List[Optional[Unit]],
        count: int,
    ) -> Tuple[List[Optional[Unit]], List[Optional[Unit]], Optional[Unit]]:
        """Returns what a loop does to its inputs, and the unit of its condition.

        The body's outputs are its next inputs, so it is swept until no unit changes.
        """
        first, assigned = list(units), [False] * len(units)
        before: Optional[List[Optional[Unit]]] = None
        while units != before:
            before = list(units)
            outs, after = self.body(body, before, count)
            assigned = [a or old != new for a, old, new in zip(assigned, before, after)]
            units = [join(each) for each in zip(before, outs, after)]
        flag = None if condition is None else self.body(condition, units, 1)[0][0]
        # An input that the body did not assign to keeps its unit.
        left = [new if a else old for a, old, new in zip(assigned, first, units)]
        return list(units), left, flag

    def dataset(
        self,
        kind: str,
        body: Optional[Body],
        units: Units,
        counts: Counts,
        count: int,
    ) -> List[Optional[Unit]]:
        """Returns the units of the results of a dataset that calls a function.

        Args:
          kind: The dataset's type.
          body: The function. Its inputs are the state, the parts of an element, and
            what it captures.
          units: The units of the dataset's inputs. The first ones are another dataset,
            the state, and what the function captures.
          counts: How many inputs are the state, and how many are captured.
          count: How many outputs the dataset has.
        """
        if body is None:
            return [join(units)] * count
        states, captures = counts
        state = list(units[1 : 1 + states])
        captured = units[1 + states :][:captures]
        elements = _parts_of(units[0], len(body.inputs) - states - captures)
        before: Optional[Units] = None
        while state != before:
            before = list(state)
            outs, _ = self.body(body, [*before, *elements, *captured], 0)
            state = [join(each) for each in zip(before, outs)]
        if kind == "ReduceDataset":
            return state
        made = join(outs[states:])
        made = None if made is None else made._replace(parts=tuple(outs[states:]))
        return [made] * count


def _parts_of(dataset: Optional[Unit], count: int) -> List[Optional[Unit]]:
    """Returns the units of the parts of a dataset's elements."""
    if dataset is not None and len(dataset.parts) == count:
        return list(dataset.parts)
    return [dataset] * count


def values_of(grads: Iterable[Grad]) -> List[Optional[Tensor]]:
    """Returns the tensor that holds each gradient's values, None for a None."""
    return [dense_part(grad) for grad in grads]
