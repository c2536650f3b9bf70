"""The table: which rule an operation follows, by its type.

To add an operation, list its type beside its rule; `rules` explains the rules. The
result of an operation that is not listed is unsure.
`tests/units/test_every_operation.py` compares each rule with experiment.
"""

from __future__ import annotations

from typing import Dict, Optional, Sequence

from lossscale.runtime.op_types import CAST_TO_BOOL, CAST_TO_COUNTS
from lossscale.units.moves import MOVES, rules
from lossscale.units.rules import (
    Rule,
    bound,
    chosen,
    determinant,
    flag,
    function,
    is_finite,
    linear,
    moved,
    moves,
    ones,
    power,
    product,
    rounded,
    together,
    zero_or,
)
from lossscale.units.unit import Operands, Unit, Units, hull


def _nothing(units: Units, operands: Operands) -> None:
    """The rule of a result that does not depend on the values of the inputs."""
    del units, operands


def _tridiagonal_product(units: Units, operands: Operands) -> Optional[Unit]:
    """The rule of the product of a matrix, given as three diagonals, and another."""
    return product([moved()(units[:3], operands), units[3]], operands)


def _choice(units: Units, operands: Operands) -> Optional[Unit]:
    """The rule of a flag's choice between two values.

    A number beside a quotient does not count: `where(x == 0, 0, 1 / x)` is `1 / x`,
    except where x is zero.
    """
    found = chosen(hull(units[1:]), units[:1])
    is_quotient = found is not None and found.is_sure and found.low < 0.0
    return found if is_quotient else moved(1, 2)(units, operands)


def _squared_difference(units: Units, operands: Operands) -> Optional[Unit]:
    """The rule of the square of a difference."""
    return linear(2.0)([moved()(units, operands)], operands)


