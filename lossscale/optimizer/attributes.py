"""Attributes of a wrapper that the inner optimizer or the loss scale holds."""

from __future__ import annotations

from typing import Any, Callable

from lossscale.arguments import shown
from lossscale.scales.uses import unguarded


def forwarded(name: str) -> Any:
    """Returns a property that reads and sets the inner optimizer's attribute `name`."""

    def get_value(self: Any) -> Any:
        return getattr(self.inner_optimizer, name)

    def set_value(self: Any, value: Any) -> None:
        # Keras 3's constructor sets its defaults before `inner_optimizer` exists.
        if hasattr(self, "inner_optimizer"):
            setattr(self.inner_optimizer, name, value)

    return property(get_value, set_value, doc=f"The inner optimizer's `{name}`.")


def delegated(name: str) -> Callable[..., Any]:
    """Returns a method that calls the inner optimizer's method `name`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner_optimizer, name)(*args, **kwargs)

    call.__name__, call.__doc__ = name, f"Calls the inner optimizer's `{name}`."
    return call


def answered(*names: str, doc: str = "") -> Any:
    """Returns a property: the first of these attributes that the loss scale has."""
    doc = doc or f"The loss scale's `{'` or `'.join(names)}`, None if it has none."

    def get_value(self: Any) -> Any:
        scale = unguarded(self.loss_scale)
        values = (getattr(scale, name, None) for name in names)
        return next((value for value in values if value is not None), None)

    def refuse(self: Any, value: Any) -> None:
        # Keras 3's constructor sets its defaults before the loss scale exists.
        if hasattr(self, "_engine"):
            raise AttributeError(
                "The loss scale's settings must be arguments of LossScaleOptimizer, "
                f"got {shown(value)} for an attribute. Write LossScaleOptimizer("
                "inner_optimizer, DynamicLossScale(...)), or, to set the value, "
                "optimizer.loss_scale.current_loss_scale.assign(...)."
            )

    return property(get_value, refuse, doc=doc)
