"""The arguments, configs and states of Keras's own wrappers, as ours and back."""

from __future__ import annotations

import functools
import numbers
from functools import partial
from typing import Any, Callable, Dict, Mapping

import numpy as np

from lossscale import arguments as checks
from lossscale.arguments import shown
from lossscale.runtime import mode
from lossscale.scales import serialization
from lossscale.scales.base import LossScale
from lossscale.scales.dynamic import DynamicLossScale

#: The arguments of Keras's own wrappers that say what the loss scale does.
OF_THE_SCALE = ("dynamic", "initial_scale", "dynamic_growth_steps")
#: Keras 3's wrapper takes these at their defaults only, and reads none of them.
_WITHOUT_MEANING = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}
#: The order of our arguments after `inner_optimizer`.
_OURS = ("loss_scale", "name", "dynamic_growth_steps")


def config_as_ours(config: Any) -> Dict[str, Any]:
    """Returns the arguments of our wrapper that a config of any wrapper means."""
    if isinstance(config, dict) and "loss_scale" in config and "optimizer" in config:
        # TensorFlow 2.0 to 2.3. Their loss scales have the same names as ours.
        config = {**config, "inner_optimizer": config["optimizer"]}
        del config["optimizer"]
    if not isinstance(config, dict) or "inner_optimizer" not in config:
        raise TypeError(
            "`config` must be what get_config() of a LossScaleOptimizer returned, with "
            f'the key "inner_optimizer", got {shown(config)}. If Keras serialized the '
            'optimizer, pass the entry "config" of what Keras returned.'
        )
    if "loss_scale" in config:
        return config
    # Configs of Keras 3.0 to 3.4 hold these, which have no effect.
    ignored = {"learning_rate", *_WITHOUT_MEANING}
    kept = {k: v for k, v in config.items() if k not in ignored}
    scale = {name: kept.pop(name, None) for name in OF_THE_SCALE}
    return {**as_ours(scale), **kept}


def plain(config: Any) -> Any:
    """Returns a copy of a config, of dicts and lists that JSON can hold.

    Keras 2 puts NumPy's scalars into configs. While it writes a SavedModel it makes
    those of nested objects, such as schedules, of a class that nobody can copy.
    """
    if isinstance(config, dict):
        return {key: plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        copied = map(plain, config)
        return tuple(copied) if isinstance(config, tuple) else list(copied)
    return config.item() if isinstance(config, np.generic) else config


def counts_positions(init: Callable[..., None]) -> Callable[..., None]:
    """Decorates a constructor: `by_position` gets how many arguments had no name."""

    @functools.wraps(init)
    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs, by_position=len(args) - 1)

    return counted


def as_ours(passed: Mapping[str, Any], by_position: int = 0) -> Dict[str, Any]:
    """Returns the `loss_scale` and the `name` that arguments mean, ours or Keras's own.

    `passed` are all arguments but the inner optimizer, by name. The first `by_position`
    were given by position, and have our names for theirs. None: it was not given.
    """
    passed = _by_their_names(passed, is_third_by_position=by_position > 1)
    name, loss_scale = passed.pop("name", None), passed.pop("loss_scale", "dynamic")
    theirs = {n: passed.pop(n, None) for n in OF_THE_SCALE}
    theirs = {n: value for n, value in theirs.items() if value is not None}
    for other, value in passed.items():
        if other not in _WITHOUT_MEANING:
            ours = ("nonfinite_loss", "communication_dtype", "guard", "gather")
            names = (*_OURS[:2], *OF_THE_SCALE, *ours)
            raise TypeError(
                f"`{other}` must be one of LossScaleOptimizer's arguments, "
                f"{', '.join(names)}, got {other}={shown(value)}."
                f"{checks.did_you_mean(other, names)} If it is an argument of the "
                "inner optimizer, pass it to that one."
            )
        if value != _WITHOUT_MEANING[other]:
            raise ValueError(
                f"`{other}` must be set on the inner optimizer, got {shown(value)} for "
                "the wrapper. Pass it to the inner optimizer, as in "
                f"SGD(..., {other}={shown(value)})."
            )
    is_default = isinstance(loss_scale, str) and loss_scale == "dynamic"
    if theirs and not is_default:
        listed = ", ".join(f"{n}={shown(value)}" for n, value in theirs.items())
        raise TypeError(
            f"`{next(iter(theirs))}` must not be given together with `loss_scale`, got "
            f"{listed} and loss_scale={shown(loss_scale)}. Leave out one of the two: "
            "loss_scale=lossscale.DynamicLossScale(...) takes every setting."
        )
    return {"loss_scale": _loss_scale(theirs) if theirs else loss_scale, "name": name}


