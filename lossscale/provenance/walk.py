"""The kinds of all values of one loss scale, in graphs and in eager mode.

In a graph we walk over the operations when gradients are unscaled or applied. In eager
mode TensorFlow calls us at each operation, from one that uses S on, until none has for
a while.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import tensorflow as tf

from lossscale.gradients.check import dense_part
from lossscale.provenance import kinds as rules
from lossscale.provenance.kinds import CHANGED, SCALE, SCALED, UNKNOWN, UNSCALED, Kind
from lossscale.runtime import keras_versions, op_callbacks
from lossscale.runtime.aliases import Array, Grad, Graph, Op, Tensor, Tensors, Variable
from lossscale.runtime.graphs import body_of, current_graph, graph_of
from lossscale.scales.base import Product

#: Eager mode stops reporting after this many operations in a row without S.
_PATIENCE = 1000
#: A number for each `Kinds`.
_numbers = itertools.count()
#: How many sources of a value of eager mode are remembered.
_SOURCES = 8
#: How many functions' results are remembered.
_BODIES = 512
#: After this many turns the kinds of a loop's values no longer change.
_TURNS = 4
#: The attributes of an operation that name the functions that it calls. Of a loop they
#: are its body and its condition. A dataset's functions are not among them.
_FUNCTIONS_IN = {
    "If": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "While": ("body", "cond"),
    "PartitionedCall": ("f",),
}
_FUNCTIONS_IN.update({f"Stateless{k}": v for k, v in [*_FUNCTIONS_IN.items()]})
_FUNCTIONS_IN["StatefulPartitionedCall"] = _FUNCTIONS_IN["PartitionedCall"]


#: The kinds of a graph's tensors by their `id`s.
OfTensors = Dict[int, Optional[Kind]]


def notes_of(graph: Graph, owner: object, make: Callable[[], Any]) -> Any:
    """Returns the notes of `owner` on a graph. They are freed with either of them."""
    # The notes hang on the graph. In a dictionary of graphs, the tensors in the notes
    # would keep the graph alive.
    if not hasattr(graph, "_lossscale_notes"):
        graph._lossscale_notes = weakref.WeakKeyDictionary()
    if owner not in graph._lossscale_notes:
        graph._lossscale_notes[owner] = make()
    return graph._lossscale_notes[owner]


class _Notes:
    """What is known of one graph's tensors, by their `id`s."""

    def __init__(self) -> None:
        self.noted: Dict[int, Kind] = {}
        self.kinds: OfTensors = {}
        #: How many operations the last walk has seen, and how many variables were noted
        #: then.
        self.walked, self.variables = 0, 0


