"""What Keras's own wrappers are given, as what ours are given."""

from __future__ import annotations

from typing import Any, Dict, Mapping

from lossscale.arguments import shown

#: Their arguments that say what the loss scale does.
OF_THE_SCALE = ("dynamic", "initial_scale", "dynamic_growth_steps")
#: Written by Keras 3.0 to 3.4 with every optimizer, and read by nobody in a wrapper's.
_WITHOUT_MEANING = {
    *("learning_rate", "weight_decay", "clipnorm", "global_clipnorm", "clipvalue"),
    *("use_ema", "ema_momentum", "ema_overwrite_frequency", "loss_scale_factor"),
    "gradient_accumulation_steps",
}


def refuse(given: Mapping[str, Any]) -> None:
    """Raises if there are arguments of Keras's own wrappers, and says what to write."""
    theirs = {name: given[name] for name in OF_THE_SCALE if name in given}
    if theirs:
        listed = ", ".join(f"{name}={shown(value)}" for name, value in theirs.items())
        raise TypeError(
            f"`{next(iter(theirs))}` must be an argument of the loss scale, got "
            f"{listed}. Write LossScaleOptimizer(inner_optimizer, {_instead(theirs)})."
        )


def _instead(theirs: Mapping[str, Any]) -> str:
    """Returns what to write for arguments of Keras's own wrappers."""
    scale = shown(theirs.get("initial_scale"))
    steps = shown(theirs.get("dynamic_growth_steps"))
    if theirs.get("dynamic") is False:
        return scale if scale != "None" else "128.0"
    settings = [("initial_loss_scale", scale), ("increment_period", steps)]
    listed = ", ".join(f"{name}={text}" for name, text in settings if text != "None")
    return f"lossscale.DynamicLossScale({listed})"


def as_ours(config: Any) -> Dict[str, Any]:
    """Returns a config of our wrappers or of Keras's own as one of ours.

    Args:
      config: What the `get_config` of our wrapper, of Keras 2's, of Keras 3's or of
        TensorFlow 2.0 to 2.3's returned.

    Raises:
      TypeError: It is none of these.
    """
    if isinstance(config, dict) and "loss_scale" in config and "optimizer" in config:
        # TensorFlow 2.3 and before. Its loss scales have the names of ours.
        config = {**config, "inner_optimizer": config["optimizer"]}
        del config["optimizer"]
    if not isinstance(config, dict) or "inner_optimizer" not in config:
        raise TypeError(
            "`config` must be what get_config() of a LossScaleOptimizer returned, with "
            f'the key "inner_optimizer", got {shown(config)}. Of an optimizer that a '
            'Keras has serialized take its ["config"].'
        )
    if "loss_scale" in config:
        return config
    kept = {k: v for k, v in config.items() if k not in _WITHOUT_MEANING}
    theirs = {name: kept.pop(name) for name in OF_THE_SCALE if name in kept}
    return {**kept, "loss_scale": _loss_scale(theirs)}


def _loss_scale(theirs: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns the config of the loss scale that arguments of Keras's own ask for."""
    scale = theirs.get("initial_scale")
    if theirs.get("dynamic") is False:
        return {"class_name": "FixedLossScale", "config": {"loss_scale_value": scale}}
    settings = {
        "initial_loss_scale": scale,
        "increment_period": theirs.get("dynamic_growth_steps"),
    }
    given = {name: value for name, value in settings.items() if value is not None}
    if isinstance(scale, (int, float)) and 0 < scale < 1:
        given["min_loss_scale"] = scale  # ours must not start below its floor
    return {"class_name": "DynamicLossScale", "config": given}
