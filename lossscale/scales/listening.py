"""Observer: a loss scale reports each use to the optimizers that share it.

`LossScale` calls its `Listener`, if it has one. Optimizers that share the loss scale
set it (`optimizer/provenance/history.py`). Without an optimizer there is none.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Protocol

import tensorflow as tf

from lossscale.runtime.aliases import Grads, Scalar, Tensor


class Listener(Protocol):
    """Its methods are called at each use of a loss scale, "it" below."""

    def note_read(self, tensor: Tensor) -> None:
        """A program read it as a tensor, perhaps to multiply a loss or to unscale."""

    def note_float(self) -> None:
        """A program read it as a Python number. No graph shows where that goes."""

    def note_loss(self, loss: Tensor, loss_scale: Any) -> None:
        """A loss is multiplied by `loss_scale`, a tensor of it."""

    def note_unscaled_by(self, grads: Grads, scaled: Grads, divisor: Scalar) -> None:
        """`grads` are `scaled` divided by a tensor of it, without a check."""


def telling(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a subclass's `__call__` so that the listener learns of each read."""

    @functools.wraps(compute)
    def __call__(self: Any) -> Any:  # noqa: N807 - it becomes a class's `__call__`
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
    del as_ref  # TensorFlow passes it
    current = tf.identity(value._value(), name)
    value.has_been_read = True
    if value._noted_by is not None:
        value._noted_by.note_read(current)
    if dtype is not None and not dtype.is_compatible_with(current.dtype):
        # If this returned NotImplemented, TensorFlow would make a constant with NumPy.
        raise ValueError(f"`dtype` of a loss scale must be float32, got {dtype.name}.")
    return current
