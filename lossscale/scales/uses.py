"""How a loss scale is used: what it reports of that, and what others ask of it."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional, Protocol

import tensorflow as tf

from lossscale.gradients import arithmetic
from lossscale.runtime.aliases import Grads, Scalar, Tensor
from lossscale.scales.adjustment import chain
from lossscale.scales.checks import LossScale


class Product(NamedTuple):
    """A loss that was multiplied by a loss scale.

    `factor` is `loss_scale` in the dtype in which it multiplied the loss. None: a
    subclass multiplied in its own way. `product` is the scaled loss.
    """

    loss: Tensor
    loss_scale: Scalar
    factor: Optional[Scalar]
    product: Tensor


class Observer(Protocol):
    """A loss scale ("it") reports each use to the optimizers that share it."""

    def note_read(self, tensor: Scalar) -> None:
        """A program read it as a tensor, perhaps to multiply a loss or to unscale."""

    def note_float(self) -> None:
        """A program read it as a Python number. No graph shows where that goes."""

    def note_loss(self, product: Product, owner: Any) -> None:
        """A loss was multiplied by it, for an optimizer. None: by `scale` itself."""

    def note_unscaled_by(self, grads: Grads, divisor: Scalar) -> None:
        """Gradients were divided by a tensor of it, without a check."""

    def note_restored(self) -> None:
        """A checkpoint is about to set its variables, in eager mode."""


def observer_of(loss_scale: LossScale, make: Callable[[LossScale], Any]) -> Any:
    """Returns the observer of a loss scale, one for all optimizers that share it."""
    if loss_scale._observer is None:
        loss_scale._observer = make(loss_scale)
    return loss_scale._observer


def scale_for(loss_scale: LossScale, loss: Tensor, owner: Any) -> Any:
    """Returns the scaled loss, and reports it to the observer."""
    value, observer = loss_scale._value(), loss_scale._observer
    if owner is not None and "scale" in loss_scale._overridden:
        product = Product(loss, value, None, loss_scale.scale(loss))
    elif "scale_by" in loss_scale._overridden:
        product = Product(loss, value, None, loss_scale.scale_by(loss, value))
    else:
        wide = arithmetic.widened(loss)
        factor = tf.cast(value, wide.dtype)
        product = Product(loss, value, factor, arithmetic.multiply(wide, factor))
    loss_scale.__dict__.update(has_scaled=True)
    if observer is not None:
        observer.note_loss(product, owner)
    return product.product


def multiplies_itself(loss_scale: LossScale) -> bool:
    """Whether a subclass multiplies losses in its own way."""
    return bool(loss_scale._overridden & {"scale", "scale_by"})


def value_of(loss_scale: LossScale) -> Scalar:
    """Returns the current loss scale, a `float32` tensor, and reports no read."""
    return loss_scale._value()


def shown_value(loss_scale: LossScale) -> float:
    """Returns the current loss scale for display. Compute nothing with it."""
    return float(loss_scale._to_show())


def can_change(loss_scale: LossScale) -> bool:
    """Whether a step can change the value."""
    is_its_own = "_value" in loss_scale._overridden
    return bool((loss_scale if is_its_own else unguarded(loss_scale))._can_change)


def was_used(loss_scale: LossScale) -> bool:
    """Whether anybody has scaled a loss by it, or read it as a tensor."""
    return bool(loss_scale.has_scaled or loss_scale.has_been_read)


def takes_the_flag(loss_scale: LossScale) -> bool:
    """Whether it is adjusted by the flag, not in an `update` of its own."""
    return "update" not in loss_scale._overridden


def unguarded(loss_scale: LossScale) -> LossScale:
    """Returns the innermost loss scale of the chain: itself if it holds none."""
    return chain(loss_scale)[-1]


def guard_of(loss_scale: LossScale) -> Any:
    """Returns the `SpikeGuard` in the chain, perhaps the loss scale itself, or None."""
    return next((member for member in chain(loss_scale) if member.skips_spikes), None)
