"""Attributes of the wrapper that are the inner optimizer's, or the loss scale's."""

from __future__ import annotations

from typing import Any, Callable, List

from lossscale.runtime.aliases import Tensor
from lossscale.scales.base import LossScale


def forwarded(name: str) -> Any:
    """Returns a property that reads and sets the inner optimizer's attribute `name`."""

    def get_value(self: Any) -> Any:
        return getattr(self.inner_optimizer, name)

    def set_value(self: Any, value: Any) -> None:
        # Keras 3's base constructor sets its defaults before there is an inner one.
        if hasattr(self, "inner_optimizer"):
            setattr(self.inner_optimizer, name, value)

    return property(get_value, set_value, doc=f"The inner optimizer's `{name}`.")


def delegated(name: str) -> Callable[..., Any]:
    """Returns a method that calls the inner optimizer's method `name`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner_optimizer, name)(*args, **kwargs)

    call.__name__, call.__doc__ = name, f"Calls the inner optimizer's `{name}`."
    return call


def _answered(answer: Callable[[LossScale], Any], doc: str) -> Any:
    """Returns a property that the loss scale answers."""

    def get_value(self: Any) -> Any:
        return answer(self._loss_scale)

    def refuse(self: Any, value: Any) -> None:
        # Keras 3's constructor sets its defaults before there is a loss scale.
        if hasattr(self, "_loss_scale"):
            raise AttributeError(
                "What the loss scale does must be an argument of LossScaleOptimizer, "
                f"got {value!r} for an attribute. Write LossScaleOptimizer("
                "inner_optimizer, DynamicLossScale(...)); to move a loss scale that "
                "is there, optimizer.loss_scale.current_loss_scale.assign(...)."
            )

    return property(get_value, refuse, doc=doc)


def _attribute(*names: str) -> Callable[[LossScale], Any]:
    """Returns what gives the first of these attributes that there is, else None."""
    return lambda scale: next(
        (getattr(scale, n) for n in names if hasattr(scale, n)), None
    )


class KerasNames:
    """What the wrappers of both Kerases call what our loss scales know."""

    #: What Keras 3 calls what Keras 2 calls `get_scaled_loss`.
    scale_loss: Callable[[Any], Any]

    dynamic = _answered(
        lambda scale: scale._can_change,
        "Whether the loss scale can change.",
    )
    initial_scale = _answered(
        _attribute("initial_loss_scale", "loss_scale_value"),
        "The loss scale's initial value, None if it does not tell.",
    )
    dynamic_growth_steps = _answered(
        _attribute("increment_period"),
        "After how many finite steps it grows, None if it does not tell.",
    )
    dynamic_counter = _answered(
        _attribute("good_steps"),
        "The variable that counts finite steps in a row, None if there is none.",
    )
    step_counter = _answered(
        _attribute("good_steps"), "Keras 3's name of `dynamic_counter`."
    )
    dynamic_scale = _answered(
        _attribute("current_loss_scale"),
        "The variable that holds the loss scale, None if there is none.",
    )

    def get_scaled_loss(self, loss: Tensor) -> Any:
        """Like `scale_loss`. Keras 2's name."""
        return self.scale_loss(loss)


class RefusesInnerSettings:
    """Setting what only the inner optimizer has is an error, not a lost setting."""

    def __setattr__(self, name: str, value: Any) -> None:
        inner = getattr(self, "inner_optimizer", None)
        # The class first: to ask a legacy optimizer for `iterations` creates them.
        is_ours = name.startswith("_") or hasattr(type(self), name)
        is_ours = is_ours or hasattr(self, name)
        if not is_ours and hasattr(inner, name):
            raise AttributeError(
                f"`{name}` must be set on the inner optimizer, got {value!r} for the "
                f"wrapper. Write optimizer.inner_optimizer.{name} = ..."
            )
        super().__setattr__(name, value)


class CallableList(List[Any]):
    """A list that may be called: `variables` was a method once."""

    def __call__(self) -> List[Any]:
        return self