class Kinds:
    """The kinds of all values of one loss scale. An eager tensor has an attribute."""

    def __init__(
        self,
        scale_variable: Optional[Variable],
        on_operation: Callable[[Op, OfTensors], None] = lambda *_: None,
    ) -> None:
        """`on_operation` is called with each operation of a graph, and what it has."""
        self._on_operation = on_operation
        self._attribute = f"_lossscale_kind_{next(_numbers)}"
        #: The handles of variables of which it is known what they hold.
        self._handles: Dict[int, Optional[Kind]] = {}
        self._patience = 0
        #: The number of the first tensor of eager mode that may have been reported.
        self._since = 0
        if scale_variable is not None:
            self.note_variables([scale_variable], Kind(SCALE))

    def note(self, tensor: Tensor, kind: Kind) -> None:
        """Notes the kind of a tensor. In eager mode, listens to what becomes of it."""
        graph = graph_of(tensor)
        if graph is not None:
            notes_of(graph, self, _Notes).noted[id(tensor)] = kind
            return
        setattr(tensor, self._attribute, kind)
        if current_graph() is None:
            if not op_callbacks.is_notifying():
                self._since = op_callbacks.key_of(tensor)
            op_callbacks.add(self)
            self._patience = _PATIENCE

    def note_product(self, product: Product) -> None:
        loss, loss_scale, factor = product.loss, product.loss_scale, product.factor
        self.note(loss_scale, Kind(SCALE, (loss_scale,)))
        if graph_of(product.product) is None:
            # Eager mode has run these operations before it was known that S is in them.
            # A graph is looked at later.
            if factor is not loss_scale:
                self.note_op("Cast", [loss_scale], [factor])
            inputs = [loss, factor] if tf.is_tensor(loss) else [factor]
            self.note_op("Mul", inputs, [product.product])

    def note_variables(
        self, variables: Iterable[Variable], kind: Optional[Kind] = None
    ) -> None:
        """Notes what variables hold, once each: numbers, or values of a kind."""
        for variable in map(keras_versions.tensor_of, variables):
            for copy in getattr(variable, "values", None) or [variable]:
                handle = getattr(copy, "handle", None)
                if handle is not None and graph_of(handle) is None:
                    self._handles.setdefault(op_callbacks.key_of(handle), kind)

    def of(self, grads: Iterable[Grad]) -> List[Optional[Kind]]:
        """Returns the kind of each gradient. None: it is a number, or None itself."""
        return [None if grad is None else self._of(dense_part(grad)) for grad in grads]

    def _of(self, tensor: Tensor) -> Optional[Kind]:
        graph = graph_of(tensor)
        if graph is None:
            return self._eager_kind(tensor)
        return self._walked(graph).get(id(tensor))

    def note_op(self, operation: str, inputs: Tensors, outputs: Tensors) -> bool:
        kinds = [self._eager_kind(tensor) for tensor in inputs]
        if any(kinds) or rules.is_call(operation):
            called = [operation] if rules.is_call(operation) else []
            results = _results(operation, inputs, kinds, outputs, called, self._since)
            for output, kind in results:
                if kind is not None:  # momentum would have a source of each step
                    recent = kind._replace(sources=kind.sources[-_SOURCES:])
                    setattr(output, self._attribute, recent)
        is_related = any(kind is not None and kind.name != UNKNOWN for kind in kinds)
        self._patience = _PATIENCE if is_related else self._patience - 1
        return self._patience > 0

    def _eager_kind(self, tensor: Tensor) -> Optional[Kind]:
        kind: Optional[Kind] = vars(tensor).get(self._attribute)
        if kind is None and tensor.dtype == tf.resource:
            return self._handles.get(op_callbacks.key_of(tensor), Kind(UNKNOWN))
        return kind

    def _walked(self, graph: Graph) -> OfTensors:
        notes = notes_of(graph, self, _Notes)
        if notes.variables != len(self._handles):  # one was unknown at the last walk
            notes.kinds, notes.walked, notes.variables = {}, 0, len(self._handles)
        kinds: OfTensors = notes.kinds
        captures: Sequence[Tuple[Tensor, Tensor]] = getattr(graph, "captures", ())
        for outer, inner in captures:
            if id(inner) not in kinds:
                kinds[id(inner)] = self._of(outer)
                if graph_of(outer) is None and outer.dtype != tf.resource:
                    kinds[id(inner)] = kinds[id(inner)] or Kind(UNKNOWN)
        operations = graph.get_operations()
        for op in operations[notes.walked :]:
            self._on_operation(op, kinds)
            for output, kind in _results_of(op, kinds):
                kinds.setdefault(id(output), notes.noted.get(id(output), kind))
        notes.walked = len(operations)
        return kinds


