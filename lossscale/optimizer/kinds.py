"""What is known of a value: is it scaled, unscaled, or neither?

Every operation makes a kind of the kinds of its inputs (`made_of`). In a graph we walk
over the operations when gradients are unscaled or applied. In eager mode TensorFlow
calls us at each operation, from one that uses S on, until none has for a while. A value
without a kind is a number: as far as we have seen, no S is in it. The state of the step
decides where a kind is not known (`pending`).
"""

from __future__ import annotations

import functools
import itertools
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from lossscale.gradients.check import dense_part
from lossscale.runtime import op_callbacks
from lossscale.runtime.aliases import Array, Grad, Graph, Op, Tensor, Tensors, Variable
from lossscale.runtime.graphs import (
    body_of,
    current_graph,
    functions_of,
    graph_of,
    notes_of,
)

#: The loss scale S itself.
SCALE = "scale"
#: S is a factor, as of a loss times S: the value is still to be divided by S.
SCALED = "scaled"
#: S is a factor twice, as of a sum of squares. Its root is scaled.
SQUARED = "squared"
#: S divides the value, as in `1 / S`.
INVERSE = "inverse"
#: S was divided out, as in what `get_unscaled_gradients` returns.
UNSCALED = "unscaled"
#: Bounded, compared with a number, passed through a function or mixed with unscaled
#: values while it was scaled.
CHANGED = "changed"
#: Nothing is known: what a variable holds that is no weight, what a function is given,
#: what a body returns that scales or unscales, or that we cannot read.
UNKNOWN = "unknown"

#: How often S is a factor.
_FACTORS = {INVERSE: -1, UNSCALED: 0, SCALED: 1, SQUARED: 2}

PRODUCTS = {
    *("Mul", "MulNoNan", "MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"),
    *("Einsum", "SparseTensorDenseMatMul"),
}
_QUOTIENTS = {"RealDiv", "Div", "DivNoNan", "Xdivy"}
#: What an operation multiplies the number of factors by.
_POWERS = {
    "Square": 2.0,
    "L2Loss": 2.0,
    "SquaredDifference": 2.0,
    "Sqrt": 0.5,
    "Rsqrt": -0.5,
    "Reciprocal": -1.0,
    "Inv": -1.0,
    "MatrixInverse": -1.0,
}
#: Functions that are not linear.
_FUNCTIONS = {
    *("Exp", "Expm1", "Log", "Log1p", "Tanh", "Sigmoid", "Softplus", "Softsign"),
    *("Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh"),
    *("Atanh", "Erf", "Erfc", "Elu", "Selu", "Relu6", "Softmax", "LogSoftmax"),
    *("Round", "Rint", "Floor", "Ceil", "FloorDiv", "Prod", "Cumprod"),
    *("Pow", "MatrixExponential", "MatrixLogarithm", "MatrixDeterminant", "LRN"),
    *("FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxVars", "QuantizeV2"),
    *("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV3", "TruncateDiv"),
    *("QuantizeAndDequantizeV4", "Igamma", "Igammac", "Lgamma"),
    *("Digamma", "Erfinv", "Ndtri", "LogMatrixDeterminant", "BesselI0e", "BesselI1e"),
    *("Atan2", "NextAfter", "Bucketize", "HistogramFixedWidth", "CumulativeLogsumexp"),
    *("SparseSoftmax", "SoftmaxCrossEntropyWithLogits", "SegmentProd"),
    *("SparseSoftmaxCrossEntropyWithLogits", "UnsortedSegmentProd"),
}
#: Operations that keep a value as it is where a bound is far away.
_BOUNDS = {"Minimum", "Maximum", "ClipByValue", "FloorMod", "Mod", "TruncateMod"}
_BOUNDS |= {"LowerBound", "UpperBound"}
#: Sums and lists, in which a number may stand that the program has chosen.
_SUMS = {"Add", "AddV2", "AddN", "Sub", "BiasAdd", "ConcatV2", "Pack", "PadV2"}
_COMPARISONS = {"Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual"}
_COMPARISONS |= {"ApproximateEqual"}
#: Operations whose results are the same, whatever S is.
_FREE = {"Sign", "IsFinite", "IsNan", "IsInf", "Angle", "InTopK", "InTopKV2"}
#: Operations whose results are numbers, whatever they are given.
NUMBERS = {"OnesLike", "ZerosLike", "Shape", "ShapeN", "Size", "Rank", "Snapshot"}
_CHOICES = {"Select", "SelectV2"}
#: A number that is no larger, as an epsilon, counts as 0 where values are compared.
_EPSILON = 1.01e-3

_BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}
_LOOPS = {"While", "StatelessWhile"}
#: Operations that call functions, or hold arguments. Of most nothing is known.
_CALLS = {
    *_BRANCHES,
    *_LOOPS,
    *("PartitionedCall", "StatefulPartitionedCall", "ScanDataset", "ReduceDataset"),
    *("MapDataset", "ParallelMapDataset", "ParallelMapDatasetV2", "FlatMapDataset"),
    *("MapAndBatchDataset", "InterleaveDataset", "ParallelInterleaveDatasetV2"),
    *("ParallelInterleaveDatasetV3", "ParallelInterleaveDatasetV4", "Placeholder"),
    *("PyFunc", "PyFuncStateless", "EagerPyFunc"),
}

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


class Kind(NamedTuple):
    """A value's kind, one of the names above, and where it comes from.

    `sources` are the tensors of S that may have multiplied the value, and the lists
    that were unscaled and that it was made of. They know whether they overflowed.
    """

    name: str
    sources: Tuple[object, ...] = ()


def made_of(
    operation: str,
    kinds: Sequence[Optional[str]],
    number_at: Callable[[int], Optional[Array]],
) -> Optional[str]:
    """Returns the kind of an operation's results. None: they are numbers.

    Where it cannot be known which of two kinds is right, this is the one that does less
    harm: a gradient that is divided twice hardly moves a weight, one that is not
    divided destroys it. `number_at` returns the value of an input, if it is known.
    """
    if is_call(operation):
        return UNKNOWN

    def numbers() -> List[Optional[Array]]:
        return [number_at(i) for i, kind in enumerate(kinds) if kind is None]

    if operation == "Maximum" and SCALE in kinds and _are_at_most(1.0, numbers()):
        return SCALE  # S does not fall below 1 by default, so nothing is changed
    if operation in {"Cast", "Identity", "Bitcast"}:
        return kinds[0]
    if operation in NUMBERS:
        return None
    if operation in _COMPARISONS and {*kinds} == {SCALE, None}:
        return None  # how large S is says nothing of a gradient
    kinds = [SCALED if kind == SCALE else kind for kind in kinds]
    if operation in _CHOICES and kinds[0] != CHANGED and any(kinds[1:]):
        kinds = kinds[1:]
    found = {kind for kind in kinds if kind is not None}
    if not found:
        return None
    if CHANGED in found:
        return CHANGED
    factors = [_FACTORS.get(kind or UNSCALED, 0) for kind in kinds]
    has_factors = any(factors)
    is_bound = operation in _BOUNDS | _COMPARISONS and has_factors
    if is_bound and (len(found) > 1 or not _are_at_most(_EPSILON, numbers())):
        return CHANGED
    if operation in _FREE or operation in _COMPARISONS:
        return UNKNOWN if UNKNOWN in found else UNSCALED
    if operation in _SUMS and has_factors:
        added = [each for each in numbers() if each is not None]
        if any(np.any(np.abs(n) > _EPSILON) for n in added if n.dtype.kind == "f"):
            return CHANGED
    power = _POWERS.get(operation)
    if operation == "Pow":
        exponent = number_at(1)
        if exponent is not None and exponent.size == 1:
            power = float(exponent.item())
    if power is not None:
        return _product(kinds, power * max(factors, key=abs))
    if operation in _FUNCTIONS and has_factors:
        return CHANGED
    if operation in PRODUCTS:
        return _product(kinds, sum(factors))
    if operation in _QUOTIENTS:
        return _product(kinds, factors[0] - factors[1])
    if {SCALED, SQUARED} <= found:
        if operation not in _CHOICES:
            return CHANGED
        found.remove(SQUARED)  # a norm, or its square where that is 0
    kind = next(k for k in (SQUARED, SCALED, UNKNOWN, UNSCALED, INVERSE) if k in found)
    return CHANGED if kind in {SQUARED, SCALED} and UNSCALED in found else kind


