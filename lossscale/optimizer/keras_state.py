"""Converts the loss scale of Keras's own wrapper to one of ours, with its state."""

from __future__ import annotations

from functools import partial
from typing import Any

from lossscale import arguments
from lossscale.optimizer import keras_arguments
from lossscale.runtime import mode
from lossscale.scales import serialization
from lossscale.scales.base import LossScale
from lossscale.scales.dynamic import DynamicLossScale

_STEPS = partial(arguments.count, least=0, most=arguments.MOST_STEPS)


def loss_scale_of(optimizer: Any) -> LossScale:
    """Returns a loss scale with the value and the counter of Keras's own.

    Args:
      optimizer: Keras's own `LossScaleOptimizer`.

    Raises:
      ValueError: Its loss scale is zero or infinite.
      RuntimeError: It was called in a graph.
    """
    if not mode.current().knows_values:
        raise RuntimeError(
            "`from_keras` must be called eagerly, got a call in a graph, which cannot "
            "read the state of Keras's wrapper. Restore a checkpoint of that wrapper "
            "into LossScaleOptimizer(inner_optimizer) instead."
        )
    names = keras_arguments.OF_THE_SCALE
    given = {name: getattr(optimizer, name, None) for name in names}
    config = keras_arguments.as_ours(given)["loss_scale"]
    # Keras 3's wrapper has no state until it is built, Keras 2's has none if fixed.
    scale = _read(optimizer, "dynamic_scale", "loss_scale", arguments.loss_scale)
    steps = _read(optimizer, "step_counter", "dynamic_counter", _STEPS)
    if scale is None or steps is None:
        return serialization.deserialize(config)
    if scale < 1:  # Keras 3's loss scale has no floor
        config["config"]["min_loss_scale"] = scale
    loss_scale = DynamicLossScale(**config["config"])
    loss_scale.current_loss_scale.assign(scale)
    loss_scale.good_steps.assign(steps)
    return loss_scale


def _read(optimizer: Any, of_keras3: str, of_keras2: str, check: Any) -> Any:
    """Returns the checked value of an attribute of the optimizer, None without one.

    Args:
      optimizer: Keras's own `LossScaleOptimizer`.
      of_keras3: What Keras 3 calls the attribute, a variable or a tensor.
      of_keras2: What Keras 2 calls it.
      check: A function of the name and the value that raises if the value is invalid.
    """
    for name in (of_keras3, of_keras2):
        value = getattr(optimizer, name, None)
        if value is not None:
            return check(name, value.numpy().item())
    return None
