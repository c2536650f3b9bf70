"""Loss scales from identifiers and configs, and configs from loss scales."""

from __future__ import annotations

import numbers
from typing import Any, Dict, Optional

import tensorflow as tf

from lossscale import arguments, presets
from lossscale.arguments import shown
from lossscale.runtime import mode, registry
from lossscale.scales.base import LossScale
from lossscale.scales.dynamic import DynamicLossScale
from lossscale.scales.fixed import FixedLossScale
from lossscale.scales.guard import Guard
from lossscale.scales.variables import HasVariables

_NO_LOSS_SCALE = """\
`loss_scale` must be a loss scale, got a {0}, which is a guard and holds none. Write \
LossScaleOptimizer(inner_optimizer, "dynamic", guard={0}(...)); for bfloat16 and \
float32, 1 in place of "dynamic"."""


def get(identifier: Any) -> Optional[LossScale]:
    """Returns the loss scale that `identifier` stands for.

    Arguments called `loss_scale` are read by it: they may be a number or a name, too.

    >>> float(get(128))
    128.0
    >>> float(get("torch"))
    65536.0

    Args:
      identifier: A number, for a `FixedLossScale`; the name of a preset, such as
        `"dynamic"`, for `DynamicLossScale.from_preset`; a config, as `serialize` makes
        it; a `LossScale` or a `LossScaleManager`; TensorFlow's own `FixedLossScale` or
        `DynamicLossScale`, with its state, which only eager mode can read; or None.

    Returns:
      A `LossScale`, or None for None.

    Raises:
      TypeError: `identifier` is none of these, or a preset that asks for arguments.
      ValueError: `identifier` is out of a loss scale's range, or an unknown name.
    """
    if identifier is None or isinstance(identifier, LossScale):
        return identifier
    as_loss_scale = getattr(identifier, "as_loss_scale", None)
    if as_loss_scale is not None:  # a LossScaleManager
        loss_scale: LossScale = as_loss_scale()
        return loss_scale
    if isinstance(identifier, dict):
        return get(_deserialized("loss_scale", identifier))
    if isinstance(identifier, str):
        return DynamicLossScale.from_preset(
            presets.preset_name("loss_scale", identifier)
        )
    if isinstance(identifier, numbers.Real) and not isinstance(identifier, bool):
        return FixedLossScale(arguments.loss_scale("loss_scale", identifier))
    ours = _as_ours(identifier)
    if ours is not None:
        return ours
    if isinstance(identifier, Guard):
        raise TypeError(_NO_LOSS_SCALE.format(type(identifier).__name__))
    raise TypeError(
        "`loss_scale` must be a number, a preset's name, a config, a LossScale or a "
        f"LossScaleManager, got {arguments.typed(identifier)}."
    )


def get_checked(identifier: Any, guard: Optional[Guard]) -> Optional[LossScale]:
    """Returns what `get` does. With a guard, a number means that steps are checked."""
    loss_scale = get(identifier)
    if guard is not None and isinstance(identifier, numbers.Real):
        return FixedLossScale(float(identifier), skip_nonfinite=True)
    if guard is not None and loss_scale is not None:
        check_it_checks(loss_scale, "a guard")
    return loss_scale


def check_it_checks(loss_scale: LossScale, what: str) -> None:
    """Raises if a loss scale is used with what needs checked gradients."""
    if not loss_scale.checks_gradients:
        raise ValueError(
            f"`loss_scale` must be one that checks gradients with {what}, got a "
            f"{type(loss_scale).__name__} that checks none, so that every step is "
            "applied. Write FixedLossScale(..., skip_nonfinite=True)."
        )


def get_guard(identifier: Any) -> Optional[Guard]:
    """Returns the guard that an argument called `guard` stands for."""
    if isinstance(identifier, dict):
        identifier = _deserialized("guard", identifier)
    if identifier is None or isinstance(identifier, Guard):
        return identifier
    raise TypeError(
        "`guard` must be a lossscale.Guard, such as SpikeGuard(), or None, got "
        f"{arguments.typed(identifier)}. Pass an object, not its class."
    )


