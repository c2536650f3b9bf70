"""What operations are, where their type alone does not say it: see `kind_of`.

A cast to integers rounds, one to `tf.bool` asks what is zero, and any other hands on
what it is given. What `tf.py_function` runs for its gradient has the type of what it
runs forward.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any, Iterator, List, Optional, Tuple

import tensorflow as tf

# Not public, and the same on TensorFlow 2.4, 2.10, 2.15 and 2.21.
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import script_ops

from lossscale.runtime.aliases import Tensor

#: The dtypes of positions and counts.
COUNTS = {tf.int8, tf.int16, tf.int32, tf.int64}
COUNTS |= {tf.uint8, tf.uint16, tf.uint32, tf.uint64}
#: The types of which `kind_of` tells more.
AMBIGUOUS = {"Cast", "EagerPyFunc"}
CAST_TO_BOOL, CAST_TO_COUNTS = "CastToBool", "CastToCounts"
PY_FUNCTION_GRADIENT = "EagerPyFuncGrad"


def kind_of(kind: str, dtype: Optional[tf.DType], token: Any) -> str:
    """Returns what an operation is: its type, or a name of our own.

    Args:
      kind: Its type, one of `AMBIGUOUS`.
      dtype: The dtype of its first result.
      token: The name of the Python function that it calls. Empty: it calls none.
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
    """Returns a tensor as a number, in which who follows units sees none.

    For what gradients are multiplied with and divided by again, and for how often that
    is tried: the result is the same whatever it is. It carries no derivative.
    """
    # Nothing else makes this type before a graph runs. It has no gradient.
    return tf.raw_ops.Snapshot(input=tf.stop_gradient(tensor))


@lru_cache(maxsize=None)  # of the types that there are
def _output_args(kind: str) -> List[Tuple[str, str, str]]:
    definition = op_def_registry.get(kind)
    args = [] if definition is None else definition.output_arg
    return [(each.name, each.number_attr, each.type_list_attr) for each in args]


def takes(kind: str, attribute: str, dtype: Any) -> bool:
    """Tells whether a type of operation takes a dtype.

    Args:
      kind: The type, one that TensorFlow has.
      attribute: The name of the attribute that holds the dtype.
      dtype: A `tf.DType`.
    """
    definition = op_def_registry.get(kind)
    (found,) = (each for each in definition.attr if each.name == attribute)
    return dtype.as_datatype_enum in found.allowed_values.list.type


def output_names(node: Any) -> Iterator[str]:
    """Yields the names of an operation's outputs, as a definition has them.

    Args:
      node: The operation, a `NodeDef`.
    """
    for name, number, types in _output_args(node.op):
        count = 1
        if number:
            count = node.attr[number].i
        elif types:
            count = len(node.attr[types].list.type)
        for index in range(count):
            yield f"{node.name}:{name}:{index}"
