"""Loss scales from identifiers and configs, and configs from loss scales."""

from __future__ import annotations

import inspect
import numbers
from typing import Any, Dict, Optional

from lossscale import presets
from lossscale.arguments import shown
from lossscale.runtime import registry
from lossscale.scales import tensorflows
from lossscale.scales.base import LossScale
from lossscale.scales.dynamic import DynamicLossScale
from lossscale.scales.fixed import FixedLossScale
from lossscale.scales.managers import LossScaleManager

_FROM_CONFIG = LossScale.from_config.__func__  # type: ignore[attr-defined]


def get(identifier: Any) -> Optional[LossScale]:
    """Returns the loss scale that `identifier` stands for.

    >>> float(get(128))
    128.0
    >>> float(get("dynamic"))
    32768.0
    >>> float(get("torch"))
    65536.0

    Args:
      identifier: A number, for a `FixedLossScale`; `"dynamic"`, for a
        `DynamicLossScale` with its defaults; the name of a preset, for
        `DynamicLossScale.from_preset`; a config, as `serialize` makes it; a
        `LossScale` or a `LossScaleManager`; TensorFlow's own `FixedLossScale` or
        `DynamicLossScale`, with its state; or None.

    Returns:
      A `LossScale`, or None for None.

    Raises:
      TypeError: `identifier` is none of these, or a preset that asks for arguments.
      ValueError: `identifier` is out of a loss scale's range, or an unknown name.
    """
    if identifier is None or isinstance(identifier, LossScale):
        return identifier
    if isinstance(identifier, LossScaleManager):
        return identifier.as_loss_scale()
    if isinstance(identifier, dict):
        return deserialize(identifier)
    if isinstance(identifier, str):
        if identifier in presets.PRESETS:
            return DynamicLossScale.from_preset(identifier)
        listed = ", ".join(map(repr, sorted(presets.PRESETS)))
        raise ValueError(
            f"`loss_scale` must be one of the names {listed}, got {identifier!r}."
        )
    if isinstance(identifier, numbers.Real) and not isinstance(identifier, bool):
        return FixedLossScale(identifier)  # type: ignore[arg-type]
    ours = tensorflows.as_ours(identifier)
    if ours is not None:
        return ours
    raise TypeError(
        "`loss_scale` must be a number, a preset's name, a config, a LossScale or a "
        f"LossScaleManager, got {shown(identifier)} of type "
        f"{type(identifier).__name__}."
    )


def serialize(loss_scale: LossScale) -> Dict[str, Any]:
    """Returns a config that JSON can hold, and `deserialize` turns into a loss scale.

    Args:
      loss_scale: A `LossScale`. The config does not hold its state; a checkpoint holds
        that.

    Returns:
      `{"class_name": ..., "config": ...}`.

    Raises:
      TypeError: `loss_scale` is not a `LossScale`.
    """
    if not isinstance(loss_scale, LossScale):
        raise TypeError(f"`loss_scale` must be a LossScale, got {shown(loss_scale)}.")
    name = registry.registered_name(type(loss_scale))
    return {"class_name": name, "config": loss_scale.get_config()}


def deserialize(
    config: Dict[str, Any], custom_objects: Optional[Dict[str, Any]] = None
) -> LossScale:
    """Returns a new loss scale from `serialize`'s config.

    Args:
      config: `{"class_name": ..., "config": ...}`, or Keras's own form of it.
      custom_objects: Your own classes by name. Not needed for classes registered with
        `keras.saving.register_keras_serializable`.

    Returns:
      A `LossScale` in its initial state.

    Raises:
      TypeError: `config` is not such a dict.
      ValueError: The class is unknown, or its arguments are wrong.
    """
    if not isinstance(config, dict) or not isinstance(config.get("class_name"), str):
        raise TypeError(
            '`config` must be a dict with the keys "class_name" and "config", got '
            f"{shown(config)}. lossscale.serialize makes one."
        )
    name = config.get("registered_name")
    name = name if name and isinstance(name, str) else config["class_name"]
    cls = (custom_objects or {}).get(name)
    cls = cls or registry.registered_class(name, custom_objects)
    if not (isinstance(cls, type) and issubclass(cls, LossScale)):
        raise ValueError(
            f"`config` must name a LossScale class that is registered, got {name!r}. "
            "Pass custom_objects={...}, or register the class with "
            "keras.saving.register_keras_serializable()."
        )
    given = {} if config.get("config") is None else config["config"]
    if not isinstance(given, dict):
        raise TypeError(
            f'`config["config"]` must be a dict of the arguments of {name}, got '
            f"{shown(given)}."
        )
    _check_signature(cls, given)
    return cls.from_config(
        {name: _built(value, custom_objects) for name, value in given.items()}
    )


def _built(argument: Any, custom_objects: Optional[Dict[str, Any]]) -> Any:
    """Returns a loss scale if the argument is the config of one, else the argument."""
    if isinstance(argument, dict) and {"class_name", "config"} <= set(argument):
        return deserialize(argument, custom_objects)
    return argument


def _check_signature(cls: Any, given: Dict[Any, Any]) -> None:
    """Raises unless the constructor takes these arguments."""
    if getattr(cls.from_config, "__func__", None) is not _FROM_CONFIG:
        return  # the user's class reads its config in its own way
    try:
        inspect.signature(cls).bind(**given)
    except TypeError as error:
        raise TypeError(
            f'`config["config"]` must hold the arguments of {cls.__name__}, got '
            f"{shown(given)}: {error}."
        ) from error
