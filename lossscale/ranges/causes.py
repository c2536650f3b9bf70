"""What makes a value infinite or NaN: what was seen, what is usual, what to write.

Two tables and a few sentences. `PLACES` says where a value was seen, `CAUSES` what an
operation was given, what is usually behind that, and what to write. The sentences in
between are those that the monitor says, too, so that both say the same of one fault.
"""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, Tuple

import numpy as np

# What `find_nonfinite` and the monitor share. The first ones are parts of a list.
BAD_DATA = "inf or NaN in the data"
LEARNING_RATE = "a learning rate that is too high"
ACTIVATIONS = """\
activations beyond float16's 65504, for which their layer needs dtype="float32\""""
ZERO = "a logarithm of zero or a division by zero"
INFINITE_DERIVATIVE = """\
an infinite derivative, as a square root or a norm has at zero"""

LOSS_IN_FLOAT16 = """\
The loss is computed in float16, which ends at 65504. Compute it in float32: give the \
last layer dtype="float32", and cast to tf.float32 before you sum."""
SCALE_TOO_HIGH = """\
The loss scale is too high. A DynamicLossScale comes down by itself. Give a \
FixedLossScale a smaller number."""
LOWER_SCALE = """\
At the loss scale 2**-24 all gradients are finite, and they reach the layers before. \
So another way is to let it fall below 1: DynamicLossScale(min_loss_scale=2.0**-24)."""
BAD_WEIGHTS = "No step repairs them. Go back to a checkpoint."

#: Where a value was seen -> what to say. `NonfiniteReport` fills the places in.
PLACES: Dict[str, str] = {
    "none": """\
In this batch of {rows} rows the loss is finite at the loss scale {scale}, and so are \
all gradients. Nothing is at fault.""",
    "scale": """\
In this batch of {rows} rows the loss is finite, and so are all gradients at the loss \
scale 1. At {scale} gradients overflow: no layer is at fault. """
    + SCALE_TOO_HIGH,
    "data": """\
The data are finite, but not in {dtype}: the largest value that is finite there is \
{largest}, and float16 ends at 65504. Divide the data by a number, as in x / 255, \
before the model gets them.""",
    "weights": """\
{layer} ({layer_class}): its weights hold {kind}: {variables}. """
    + BAD_WEIGHTS
    + " Then lower the learning rate.",
    "forward": """\
{layer} ({layer_class}, {dtype}): {kind}{operation}, beside finite values up to \
{largest}; its inputs were finite.""",
    "forward, inputs": """\
{layer} ({layer_class}, {dtype}): its inputs are {kind}, beside finite values up to \
{largest}; they were finite before they were cast to {dtype}.""",
    "forward, cast": """\
{layer} ({layer_class}): its `call` casts to {dtype}, and makes {kind} of a finite \
value; float16 ends at 65504.""",
    "loss": """\
The loss itself is {kind}{operation} ({dtype}), but all outputs of layers that it \
depends on are finite.""",
    "gradient": """\
{layer} ({layer_class}, {dtype}): its gradient is {kind}{operation}, beside finite \
values up to {largest}; the gradient that it received was finite, and so is the \
forward pass.""",
    "gradient, cast": """\
{layer} ({layer_class}, {dtype}): the gradient at its output is {kind}: it is finite \
up to {largest} in float32, but not where it is cast to {dtype}.""",
    "gradient of the loss": """\
The loss is finite, but its own derivative is {kind}{operation} ({dtype}).""",
}

#: Which argument decides, the last if it is not here, and what is added to it.
_ARGUMENTS = {"Pow": (0, 0.0), "Log1p": (-1, 1.0), "Xlog1py": (-1, 1.0)}

#: What the argument that decides held.
_ZEROS, _NEGATIVES, _WHATEVER = "zeros", "negative numbers", ""


class Cause(NamedTuple):
    """One row of the table: what kills a value, and what helps."""

    #: The types of TensorFlow's operations. On the way back, of those whose derivative
    #: is computed. Empty: any other.
    operations: Tuple[str, ...]
    kinds: Tuple[str, ...]  # which of "inf" and "nan" the operation made
    is_backward: Optional[bool]  # whether its derivative made it. None: either
    held: str  # what the argument that decides held. `_WHATEVER`: anything
    seen: str  # what is known of this value
    usual: str  # what is usually behind it
    to_write: str  # with `{small}`, a number that fits the dtypes at hand


