"""Attributes that the wrapper takes from the inner optimizer or from the loss scale."""

from __future__ import annotations

from typing import Any, Callable, List

from lossscale.runtime.aliases import Tensor
from lossscale.scales.base import LossScale


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


def _answered(answer: Callable[[LossScale], Any], doc: str) -> Any:
    """Returns a property whose value `answer` reads from the loss scale."""

    def get_value(self: Any) -> Any:
        return answer(self._loss_scale)

    def refuse(self: Any, value: Any) -> None:
        # Keras 3's constructor sets its defaults before the loss scale exists.
        if hasattr(self, "_loss_scale"):
            raise AttributeError(
                "The loss scale's settings must be arguments of LossScaleOptimizer, "
                f"got {value!r} for an attribute. Write LossScaleOptimizer("
                "inner_optimizer, DynamicLossScale(...)). To set the value of an "
                "existing loss scale, write "
                "optimizer.loss_scale.current_loss_scale.assign(...)."
            )

    return property(get_value, refuse, doc=doc)


def _attribute(*names: str) -> Callable[[LossScale], Any]:
    """Returns a function that reads the first of these attributes that exists."""
    return lambda scale: next(
        (getattr(scale, n) for n in names if hasattr(scale, n)), None
    )


class KerasNames:
    """What the wrappers of both Kerases call the attributes of a loss scale."""

    #: Keras 3's name of `get_scaled_loss`.
    scale_loss: Callable[[Tensor], Any]

    dynamic = _answered(
        lambda scale: scale._can_change,
        "Whether the loss scale can change.",
    )
    initial_scale = _answered(
        _attribute("initial_loss_scale", "loss_scale_value"),
        "The loss scale's initial value, None if the loss scale has no such attribute.",
    )
    dynamic_growth_steps = _answered(
        _attribute("increment_period"),
        "After how many finite steps the loss scale grows, None without such a rule.",
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
    """Refuses to set on the wrapper an attribute that only the inner optimizer has.

    Without the error, the setting would have no effect.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        inner = getattr(self, "inner_optimizer", None)
        # Ask the class first: reading a legacy optimizer's `iterations` creates it.
        is_ours = name.startswith("_") or hasattr(type(self), name)
        is_ours = is_ours or hasattr(self, name)
        if not is_ours and hasattr(inner, name):
            raise AttributeError(
                f"`{name}` must be set on the inner optimizer, got {value!r} for the "
                f"wrapper. Write optimizer.inner_optimizer.{name} = ..."
            )
        super().__setattr__(name, value)


class CallableList(List[Any]):
    """A list that can be called, since `variables` was a method in older versions."""

    def __call__(self) -> List[Any]:
        return self
