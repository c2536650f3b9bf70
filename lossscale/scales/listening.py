"""Observer: a loss scale reports each use to the optimizers that share it.

`LossScale` calls a `Listener` if it has one. Optimizers that share the loss scale set
it: `optimizer/provenance/history.py`. Without an optimizer there is none.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Protocol

import tensorflow as tf

from lossscale.runtime.aliases import Grads, Scalar, Tensor


class Listener(Protocol):
    """What a loss scale tells of its use."""

    def note_read(self, tensor: Tensor) -> None:
        """It was read as a tensor, which may multiply a loss or divide gradients."""

    def note_float(self) -> None:
        """It was read as a Python number. What is computed from it, no graph shows."""

    def note_loss(self, loss: Tensor, loss_scale: Any) -> None:
        """A loss is multiplied with a tensor of it."""

    def note_unscaled_by(self, grads: Grads, scaled: Grads, divisor: Scalar) -> None:
        """Gradients were divided by a tensor of it, and not checked."""


def telling(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a subclass's `__call__` that tells who asked that the value was read."""

    @functools.wraps(compute)
    def __call__(self: Any) -> Any:  # noqa: N807 - it is one
        value = compute(self)
        self.has_been_read = True
        if self._noted_by is not None and tf.is_tensor(value):
            self._noted_by.note_read(value)
        return value

    return __call__


def to_tensor(
    value: Any, dtype: Any = None, name: Any = None, as_ref: bool = False
) -> Any:
    """Converts a loss scale to a tensor, for `tf.convert_to_tensor`."""
    del as_ref  # part of the signature that TensorFlow calls
    current = tf.identity(value._value(), name)
    value.has_been_read = True
    if value._noted_by is not None:
        value._noted_by.note_read(current)
    if dtype is not None and not dtype.is_compatible_with(current.dtype):
        # Not NotImplemented: TensorFlow would make a constant of it, through NumPy.
        raise ValueError(f"`dtype` of a loss scale must be float32, got {dtype.name}.")
    return current