def _by_their_names(
    passed: Mapping[str, Any], is_third_by_position: bool
) -> Dict[str, Any]:
    """Renames arguments that were given by position in the order of Keras's wrappers.

    A bool in the place of `loss_scale` is Keras 2's `dynamic`. Two numbers are Keras
    3's `initial_scale` and `dynamic_growth_steps`. A `name` that was given by name is
    a name.
    """
    loss_scale, name, _ = values = [passed.get(n) for n in _OURS]
    is_number = isinstance(name, numbers.Real) and not isinstance(name, bool)
    if isinstance(loss_scale, (bool, np.bool_)):
        is_name = isinstance(name, str) or not is_third_by_position
        second = "name" if is_name else "initial_scale"
        names = ("dynamic", second, "dynamic_growth_steps")
    elif isinstance(loss_scale, numbers.Real) and is_number and is_third_by_position:
        names = ("initial_scale", "dynamic_growth_steps", "name")
    else:
        return dict(passed)
    placed = {n: value for n, value in zip(names, values) if value is not None}
    others = {n: value for n, value in passed.items() if n not in _OURS}
    for key, value in placed.items():
        if others.get(key) is not None:
            raise TypeError(
                f"`{key}` must be given once, got {shown(value)} by position and "
                f"{key}={shown(others[key])} by name. Leave out one of the two."
            )
    by_name = {**others, **placed}
    is_fixed = "dynamic" in placed and not placed["dynamic"]
    if is_fixed and by_name.get("initial_scale") is None:
        raise ValueError(
            "`loss_scale` must not be False without a value, got False. Write "
            "LossScaleOptimizer(inner_optimizer, 128.0) for a fixed loss scale of 128."
        )
    return by_name


def _loss_scale(theirs: Mapping[str, Any]) -> Dict[str, Any]:
    scale, steps = theirs.get("initial_scale"), theirs.get("dynamic_growth_steps")
    config: Dict[str, Any] = {}
    if checks.boolean("dynamic", theirs.get("dynamic", True)):
        if scale is not None:
            scale = checks.loss_scale("initial_scale", scale)
            config["initial_loss_scale"] = scale
            if scale < 1:
                config["min_loss_scale"] = scale  # ours may not begin below its floor
        if steps is not None:
            config["increment_period"] = checks.count("dynamic_growth_steps", steps)
        return {"class_name": "DynamicLossScale", "config": config}
    if steps is not None:
        raise ValueError(
            "`dynamic_growth_steps` must be None with dynamic=False, got "
            f"{shown(steps)}. Leave it out, or write dynamic=True: a fixed loss scale "
            "does not grow."
        )
    if scale is None:
        raise ValueError(
            "`initial_scale` must be a number with dynamic=False, got None. Write "
            "LossScaleOptimizer(inner_optimizer, 128.0) for a fixed loss scale."
        )
    config["loss_scale_value"] = checks.loss_scale("initial_scale", scale)
    return {"class_name": "FixedLossScale", "config": config}


def as_theirs(loss_scale: LossScale) -> Dict[str, Any]:
    """Returns the arguments of Keras 2's wrapper that mean `loss_scale`, or raises."""
    config = loss_scale.get_config()
    scale = config.get("initial_loss_scale") or config.get("loss_scale_value")
    steps = config.get("increment_period")
    theirs = dict(zip(OF_THE_SCALE, (loss_scale._can_change, scale, steps)))
    meant = serialization.deserialize(as_ours(theirs)["loss_scale"])
    if serialization.serialize(meant) != serialization.serialize(loss_scale):
        raise TypeError(
            "`loss_scale` must be one that Keras's own arguments can express, since "
            "the constructor of your class takes only those, got "
            f"{shown(loss_scale)}. Give the constructor an argument `loss_scale`, and "
            "pass it on to super().__init__."
        )
    return theirs


def loss_scale_of(optimizer: Any) -> LossScale:
    """Returns a loss scale with the value and the counter of Keras's own wrapper."""
    if not mode.current().knows_values:
        raise RuntimeError(
            "`from_keras` must be called eagerly, got a call in a graph, which cannot "
            "read the state of Keras's wrapper. Restore a checkpoint of that wrapper "
            "into LossScaleOptimizer(inner_optimizer) instead."
        )
    theirs = {name: getattr(optimizer, name, None) for name in OF_THE_SCALE}
    config = as_ours(theirs)["loss_scale"]
    # Keras 3's wrapper has no state until it is built, Keras 2's has none if fixed.
    scale = _read(optimizer, "dynamic_scale", "loss_scale", checks.loss_scale)
    count = partial(checks.count, least=0, most=checks.MOST_STEPS)
    steps = _read(optimizer, "step_counter", "dynamic_counter", count)
    if scale is None or steps is None:
        made: LossScale = serialization.deserialize(config)
        return made
    if scale < 1:  # Keras 3's loss scale has no floor
        config["config"]["min_loss_scale"] = scale
    loss_scale = DynamicLossScale(**config["config"])
    loss_scale.current_loss_scale.assign(scale)
    loss_scale.good_steps.assign(steps)
    return loss_scale


def _read(optimizer: Any, of_keras3: str, of_keras2: str, check: Any) -> Any:
    for name in (of_keras3, of_keras2):
        value = getattr(optimizer, name, None)
        if value is not None:
            return check(name, value.numpy().item())
    return None