def is_call(operation: str) -> bool:
    """Tells whether nothing is known of the results, unless a body can be read."""
    return operation in _CALLS or operation.startswith("__")  # a function of eager mode


def _product(kinds: Sequence[Optional[str]], factors: float) -> str:
    """Returns the kind of a product of these kinds in which S is so many factors."""
    if UNKNOWN in kinds and factors < 1.0:
        return UNKNOWN
    return next((kind for kind, each in _FACTORS.items() if each == factors), CHANGED)


def _are_at_most(bound: float, numbers: Iterable[Optional[Array]]) -> bool:
    """Tells whether all numbers are known, and small or infinite."""
    return all(
        each is not None and bool(np.all((np.abs(each) <= bound) | np.isinf(each)))
        for each in numbers
    )


class _Notes:
    """What is known of one graph's tensors, by their `id`s."""

    def __init__(self) -> None:
        self.noted: Dict[int, Kind] = {}
        self.kinds: Dict[int, Optional[Kind]] = {}
        self.walked, self.weights = 0, 0


class Kinds:
    """The kinds of all values of one loss scale, in graphs and in eager mode.

    An eager tensor has its kind as an attribute, so that it is forgotten with it.
    """

    def __init__(self, scale_variable: Optional[Variable]) -> None:
        #: Is called with each operation of a graph, and the kinds of tensors by `id`.
        self.on_operation: Callable[[Op, Dict[int, Optional[Kind]]], None]
        self.on_operation = lambda *_: None
        self._attribute = f"_lossscale_kind_{next(_numbers)}"
        #: The handles of variables of which it is known what they hold.
        self._handles: Dict[int, Optional[Kind]] = {}
        self._patience = 0
        #: The number of the first tensor of eager mode of which we could hear.
        self._since = 0
        self.note_variables([scale_variable], Kind(SCALE))

    def note(self, tensor: Tensor, kind: Kind) -> None:
        """Notes the kind of a tensor. In eager mode, listens to what becomes of it."""
        graph = graph_of(tensor)
        if graph is not None:
            notes_of(graph, self, _Notes).noted[id(tensor)] = kind
            return
        setattr(tensor, self._attribute, kind)
        if current_graph() is None:
            if not op_callbacks.is_telling():
                self._since = op_callbacks.key_of(tensor)
            op_callbacks.add(self)
            self._patience = _PATIENCE

    def note_variables(
        self, variables: Iterable[Variable], kind: Optional[Kind] = None
    ) -> None:
        """Notes what variables hold: numbers, such as weights, or values of a kind."""
        for variable in variables:
            for copy in getattr(variable, "values", None) or [variable]:
                handle = getattr(copy, "handle", None)
                if handle is not None and graph_of(handle) is None:
                    self._handles.setdefault(op_callbacks.key_of(handle), kind)

    def of(self, grads: Iterable[Grad]) -> List[Optional[Kind]]:
        """Returns the kind of each gradient. None: it is a number, or None itself."""
        return [None if each is None else self._of(dense_part(each)) for each in grads]

    def _of(self, tensor: Tensor) -> Optional[Kind]:
        graph = graph_of(tensor)
        if graph is None:
            return self._eager_kind(tensor)
        return self._walked(graph).get(id(tensor))

    def note_op(self, operation: str, inputs: Tensors, outputs: Tensors) -> bool:
        """Takes note of an operation of eager mode: see `op_callbacks.OpListener`."""
        kinds = [self._eager_kind(each) for each in inputs]
        if any(kinds) or is_call(operation):
            called = [operation] if is_call(operation) else []
            every = _made(operation, inputs, kinds, outputs, called, self._since)
            for output, made in every:
                if made is not None:  # momentum would have a source of each step
                    few = made._replace(sources=made.sources[-_SOURCES:])
                    setattr(output, self._attribute, few)
        is_related = any(each is not None and each.name != UNKNOWN for each in kinds)
        self._patience = _PATIENCE if is_related else self._patience - 1
        return self._patience > 0

    def _eager_kind(self, tensor: Tensor) -> Optional[Kind]:
        found: Optional[Kind] = vars(tensor).get(self._attribute)
        if found is None and tensor.dtype == tf.resource:
            return self._handles.get(op_callbacks.key_of(tensor), Kind(UNKNOWN))
        return found

    def _walked(self, graph: Graph) -> Dict[int, Optional[Kind]]:
        """Returns the kinds of a graph's tensors, after a walk over its operations."""
        notes = notes_of(graph, self, _Notes)
        if notes.weights != len(self._handles):  # weights were unknown at the last walk
            notes.kinds, notes.walked, notes.weights = {}, 0, len(self._handles)
        kinds = notes.kinds
        captures: Sequence[Tuple[Tensor, Tensor]] = getattr(graph, "captures", ())
        for outer, inner in captures:
            if id(inner) not in kinds:
                kinds[id(inner)] = self._of(outer)
                if graph_of(outer) is None and outer.dtype != tf.resource:
                    kinds[id(inner)] = kinds[id(inner)] or Kind(UNKNOWN)
        operations = graph.get_operations()
        for each in operations[notes.walked :]:
            inputs = list(each.inputs)
            known = [kinds.get(id(tensor)) for tensor in inputs]
            called = functions_of(each)
            self.on_operation(each, kinds)
            for output, made in _made(each.type, inputs, known, each.outputs, called):
                kinds.setdefault(id(output), notes.noted.get(id(output), made))
        notes.walked = len(operations)
        return kinds


