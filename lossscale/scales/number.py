"""A loss scale used as a number: arithmetic, comparison, NumPy.

Keras 2's `optimizer.loss_scale` is a tensor, and Keras 3's is a float. Code written for
either can compute with our loss scales, too.
"""

from __future__ import annotations

import numbers
from typing import Any, Callable, Dict, Optional, TypeVar

import numpy as np
import tensorflow as tf

from lossscale.scales.listening import Listener

_Number = TypeVar("_Number")


def _as_tensor(name: str) -> Callable[..., Any]:
    """Returns the operator `name`, which converts the loss scale to a tensor."""

    def operate(self: Any, *others: Any) -> Any:
        return getattr(tf.convert_to_tensor(self), name)(*others)

    operate.__name__ = name
    return operate


def _compared(self: Any) -> Any:
    """Returns the loss scale as a tensor to compare. That does not count as a read."""
    was_read = self.has_been_read
    tensor = tf.convert_to_tensor(self)
    self.has_been_read = was_read
    return tensor


def _order(name: str) -> Callable[[Any, Any], Any]:
    """Returns the comparison `name` of the loss scale's value with another."""
    return lambda self, other: getattr(_compared(self), name)(other)


def _if_number(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns an operator that compares values with a number, otherwise identities."""

    def operate(self: Any, other: Any) -> Any:
        is_number = isinstance(other, (numbers.Number, np.number, np.ndarray))
        if isinstance(other, bool) or not (is_number or tf.is_tensor(other)):
            return NotImplemented  # Python asks `other`, then compares identities
        return compare(_compared(self), other)

    return operate


class ReadsAsNumber:
    """Lets you compute with an object whose `__call__` returns a `float32` scalar.

    Operators convert it to a tensor, in eager mode and in a graph, so that an optimizer
    can trace their results back to the loss scale. `float`, `int` and NumPy get a
    number. In a graph there is none, and TensorFlow raises an error.
    """

    _noted_by: Optional[Listener]
    #: Higher than NumPy's, so that NumPy uses our operators. A graph can trace those.
    __array_priority__ = 100

    def _value(self) -> Any:
        """Returns the same as `__call__`, but the listener does not learn of it.

        That is the number, a `float32` tensor of shape `[]`.
        """
        raise NotImplementedError  # a loss scale's own `__call__` takes its place

    def _read_as_number(self, as_type: Callable[[Any], _Number]) -> _Number:
        """Returns the number as `as_type` converts it, and tells the listener."""
        number = as_type(self._value())
        if self._noted_by is not None:
            self._noted_by.note_float()
        return number

    def _to_show(self) -> float:
        """Returns the number for display. Compute nothing with it."""
        return float(self._value())

    def numpy(self) -> Any:
        """Returns the current loss scale as a NumPy `float32`. Eager mode only."""
        return self._read_as_number(lambda tensor: tensor.numpy())

    @property
    def __array_interface__(self) -> Dict[str, Any]:
        # Not `__array__`: tf.function would take an argument that has it for an array,
        # and make a constant of it (seen on 2.4 to 2.21).
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

    # Two loss scales of equal value are different keys of a dictionary.
    __hash__ = object.__hash__
    __eq__ = _if_number(tf.equal)
    __ne__ = _if_number(tf.not_equal)
    __lt__ = _order("__lt__")
    __le__ = _order("__le__")
    __gt__ = _order("__gt__")
    __ge__ = _order("__ge__")
    __neg__ = _as_tensor("__neg__")
    __abs__ = _as_tensor("__abs__")
    __add__ = _as_tensor("__add__")
    __radd__ = _as_tensor("__radd__")
    __sub__ = _as_tensor("__sub__")
    __rsub__ = _as_tensor("__rsub__")
    __mul__ = _as_tensor("__mul__")
    __rmul__ = _as_tensor("__rmul__")
    __truediv__ = _as_tensor("__truediv__")
    __rtruediv__ = _as_tensor("__rtruediv__")
    __floordiv__ = _as_tensor("__floordiv__")
    __rfloordiv__ = _as_tensor("__rfloordiv__")
    __mod__ = _as_tensor("__mod__")
    __rmod__ = _as_tensor("__rmod__")
    __pow__ = _as_tensor("__pow__")
    __rpow__ = _as_tensor("__rpow__")

    def __pos__(self) -> Any:
        return tf.convert_to_tensor(self)
