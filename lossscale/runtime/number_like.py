"""NumberLike: an object that is used like its number, as `2 * x` or `x > 1e9`."""

from __future__ import annotations

import numbers
from typing import Any, Callable, Dict, Optional

import numpy as np
import tensorflow as tf

from lossscale.runtime.aliases import Tensor


class _Operator:
    """An operator of a tensor. It takes its name from where it stands in a class."""

    def __init__(self, as_tensor: Callable[[Any], Tensor]) -> None:
        self._as_tensor = as_tensor

    def __set_name__(self, owner: type, name: str) -> None:
        def operate(number_like: NumberLike, *others: Any) -> Tensor:
            return getattr(self._as_tensor(number_like), name)(*others)

        operate.__name__ = name
        setattr(owner, name, operate)

    def __call__(self, *others: Any) -> Tensor:  # what type checkers see
        raise NotImplementedError("An operator must be called through its object.")


class NumberLike:
    """Operators and TensorFlow get a tensor from it, Python and NumPy a number."""

    #: Higher than NumPy's, so that NumPy uses our operators. A graph can trace those.
    __array_priority__ = 100

    def _value(self) -> Tensor:
        """Returns the number, a tensor of shape `[]`, for a comparison."""
        raise NotImplementedError(f"{type(self).__name__} must implement `_value`.")

    def _note_read(self, value: Tensor) -> Tensor:
        """Returns `value`, of which a program computes something."""
        raise NotImplementedError(f"{type(self).__name__} must implement `_note_read`.")

    def _to_show(self) -> float:
        return float(self._value())

    def __float__(self) -> float:
        return self._to_show()

    def __int__(self) -> int:
        return int(float(self))

    __trunc__ = __int__

    def __round__(self, digits: Optional[int] = None) -> Any:
        return round(float(self), digits)

    def __bool__(self) -> bool:
        return True  # it is never 0, so the value need not be read

    def __format__(self, spec: str) -> str:
        return format(self._to_show(), spec) if spec else str(self)

    def numpy(self) -> Any:
        """Returns the number as a NumPy `float32`. Eager mode only."""
        return np.float32(float(self))

    @property
    def __array_interface__(self) -> Dict[str, Any]:
        # Not `__array__`: tf.function would take an argument that has it for an array,
        # and make a constant of it.
        number = self.numpy()
        data, kind = number.tobytes(), number.dtype.str
        return {"version": 3, "shape": (), "typestr": kind, "data": data}

    def __pos__(self) -> Tensor:
        return tf.convert_to_tensor(self)  # a tensor itself has no such operator

    __neg__ = __abs__ = _Operator(tf.convert_to_tensor)
    __add__ = __sub__ = __mul__ = __truediv__ = _Operator(tf.convert_to_tensor)
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = _Operator(tf.convert_to_tensor)
    __floordiv__ = __mod__ = __pow__ = _Operator(tf.convert_to_tensor)
    __rfloordiv__ = __rmod__ = __rpow__ = _Operator(tf.convert_to_tensor)
    __lt__ = __le__ = __gt__ = __ge__ = _Operator(lambda one: one._value())

    # Two objects of equal value are different keys of a dictionary.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return tf.equal(self._value(), other) if _is_number(other) else NotImplemented

    def __ne__(self, other: object) -> Any:
        if not _is_number(other):
            return NotImplemented
        return tf.not_equal(self._value(), other)


def _is_number(other: object) -> bool:
    """Whether Python compares values, and not identities."""
    is_number = isinstance(other, (numbers.Number, np.ndarray))
    return (is_number and not isinstance(other, bool)) or bool(tf.is_tensor(other))


def _to_tensor(
    one: NumberLike, dtype: Any = None, name: Any = None, as_ref: bool = False
) -> Tensor:
    del as_ref  # TensorFlow passes it
    current = one._note_read(tf.identity(one._value(), name))
    if dtype is not None and not dtype.is_compatible_with(current.dtype):
        # If this returned NotImplemented, TensorFlow would make a constant with NumPy.
        raise ValueError(f"`dtype` of a loss scale must be float32, got {dtype.name}.")
    return current


# Code written for Keras 2 reads `optimizer.loss_scale` as a tensor.
tf.register_tensor_conversion_function(NumberLike, _to_tensor)
