"""A loss scale used as a number: arithmetic, comparison, NumPy.

Keras 2's `optimizer.loss_scale` is a tensor, and Keras 3's is a float. Code written for
either can compute with our loss scales, too.
"""

from __future__ import annotations

import numbers
from typing import Any, Callable, Dict, Optional, TypeVar

import numpy as np
import tensorflow as tf

from lossscale.runtime.aliases import Scalar, Tensor

_Number = TypeVar("_Number")


class _Operator:
    """An operator of a tensor. It takes its name from where it stands in a class."""

    def __init__(self, as_tensor: Callable[[Any], Tensor]) -> None:
        self._as_tensor = as_tensor

    def __set_name__(self, owner: type, name: str) -> None:
        def operate(loss_scale: ReadsAsNumber, *others: Any) -> Tensor:
            return getattr(self._as_tensor(loss_scale), name)(*others)

        operate.__name__ = name
        setattr(owner, name, operate)

    def __call__(self, *others: Any) -> Tensor:  # what type checkers see
        raise NotImplementedError


def _compared(loss_scale: ReadsAsNumber) -> Tensor:
    """Returns a loss scale as a tensor to compare. That does not count as a read."""
    was_read = loss_scale.has_been_read
    tensor = tf.convert_to_tensor(loss_scale)
    loss_scale.has_been_read = was_read
    return tensor


def _is_number(other: object) -> bool:
    """Tells whether to compare values. If not, Python compares identities."""
    is_number = isinstance(other, (numbers.Number, np.number, np.ndarray))
    return (is_number and not isinstance(other, bool)) or bool(tf.is_tensor(other))


class ReadsAsNumber:
    """Lets you compute with an object whose `__call__` returns a `float32` scalar.

    Operators convert it to a tensor, in eager mode and in a graph, so that an optimizer
    can trace their results back to the loss scale. `float`, `int` and NumPy get a
    number. In a graph there is none, and TensorFlow raises an error.
    """

    has_been_read: bool
    #: Higher than NumPy's, so that NumPy uses our operators. A graph can trace those.
    __array_priority__ = 100

    def _value(self) -> Scalar:
        """Returns the same as `__call__`, but nobody is told of the read."""
        raise NotImplementedError  # a loss scale's own `__call__` takes its place

    def _read_as_number(self, as_type: Callable[[Any], _Number]) -> _Number:
        """Returns the number as `as_type` converts it."""
        raise NotImplementedError

    def _to_show(self) -> float:
        """Returns the number for display. Compute nothing with it."""
        return float(self._value())

    def numpy(self) -> Any:
        """Returns the current loss scale as a NumPy `float32`. Eager mode only."""
        return self._read_as_number(lambda tensor: tensor.numpy())

    @property
    def __array_interface__(self) -> Dict[str, Any]:
        # Not `__array__`: tf.function would take an argument that has it for an array,
        # and make a constant of it.
        number = np.array(float(self), np.float32)
        data, kind = number.tobytes(), number.dtype.str
        return {"version": 3, "shape": (), "typestr": kind, "data": data}

    def __float__(self) -> float:
        return self._read_as_number(float)

    def __int__(self) -> int:
        return self._read_as_number(int)

    __trunc__ = __int__

    def __round__(self, digits: Optional[int] = None) -> Any:
        return round(float(self), digits)

    def __bool__(self) -> bool:
        return True  # no loss scale is 0, so the value need not be read

    def __format__(self, spec: str) -> str:
        return format(self._to_show(), spec) if spec else str(self)

    def __pos__(self) -> Tensor:
        return tf.convert_to_tensor(self)  # a tensor itself has no such operator

    __neg__ = __abs__ = _Operator(tf.convert_to_tensor)
    __add__ = __sub__ = __mul__ = __truediv__ = _Operator(tf.convert_to_tensor)
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = _Operator(tf.convert_to_tensor)
    __floordiv__ = __mod__ = __pow__ = _Operator(tf.convert_to_tensor)
    __rfloordiv__ = __rmod__ = __rpow__ = _Operator(tf.convert_to_tensor)
    __lt__ = __le__ = __gt__ = __ge__ = _Operator(_compared)

    # Two loss scales of equal value are different keys of a dictionary.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return tf.equal(_compared(self), other) if _is_number(other) else NotImplemented

    def __ne__(self, other: object) -> Any:
        if not _is_number(other):
            return NotImplemented
        return tf.not_equal(_compared(self), other)