#: The rule that all results of an operation follow.
RULES: Dict[str, Rule] = {
    **MOVES,
    **rules(_choice, "Select SelectV2"),
    # Products of powers.
    **rules(
        product,
        """
        Mul MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 SparseMatMul Einsum
        XlaEinsum XlaDot XlaDotV2 Cross
        """,
    ),
    **rules(
        linear(1.0, 1.0),
        """
        Conv Conv2D Conv3D DepthwiseConv2dNative XlaConv XlaConvV2
        """,
    ),
    **rules(
        linear(0.0, 1.0, 1.0),
        """
        Conv2DBackpropInput Conv3DBackpropInputV2
        DepthwiseConv2dNativeBackpropInput
        """,
    ),
    **rules(
        linear(1.0, 0.0, 1.0),
        """
        Conv2DBackpropFilter Conv3DBackpropFilterV2
        DepthwiseConv2dNativeBackpropFilter
        """,
    ),
    **rules(linear(0.0, 1.0, 0.0, 1.0), "SparseTensorDenseMatMul SparseDenseCwiseMul"),
    "SparseDenseCwiseDiv": linear(0.0, 1.0, 0.0, -1.0),
    **rules(linear(1.0, -1.0), "RealDiv Div"),
    **rules(zero_or(linear(1.0, -1.0)), "DivNoNan Xdivy"),
    "MulNoNan": zero_or(linear(1.0, 1.0)),
    **rules(linear(2.0), "Square L2Loss"),
    **rules(linear(0.5), "Sqrt Cholesky MatrixSquareRoot"),
    **rules(linear(-0.5), "Rsqrt"),
    **rules(linear(-1.0), "Reciprocal Inv MatrixInverse"),
    **rules(
        linear(-1.0, 1.0),
        """
        MatrixSolve MatrixTriangularSolve BandedTriangularSolve TridiagonalSolve
        SqrtGrad CholeskyGrad
        """,
    ),
    **rules(linear(3.0, 1.0), "RsqrtGrad"),
    **rules(linear(2.0, 1.0), "ReciprocalGrad InvGrad"),
    **rules(linear(1.0, 0.0), "ReluGrad LeakyReluGrad ResizeBilinearGrad"),
    **rules(linear(1.0, 0.0), "ResizeBicubicGrad"),
    **rules(
        linear(1.0, None),
        """
        Relu6Grad EluGrad SeluGrad SoftplusGrad SoftsignGrad Xlogy Xlog1py
        AdjustContrastv2 AdjustHue AdjustSaturation
        FakeQuantWithMinMaxArgsGradient
        """,
    ),
    **rules(linear(None, 1.0), "TanhGrad SigmoidGrad"),
    **rules(linear(1.0, None, None), "LRNGrad"),
    **rules(
        linear(None, None, 1.0),
        """
        MaxPoolGrad MaxPoolGradV2 MaxPool3DGrad MaxPoolGradGrad
        MaxPoolGradGradV2 MaxPool3DGradGrad Dilation2DBackpropInput
        Dilation2DBackpropFilter
        """,
    ),
    "MaxPoolGradWithArgmax": linear(0.0, 1.0, 0.0),
    **rules(linear(1.0, None, 0.0, 0.0), "CropAndResize CropAndResizeGradImage"),
    "MatrixSolveLs": linear(None, 1.0, None),
    **rules(
        linear(1.0, None, None, None),
        """
        FakeQuantWithMinMaxVarsGradient
        FakeQuantWithMinMaxVarsPerChannelGradient QuantizeAndDequantizeV4Grad
        """,
    ),
    **rules(
        linear(1.0, None, None, None, None, None),
        """
        FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3
        """,
    ),
    "Pow": power,
    "SquaredDifference": _squared_difference,
    "TridiagonalMatMul": _tridiagonal_product,
    "OnesLike": ones,
    "MatrixDeterminant": determinant,
    # Flags, signs and positions.
    **rules(
        flag(),
        """
        Equal NotEqual Less LessEqual Greater GreaterEqual Atan2 LowerBound
        UpperBound Sign Angle
        """,
    ),
    **rules(
        flag(0),
        f"""
        ArgMax ArgMin Where ToBool InTopK InTopKV2 {CAST_TO_BOOL}
        """,
    ),
    "HistogramFixedWidth": flag(0, 1),
    **rules(is_finite, "IsFinite IsInf IsNan"),
    # Bounds and roundings.
    "Minimum": bound(keeps_scale=False),
    "Maximum": bound(keeps_scale=True),
    **rules(
        together,
        """
        ClipByValue FloorMod Mod TruncateMod Dilation2D FakeQuantWithMinMaxVars
        FakeQuantWithMinMaxVarsPerChannel
        """,
    ),
    **rules(
        rounded(moved()),
        f"""
        Round Rint Floor Ceil {CAST_TO_COUNTS}
        """,
    ),
    **rules(rounded(linear(1.0, -1.0)), "FloorDiv TruncateDiv"),
    **rules(
        function(),
        """
        Exp Expm1 Log Log1p Tanh Sigmoid Softplus Softsign Sin Cos Tan Asin Acos
        Atan Sinh Cosh Asinh Acosh Atanh Erf Erfc Erfinv Ndtri Elu Selu Relu6
        Softmax LogSoftmax SoftmaxCrossEntropyWithLogits
        SparseSoftmaxCrossEntropyWithLogits Digamma Lgamma Prod Cumprod
        MatrixExponential MatrixLogarithm IgammaGradA RandomGammaGrad
        """,
    ),
}
_ORDERED = (moved(0), flag(0))
#: The rules of operations whose results follow different rules: one for each result.
EACH: Dict[str, Sequence[Rule]] = {
    "Svd": (linear(1.0), flag(), flag()),
    "Qr": (flag(), linear(1.0)),
    "Eig": (linear(1.0), flag()),
    "SelfAdjointEigV2": (linear(1.0), flag()),
    "LogMatrixDeterminant": (flag(), function()),
    "Lu": (function(), flag()),
    **rules(
        _ORDERED,
        """
        TopK TopKV2 ApproxTopK Unique UniqueV2 MaxPoolWithArgmax
        SparseSegmentSumGradV2 SparseSegmentMeanGradV2 SparseSegmentSqrtNGradV2
        """,
    ),
    **rules((*_ORDERED, flag(0)), "UniqueWithCounts UniqueWithCountsV2"),
    **rules(
        (flag(0), moved(1), flag(0)),
        """
        SparseReorder SparseSlice SparseReduceSumSparse SparseReduceMaxSparse
        """,
    ),
    **rules((moved(0), _nothing, _nothing), "FractionalAvgPool FractionalMaxPool"),
    "TensorArrayGradV3": (_nothing, moved(1)),
    "TensorArrayGradWithShape": (_nothing, _nothing, moved(1)),
    "SparseFillEmptyRows": (flag(0), moved(1, 3), flag(0), flag(0)),
    "SparseConcat": (
        flag(0),
        moves(lambda count: range(count // 3, count // 3 * 2)),
        flag(0),
    ),
}