def _made(
    operation: str,
    inputs: Tensors,
    kinds: Sequence[Optional[Kind]],
    outputs: Tensors,
    called: Sequence[str],
    since: int = 0,
) -> Iterable[Tuple[Tensor, Optional[Kind]]]:
    """Yields each output of an operation that calls these functions, with its kind.

    An eager tensor with a number below `since` may be a gradient that a function
    returned before anybody listened.
    """
    if operation == "IdentityN":  # what `tf.custom_gradient` returns
        yield from zip(outputs, kinds)
        return
    names = [None if kind is None else kind.name for kind in kinds]
    every = [source for kind in kinds if kind is not None for source in kind.sources]
    sources = tuple({id(source): source for source in every}.values())
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
        may_be_unheard = since and operation in _SUMS
        if may_be_unheard and op_callbacks.key_of(inputs[i]) < since:
            return None
        return known_value(inputs[i])

    name = made_of(operation, names, number_at)
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
    """Returns the kind of a choice between values of these kinds."""
    return made_of("SelectV2", [chosen_by, *kinds], lambda _: None)


@functools.lru_cache(maxsize=_BODIES)
def _returned(
    operation: str, called: Sequence[str], given: Tuple[Optional[str], ...]
) -> Optional[List[Optional[str]]]:
    """Returns the kinds of what functions return that scale and unscale nothing.

    `given` are those of the operation's inputs. None: it is not known.
    """
    if operation in _BRANCHES:
        branches = [_returned("", (each,), given[1:]) for each in called]
        if None in branches:
            return None
        return [_either(given[0], *kinds) for kinds in zip(*branches)]
    if operation in _LOOPS:
        for _ in range(_TURNS):  # what a loop hands on is given to its next turn
            after, goes_on = (_returned("", (each,), given) for each in called)
            if after is None or goes_on is None:
                return None
            by = CHANGED if CHANGED in goes_on else None
            joined = tuple(_either(by, *each) for each in zip(given, after))
            if joined == given:
                return list(given)
            given = joined
        return None
    body = body_of(called[0])
    if body is None or len(body.inputs) != len(given):
        return None
    kinds = {
        id(tensor): None if name is None else Kind(name)
        for tensor, name in zip(body.inputs, given)
    }
    for each in body.get_operations():
        inputs, calls = list(each.inputs), functions_of(each)
        known = [kinds.get(id(tensor)) for tensor in inputs]
        for output, made in _made(each.type, inputs, known, each.outputs, calls):
            kinds.setdefault(id(output), made)
    returned = (kinds.get(id(output)) for output in body.outputs)
    return [None if kind is None else kind.name for kind in returned]


def known_value(tensor: Tensor) -> Optional[Array]:
    """Returns the value of a tensor of few elements, None if it is not known."""
    if tensor.dtype.is_floating or tensor.dtype.is_integer:
        size = tensor.shape.num_elements()
        if size is not None and size <= 1024:
            value: Optional[Array] = tf.get_static_value(tensor)
            return value
    return None