_INF, _NAN, _EITHER = ("inf",), ("nan",), ("inf", "nan")
_NEGATIVE = "Its argument holds negative numbers, and it makes NaN of them."
_BELOW = "Its argument holds numbers below -1, and it makes NaN of them."
_POSITIVE = "Keep its argument positive: tf.maximum(x, {small})."
_ABOVE = "Keep its argument above -1: tf.maximum(x, {small} - 1)."
_EXPONENTIAL = "It is the exponential of a large number."
_LIMIT = "Subtract the largest number first, or limit it: tf.exp(tf.minimum(x, 10.0))."
_HOLDS, _DIVIDES = "Its argument holds zeros.", "Its divisor holds zeros."
_DIVISOR = "Add a small number to the divisor: x / (y + {small})."
_ADD = "Add a small number to its argument: x + {small}."
_ROOT = "Add a small number to its argument: tf.sqrt(x + {small})."
_LIMITS = "Its derivative is infinite at 1 and -1, and beyond it makes NaN."
_CLIP = "Keep its argument within: tf.clip_by_value(x, {small} - 1, 1 - {small})."
_OF_ZEROS = "Most often it is the sum or the norm of a row of zeros, as padding is."
_SQUARE = "Most often the divisor is so small that its square is zero."
_OFTEN_ROOT = f"Most often this is {INFINITE_DERIVATIVE}."
_OFTEN_LOG = "Most often this is a logarithm of zero."
_OFTEN = f"Most often this is {ZERO}, an exponential, or {LEARNING_RATE}."
_LOOK = "Look for one there, and add {small} to its argument."
_1P, _LOGS = ("Log1p", "Xlog1py"), ("Log", "Xlogy", "Log1p", "Xlog1py")
_ROOTS, _LIMITED = ("Sqrt", "Rsqrt", "Pow"), ("Acos", "Asin", "Atanh", "Erfinv")
_EXPS = ("Exp", "Expm1", "Sinh", "Cosh")
_DIVS = (
    *("RealDiv", "Div", "Reciprocal", "Inv", "Xdivy"),
    *("FloorDiv", "FloorMod", "Mod", "TruncateDiv"),
)
#: The table. The first row that fits is said.
CAUSES: List[Cause] = [
    Cause(*row)
    for row in (
        (_DIVS, _EITHER, None, _ZEROS, _DIVIDES, _OF_ZEROS, _DIVISOR),
        (_1P, _NAN, False, _NEGATIVES, _BELOW, "", _ABOVE),
        ((*_LOGS, *_ROOTS), _NAN, False, _NEGATIVES, _NEGATIVE, "", _POSITIVE),
        (_LOGS, _INF, False, _ZEROS, "It is the logarithm of a zero.", "", _ADD),
        (_ROOTS, _INF, False, _ZEROS, "It is a negative power of zero.", "", _ADD),
        (_EXPS, _INF, False, _WHATEVER, _EXPONENTIAL, "", _LIMIT),
        (_LIMITED, _EITHER, None, _WHATEVER, _LIMITS, "", _CLIP),
        (_ROOTS, _EITHER, True, _ZEROS, _HOLDS, "", _ROOT),
        (_LOGS, _EITHER, True, _ZEROS, _HOLDS, "", _ADD),
        (_ROOTS, _EITHER, True, _WHATEVER, "", _OFTEN_ROOT, _ROOT),
        (_DIVS, _EITHER, True, _WHATEVER, "", _SQUARE, _DIVISOR),
        (_LOGS, _EITHER, True, _WHATEVER, "", _OFTEN_LOG, _ADD),
        ((), _EITHER, False, _WHATEVER, "", _OFTEN, ""),
        ((), _EITHER, True, _WHATEVER, "", _OFTEN_ROOT, _LOOK),
    )
]


def held_by(operation: str, arguments: List[Any]) -> FrozenSet[str]:
    """Returns what the argument that decides holds: zeros, negative numbers, both."""
    at, shift = _ARGUMENTS.get(operation, (-1, 0.0))
    if not arguments:
        return frozenset()
    values = arguments[at].numpy().astype(np.float32) + np.float32(shift)
    held = {_ZEROS: (values == 0).any(), _NEGATIVES: (values < 0).any()}
    return frozenset(name for name, is_held in held.items() if is_held)


def cause_of(
    operation: str, kinds: List[str], is_backward: bool, held: FrozenSet[str]
) -> Cause:
    """Returns the row of the table that fits what an operation made, and of what."""
    made = {kind.lstrip("-") for kind in kinds}  # "inf", "-inf" and "nan"
    return next(
        cause
        for cause in CAUSES
        if (operation in cause.operations or not cause.operations)
        and (made.intersection(cause.kinds) or not made)
        and cause.is_backward in {None, is_backward}
        and cause.held in {_WHATEVER, *held}
    )
