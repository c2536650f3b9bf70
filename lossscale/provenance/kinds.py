"""What is known of a value: is it scaled, unscaled, or neither?

Every operation makes a kind of the kinds of its inputs (`made_of`). A value without a
kind is a number: as far as we have seen, S is not in it.
"""

from __future__ import annotations

from typing import Callable, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from lossscale.runtime.aliases import Array, Tensor

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
    **dict.fromkeys(("Square", "L2Loss", "SquaredDifference"), 2.0),
    **dict.fromkeys(("Reciprocal", "Inv", "MatrixInverse"), -1.0),
    "Sqrt": 0.5,
    "Rsqrt": -0.5,
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
SUMS = {"Add", "AddV2", "AddN", "Sub", "BiasAdd", "ConcatV2", "Pack", "PadV2"}
_COMPARISONS = {"Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual"}
_COMPARISONS |= {"ApproximateEqual"}
#: Operations whose results are the same, whatever S is.
_FREE = {"Sign", "IsFinite", "IsNan", "IsInf", "Angle", "InTopK", "InTopKV2"}
#: Operations whose results are numbers, whatever they are given.
NUMBERS = {"OnesLike", "ZerosLike", "Shape", "ShapeN", "Size", "Rank", "Snapshot"}
_CHOICES = {"Select", "SelectV2"}
#: A number no larger than this, such as an epsilon, counts as 0 in a comparison.
_EPSILON = 1.01e-3

BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}
LOOPS = {"While", "StatelessWhile"}
#: Operations that call functions, or hold arguments. Of most nothing is known.
_CALLS = {
    *BRANCHES,
    *LOOPS,
    *("PartitionedCall", "StatefulPartitionedCall", "ScanDataset", "ReduceDataset"),
    *("MapDataset", "ParallelMapDataset", "ParallelMapDatasetV2", "FlatMapDataset"),
    *("MapAndBatchDataset", "InterleaveDataset", "ParallelInterleaveDatasetV2"),
    *("ParallelInterleaveDatasetV3", "ParallelInterleaveDatasetV4", "Placeholder"),
    *("PyFunc", "PyFuncStateless", "EagerPyFunc"),
}


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
    names = {kind for kind in kinds if kind is not None}
    if not names:
        return None
    if CHANGED in names:
        return CHANGED
    factors = [_FACTORS.get(kind or UNSCALED, 0) for kind in kinds]
    has_factors = any(factors)
    is_bound = operation in _BOUNDS | _COMPARISONS and has_factors
    if is_bound and (len(names) > 1 or not _are_at_most(_EPSILON, numbers())):
        return CHANGED
    if operation in _FREE or operation in _COMPARISONS:
        return UNKNOWN if UNKNOWN in names else UNSCALED
    if operation in SUMS and has_factors:
        added = [number for number in numbers() if number is not None]
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
    if {SCALED, SQUARED} <= names:
        if operation not in _CHOICES:
            return CHANGED
        names.remove(SQUARED)  # a norm, or its square where that is 0
    kind = next(k for k in (SQUARED, SCALED, UNKNOWN, UNSCALED, INVERSE) if k in names)
    return CHANGED if kind in {SQUARED, SCALED} and UNSCALED in names else kind


def is_call(operation: str) -> bool:
    """Whether nothing is known of the results, unless a body can be read."""
    return operation in _CALLS or operation.startswith("__")  # a function of eager mode


def _product(kinds: Sequence[Optional[str]], factors: float) -> str:
    """Returns the kind of a product of these kinds in which S is so many factors."""
    if UNKNOWN in kinds and factors < 1.0:
        return UNKNOWN
    return next((kind for kind, n in _FACTORS.items() if n == factors), CHANGED)


def _are_at_most(bound: float, numbers: Iterable[Optional[Array]]) -> bool:
    return all(
        n is not None and bool(np.all((np.abs(n) <= bound) | np.isinf(n)))
        for n in numbers
    )


def known_value(tensor: Tensor) -> Optional[Array]:
    """Returns the value of a tensor of few elements, None if it is not known."""
    if tensor.dtype.is_floating or tensor.dtype.is_integer:
        size = tensor.shape.num_elements()
        if size is not None and size <= 1024:
            value: Optional[Array] = tf.get_static_value(tensor)
            return value
    return None