def _results(
    operation: str,
    inputs: Tensors,
    kinds: Sequence[Optional[Kind]],
    outputs: Tensors,
    called: Sequence[str],
    since: int = 0,
) -> Iterable[Tuple[Tensor, Optional[Kind]]]:
    """Yields each output of an operation that calls these functions, with its kind.

    `kinds` are those of the inputs. An eager tensor with a number below `since` may be
    a gradient that a function returned before anybody listened.
    """
    if operation == "IdentityN":  # what `tf.custom_gradient` returns
        yield from zip(outputs, kinds)
        return
    names = [None if kind is None else kind.name for kind in kinds]
    listed = [source for kind in kinds if kind is not None for source in kind.sources]
    sources = tuple({id(source): source for source in listed}.values())
    is_used = any(t.dtype == tf.resource and n == SCALE for t, n in zip(inputs, names))
    if called and not is_used and {*names} - {None, SCALE, UNKNOWN}:
        returned = _returned(operation, tuple(called), tuple(names))
        for output, name in zip(outputs, returned or [UNKNOWN] * len(outputs)):
            yield output, None if name is None else Kind(name, sources)
        return
    # Positions, shapes and counts say where values go, and are no values among others.
    as_values = [
        None
        if name not in {None, CHANGED, SCALED} and tensor.dtype.is_integer
        else name
        for name, tensor in zip(names, inputs)
    ]
    names = as_values if any(as_values) else names
    is_zero = operation == "Sub" and inputs[0] is inputs[1]

    def number_at(i: int) -> Optional[Array]:
        may_be_unreported = since and operation in rules.SUMS
        if may_be_unreported and op_callbacks.key_of(inputs[i]) < since:
            return None
        return rules.known_value(inputs[i])

    name = rules.made_of(operation, names, number_at)
    # Stochastic rounding adds others to the bits of scaled values.
    are_bits = operation == "Bitcast" or (
        operation != "Cast"
        and any(t.dtype.is_integer and n == SCALED for t, n in zip(inputs, names))
    )
    for output in outputs:
        dtype = output.dtype.base_dtype
        if name is None or is_zero or dtype == tf.resource:
            yield output, None
        elif dtype.is_integer and name != UNKNOWN and not (are_bits and name == SCALED):
            # S is in no position or count, but a cast to an integer rounds.
            is_rounded = operation == "Cast" and name not in {UNSCALED, SCALE}
            is_changed = is_rounded or name == CHANGED
            yield output, Kind(CHANGED if is_changed else UNSCALED, sources)
        else:
            yield output, Kind(name, sources)


def _either(chosen_by: Optional[str], *kinds: Optional[str]) -> Optional[str]:
    return rules.made_of("SelectV2", [chosen_by, *kinds], lambda _: None)


@functools.lru_cache(maxsize=_BODIES)
def _returned(
    operation: str, called: Sequence[str], of_inputs: Tuple[Optional[str], ...]
) -> Optional[List[Optional[str]]]:
    """Returns the kinds of what functions return that scale and unscale nothing.

    None: it is not known.
    """
    if operation in rules.BRANCHES:
        branches = [_returned("", (branch,), of_inputs[1:]) for branch in called]
        if None in branches:
            return None
        return [_either(of_inputs[0], *kinds) for kinds in zip(*branches)]
    if operation in rules.LOOPS:
        for _ in range(_TURNS):  # the results of one turn are the inputs of the next
            after, condition = (_returned("", (name,), of_inputs) for name in called)
            if after is None or condition is None:
                return None
            chosen_by = CHANGED if CHANGED in condition else None
            joined = tuple(_either(chosen_by, *pair) for pair in zip(of_inputs, after))
            if joined == of_inputs:
                return list(of_inputs)
            of_inputs = joined
        return None
    body = body_of(called[0])
    if body is None or len(body.inputs) != len(of_inputs):
        return None
    kinds = {
        id(tensor): None if name is None else Kind(name)
        for tensor, name in zip(body.inputs, of_inputs)
    }
    for op in body.get_operations():
        for output, kind in _results_of(op, kinds):
            kinds.setdefault(id(output), kind)
    returned = (kinds.get(id(output)) for output in body.outputs)
    return [None if kind is None else kind.name for kind in returned]


def _results_of(op: Op, kinds: OfTensors) -> Iterable[Tuple[Tensor, Optional[Kind]]]:
    """Yields each output of a graph's operation with its kind: see `_results`."""
    of_inputs = [kinds.get(id(tensor)) for tensor in op.inputs]
    names = _FUNCTIONS_IN.get(op.type, ())
    called = tf.nest.flatten([op.get_attr(name) for name in names])
    functions = [function.name for function in called]
    return _results(op.type, list(op.inputs), of_inputs, op.outputs, functions)
