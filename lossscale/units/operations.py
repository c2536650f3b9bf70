"""Which rule an operation follows: the table, by the operations' types.

A type that is not named here keeps the exponent of its inputs, or is the gradient of
another one. To add one, name it with its rule; `rules` says what they are.
"""

from __future__ import annotations

from typing import Dict, Optional

from lossscale.runtime.bodies import EACH_ITS_OWN
from lossscale.units.rules import (
    NO_ORIGINS,
    ZERO,
    Constant,
    Rule,
    Unit,
    Units,
    angle,
    bound,
    function,
    gradient,
    keep,
    linear,
    multiply,
    power,
    product,
    sign,
)


def _rules(rule: Rule, kinds: str) -> Dict[str, Rule]:
    return dict.fromkeys(kinds.split(), rule)


#: What comes out of these does not depend on the values of what goes in.
_NOTHING = {
    "ZerosLike",
    "OnesLike",
    "Shape",
    "ShapeN",
    "Size",
    "Rank",
    "Equal",
    "NotEqual",
    "Less",
    "LessEqual",
    "Greater",
    "GreaterEqual",
    "IsFinite",
    "IsInf",
    "IsNan",
    "ArgMax",
    "ArgMin",
    "All",
    "Any",
    "Where",
    "LogicalAnd",
    "LogicalOr",
    "LogicalNot",
    "BroadcastGradientArgs",
    "TensorListLength",
    "TensorArraySizeV3",
    "InvertPermutation",
    "RandomUniform",
    "RandomStandardNormal",
    "TruncatedNormal",
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "ApproximateEqual",
}
#: These hand on the loss scale as it is.
_SAME = {
    "Identity",
    "IdentityN",
    "Cast",
    "StopGradient",
    "Enter",
    "Switch",
    "RefSwitch",
    "Merge",
    "Reshape",
    "ReadVariableOp",
    "PreventGradient",
    "Snapshot",
    "EnsureShape",
    "ExpandDims",
    "Squeeze",
}
_RULES: Dict[str, Rule] = {
    **_rules(multiply, "Mul MulNoNan"),
    **_rules(
        product,
        "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 SparseMatMul Einsum XlaEinsum "
        "SparseTensorDenseMatMul Conv Conv2D Conv3D DepthwiseConv2dNative Cross XlaDot "
        "XlaDotV2 XlaConv XlaConvV2 Conv2DBackpropInputV2 Xlog1py Xlogy Outer",
    ),
    **_rules(linear(1.0, -1.0), "RealDiv Div DivNoNan Xdivy FloorDiv TruncateDiv"),
    **_rules(linear(2.0), "Square L2Loss"),
    **_rules(linear(0.5), "Sqrt Cholesky"),
    **_rules(linear(-0.5), "Rsqrt"),
    **_rules(linear(-1.0), "Reciprocal Inv MatrixInverse"),
    **_rules(linear(-1.0, 1.0), "MatrixSolve MatrixTriangularSolve SqrtGrad"),
    **_rules(linear(3.0, 1.0), "RsqrtGrad"),
    **_rules(linear(2.0, 1.0), "ReciprocalGrad InvGrad"),
    "Pow": power,
    "SquaredDifference": lambda units, constant: linear(2.0)(
        [keep(units, constant)], constant
    ),
    "Minimum": bound(keeps_scale=False),
    "Maximum": bound(keeps_scale=True),
    **_rules(sign, "Sign Angle"),
    **_rules(angle, "Atan2"),
    **_rules(
        function,
        "Exp Expm1 Log Log1p Tanh Sigmoid Softplus Softsign Sin Cos Tan Asin Acos Atan "
        "Sinh Cosh Asinh Acosh Atanh Erf Erfc Erfinv Ndtri Elu Selu Relu6 ClipByValue "
        "Softmax LogSoftmax SoftmaxCrossEntropyWithLogits Digamma Lgamma Igamma "
        "SparseSoftmaxCrossEntropyWithLogits Igammac Betainc Zeta Polygamma BesselI0e "
        "BesselI1e BesselI0 BesselI1 Prod Cumprod CumulativeLogsumexp Qr Svd Eig "
        "SelfAdjointEigV2 LogMatrixDeterminant MatrixDeterminant MatrixExponential "
        "MatrixLogarithm MatrixSquareRoot Bitcast PyFunc PyFuncStateless EagerPyFunc "
        "FakeQuantWithMinMaxVars FakeQuantWithMinMaxArgs QuantizeAndDequantizeV2 "
        "QuantizeAndDequantizeV3 QuantizeAndDequantizeV4 QuantizeV2 Mod FloorMod "
        "TruncateMod NextAfter",
    ),
}


def result(kind: str, units: Units, constant: Constant) -> Optional[Unit]:
    """Returns what is known of the results of an operation, None if nothing is.

    Args:
      kind: The operation's type.
      units: What is known of its inputs.
      constant: Returns the value of an input that is a constant.
    """
    if kind in _NOTHING:
        return ZERO if kind == "ZerosLike" else None
    if not any(units):
        return None
    found = rule_of(kind)(units, constant)
    if found is None or found.is_zero:
        return found
    if found.is_scale and kind not in _SAME:
        found = found._replace(is_scale=False)
    if found.is_free and found.readings:
        found = found._replace(readings=NO_ORIGINS)
    return found


def results(kind: str, units: Units, constant: Constant, count: int) -> Units:
    """Returns what is known of each of the `count` results of an operation."""
    if kind in EACH_ITS_OWN:
        return units
    return [result(kind, units, constant)] * count


def starts(kind: str) -> bool:
    """Tells whether results are known of which no input is."""
    return kind == "ZerosLike"


def rule_of(kind: str) -> Rule:
    """Returns the rule for an operation of this type."""
    rule = _RULES.get(kind)
    if rule is None:
        is_gradient = "Grad" in kind or "Backprop" in kind
        rule = _RULES[kind] = gradient if is_gradient else keep
    return rule


def join(units: Units) -> Optional[Unit]:
    """Returns the unit of what is one of several, or made of some of them."""
    return result("Merge", units, lambda _: None)
