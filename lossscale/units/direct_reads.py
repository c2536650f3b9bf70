"""Variables that an operation of eager mode is given itself, as `tf.negative(v)` is.

TensorFlow reads them on the way to the operation and tells nobody: what comes in is a
tensor that no operation returned. It is known by what it holds, bit for bit.
"""

from __future__ import annotations

import weakref
from typing import Any, Dict, Optional

import tensorflow as tf

from lossscale.runtime.aliases import Tensor
from lossscale.runtime.callbacks import held_by, key_of
from lossscale.units.unit import Unit


class DirectReads:
    """Which variables hold gradients, and whether a tensor was read from one of them.

    Not of those that hold one number, which may be any.
    """

    def __init__(self) -> None:
        #: Weak references to handles, by their keys.
        self._handles: Dict[int, Any] = {}
        self._newest = 0

    def __bool__(self) -> bool:
        return bool(self._handles)

    def note(self, handle: Any, unit: Optional[Unit]) -> None:
        """Remembers a variable by its handle, if a gradient is in it now."""
        key = key_of(handle)
        if unit is None or unit.is_scale or unit.is_trained:
            self._handles.pop(key, None)
        elif key not in self._handles:
            self._handles[key] = weakref.ref(
                handle, lambda _: self._handles.pop(key, None)
            )

    def heard(self, outputs: Any) -> None:
        """Is told of what an operation returned: what is older was not read since."""
        if outputs:
            self._newest = key_of(outputs[-1])

    def variable_of(self, tensor: Tensor) -> Optional[int]:
        """Returns the key of the variable that a tensor was read from."""
        if key_of(tensor) <= self._newest or not tensor.shape.rank:
            return None
        for key, reference in list(self._handles.items()):
            handle = reference()
            if handle is not None and _holds(handle, tensor):
                return key
        return None


def _holds(handle: Any, tensor: Tensor) -> bool:
    dtype, shape = held_by(handle)
    if tensor.dtype != dtype or tensor.shape != shape:
        return False
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tensor.dtype)
    return bool(value.numpy().tobytes() == tensor.numpy().tobytes())
