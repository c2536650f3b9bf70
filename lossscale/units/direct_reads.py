"""Variables that eager mode hands to an operation itself, as in `tf.negative(v)`.

TensorFlow reads such a variable on the way to the operation and tells nobody. The
operation's input is then a tensor that no operation returned. We recognize the variable
by its value: it equals the tensor, bit for bit.
"""

from __future__ import annotations

import weakref
from typing import Dict, Optional

import tensorflow as tf

from lossscale.runtime.aliases import Handle, Tensor, Tensors
from lossscale.runtime.callbacks import held_by, key_of
from lossscale.units.unit import Unit


class DirectReads:
    """Which variables hold gradients, and whether a tensor was read from one of them.

    Variables that hold a single number are left out: equal numbers prove nothing.
    """

    def __init__(self) -> None:
        #: Weak references to handles, by their keys.
        self._handles: Dict[int, weakref.ref[Handle]] = {}
        self._newest = 0

    def __bool__(self) -> bool:
        return bool(self._handles)

    def note(self, handle: Handle, unit: Optional[Unit]) -> None:
        """Remembers a variable by its handle, if it holds a gradient now.

        Args:
          handle: The handle.
          unit: The unit of what the variable holds.
        """
        key = key_of(handle)
        if unit is None or unit.is_scale or unit.is_trained:
            self._handles.pop(key, None)
        elif key not in self._handles:
            self._handles[key] = weakref.ref(
                handle, lambda _: self._handles.pop(key, None)
            )

    def heard(self, outputs: Tensors) -> None:
        """Notes an operation's results: no older tensor was read after it."""
        if outputs:
            self._newest = key_of(outputs[-1])

    def variable_of(self, tensor: Tensor) -> Optional[int]:
        """Returns the key of the variable that a tensor was read from, or None."""
        if key_of(tensor) <= self._newest or not tensor.shape.rank:
            return None
        for key, reference in list(self._handles.items()):
            handle = reference()
            if handle is not None and _holds(handle, tensor):
                return key
        return None


def _holds(handle: Handle, tensor: Tensor) -> bool:
    held = held_by(handle)
    if held is None or tensor.dtype != held[0] or tensor.shape != held[1]:
        return False
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tensor.dtype)
    return bool(value.numpy().tobytes() == tensor.numpy().tobytes())
