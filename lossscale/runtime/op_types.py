"""Tells operations apart that share a type: see `kind_of`.

A cast to integers rounds, a cast to `tf.bool` compares with zero, and any other cast
keeps the value. The operation that `tf.py_function` runs forward and the one that it
runs for its gradient have the same type.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Iterator, List, Optional, Tuple, Union

import tensorflow as tf

# Not public, and the same on TensorFlow 2.4, 2.10, 2.15 and 2.21.
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import script_ops

from lossscale.runtime.aliases import NodeDef, Tensor

#: The dtypes of positions and counts.
COUNTS = {tf.int8, tf.int16, tf.int32, tf.int64}
COUNTS |= {tf.uint8, tf.uint16, tf.uint32, tf.uint64}
#: The types that `kind_of` splits into several kinds.
AMBIGUOUS = {"Cast", "EagerPyFunc"}
CAST_TO_BOOL, CAST_TO_COUNTS = "CastToBool", "CastToCounts"
PY_FUNCTION_GRADIENT = "EagerPyFuncGrad"


def kind_of(kind: str, dtype: Optional[tf.DType], token: Union[str, bytes]) -> str:
    """Returns an operation's kind: its type, or a name of our own.

    Args:
      kind: Its type, one of `AMBIGUOUS`.
      dtype: The dtype of its first result.
      token: The name of the Python function that it calls. Empty if it calls none.
    """
    if kind == "Cast":
        if dtype == tf.bool:
            return CAST_TO_BOOL
        return CAST_TO_COUNTS if dtype in COUNTS else kind
    # The registry has a `get` of its own, but not on TensorFlow 2.4.
    function = script_ops._py_funcs._funcs.get(tf.compat.as_str(token))
    function = function() if isinstance(function, weakref.ref) else function
    is_gradient = getattr(function, "_is_grad_func", False)
    return PY_FUNCTION_GRADIENT if is_gradient else kind


def as_number(tensor: Tensor) -> Tensor:
    """Returns the same tensor as a plain number, to which `units` gives no exponent.

    Use it for a factor that gradients are multiplied with and later divided by, and for
    a count of attempts: such numbers do not change the result. The returned tensor
    carries no derivative.
    """
    # Nothing else makes a Snapshot before a graph runs. It has no gradient.
    return tf.raw_ops.Snapshot(input=tf.stop_gradient(tensor))


@lru_cache(maxsize=None)  # there are only so many types of operations
def _output_args(kind: str) -> List[Tuple[str, str, str]]:
    definition = op_def_registry.get(kind)
    args = [] if definition is None else definition.output_arg
    return [(each.name, each.number_attr, each.type_list_attr) for each in args]


def takes(kind: str, attribute: str, dtype: tf.DType) -> bool:
    """Tells whether a type of operation takes a dtype.

    Args:
      kind: The type, one that TensorFlow has.
      attribute: The name of the attribute that holds the dtype.
      dtype: A `tf.DType`.
    """
    definition = op_def_registry.get(kind)
    (found,) = (each for each in definition.attr if each.name == attribute)
    return dtype.as_datatype_enum in found.allowed_values.list.type


def output_names(node: NodeDef) -> Iterator[str]:
    """Yields the names of an operation's outputs, as a definition writes them."""
    for name, number, types in _output_args(node.op):
        count = 1
        if number:
            count = node.attr[number].i
        elif types:
            count = len(node.attr[types].list.type)
        for index in range(count):
            yield f"{node.name}:{name}:{index}"
