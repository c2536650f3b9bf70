"""Attributes of the wrapper that are the inner optimizer's."""

from __future__ import annotations

from typing import Any, List


def forwarded(name: str) -> Any:
    """Returns a property that reads and sets the inner optimizer's attribute `name`."""

    def get_value(self: Any) -> Any:
        return getattr(self.inner_optimizer, name)

    def set_value(self: Any, value: Any) -> None:
        # Keras 3's base constructor sets its defaults before there is an inner one.
        if hasattr(self, "inner_optimizer"):
            setattr(self.inner_optimizer, name, value)

    return property(get_value, set_value, doc=f"The inner optimizer's `{name}`.")


class RefusesInnerSettings:
    """Setting what only the inner optimizer has is an error, not a lost setting."""

    def __setattr__(self, name: str, value: Any) -> None:
        inner = getattr(self, "inner_optimizer", None)
        is_ours = name.startswith("_") or hasattr(self, name)
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