def serialize(loss_scale: HasVariables) -> Dict[str, Any]:
    """Returns a config that JSON can hold, and `deserialize` turns into a loss scale.

    Args:
      loss_scale: A `LossScale` or a `Guard`. The config holds its arguments, not its
        state.

    Returns:
      `{"class_name": ..., "config": ...}`.

    Raises:
      TypeError: `loss_scale` is not a `LossScale`.
      NotImplementedError: It is of a `LossScaleManager` of your own, or has no config
        for another reason.
    """
    if not isinstance(loss_scale, HasVariables):
        raise TypeError(f"`loss_scale` must be a LossScale, got {shown(loss_scale)}.")
    name = registry.registered_name(type(loss_scale))
    return {"class_name": name, "config": loss_scale.get_config()}


def deserialize(
    config: Dict[str, Any], custom_objects: Optional[Dict[str, Any]] = None
) -> Any:
    """Returns a new loss scale from `serialize`'s config.

    Args:
      config: `{"class_name": ..., "config": ...}`, or Keras's own form of it.
      custom_objects: A dict of your own classes by name, unless you registered them
        with `keras.saving.register_keras_serializable`.

    Returns:
      A `LossScale`, or a `Guard`, in its initial state.

    Raises:
      TypeError: `config` is not such a dict, or an argument is unknown or of a wrong
        type.
      ValueError: The class is unknown, or an argument is out of range.
    """
    return _deserialized("config", config, custom_objects)


def _deserialized(
    argument: str, config: Any, custom_objects: Optional[Dict[str, Any]] = None
) -> Any:
    """Like `deserialize`, but `argument` is what errors call the config."""
    if not isinstance(config, dict) or not isinstance(config.get("class_name"), str):
        raise TypeError(
            f'`{argument}` must be a dict with the keys "class_name" and "config", got '
            f"{shown(config)}. lossscale.serialize makes one."
        )
    name = config.get("registered_name")
    name = name if name and isinstance(name, str) else config["class_name"]
    cls = (custom_objects or {}).get(name)
    cls = cls or registry.registered_class(name, custom_objects)
    if not (isinstance(cls, type) and issubclass(cls, HasVariables)):
        ours = [*LossScale.__subclasses__(), *Guard.__subclasses__()]
        names = [subclass.__name__ for subclass in ours]
        near = arguments.did_you_mean(name, {*names, *(custom_objects or {})} - {name})
        raise ValueError(
            f"`{argument}` must name a LossScale class that is registered, got "
            f"{name!r}.{near} Pass custom_objects={{...}}, or register the class with "
            "keras.saving.register_keras_serializable()."
        )
    settings = {} if config.get("config") is None else config["config"]
    if not isinstance(settings, dict):
        raise TypeError(
            f'`{argument}["config"]` must be a dict of the arguments of {name}, got '
            f"{shown(settings)}."
        )
    built = {}
    for key, value in settings.items():
        is_config = isinstance(value, dict) and {"class_name", "config"} <= set(value)
        built[key] = deserialize(value, custom_objects) if is_config else value
    return cls.from_config(built)


def _as_ours(theirs: Any) -> Optional[LossScale]:
    """Returns one of TensorFlow's own loss scales as ours, with its rule and state.

    A graph cannot read that state: there ours begins again. None for anything else,
    also subclasses.
    """
    # The only public name that all versions share.
    names = getattr(tf.compat.v1.mixed_precision, "experimental", None)
    if type(theirs) is getattr(names, "FixedLossScale", None):
        return FixedLossScale(**theirs.get_config())
    if type(theirs) is not getattr(names, "DynamicLossScale", None):
        return None
    config = theirs.get_config()
    if config["initial_loss_scale"] < 1:  # or ours would start below its floor of 1
        config["min_loss_scale"] = config["initial_loss_scale"]
    with tf.init_scope():
        if not mode.current().knows_values:
            return DynamicLossScale(**config)
        ours = DynamicLossScale(**config)
        ours.current_loss_scale.assign(theirs())
        ours.good_steps.assign(theirs._num_good_steps)  # the counter is not public
        return ours
