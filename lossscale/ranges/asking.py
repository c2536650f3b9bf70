"""Checks of a user's model and data, and which Keras a model belongs to."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from lossscale.runtime import kerases, mode


def keras_of(model: Any, asked_by: str) -> Any:
    """Returns the Keras of a model. Raises if it is no model that we can compute.

    Args:
      model: The argument that the user passed.
      asked_by: The name of the public function that the user called.
    """
    owners = (keras for keras in kerases.installed() if isinstance(model, keras.Model))
    keras = next(owners, None)
    if keras is None:
        raise TypeError(f"`model` must be a Keras model, got {model!r:.80}.")
    if not mode.current().knows_values or tf.distribute.has_strategy():
        raise RuntimeError(
            f"{asked_by} must be called eagerly and outside strategy.scope(), "
            "got a graph or a strategy. Call it before or after training."
        )
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "`model` must be created outside strategy.scope(), got one with "
            f"{strategy.num_replicas_in_sync} replicas. Create a second one outside, "
            "and copy the weights: second.set_weights(model.get_weights())."
        )
    return keras


def has_loss(model: Any, loss: Any) -> None:
    """Raises a ValueError unless there is a loss to compute."""
    if loss is None and getattr(model, "optimizer", None) is None:
        raise ValueError(
            "`model` must be compiled, or `loss` given, got a model without a loss. "
            'Pass the loss that the model is trained with, such as loss="mse".'
        )


def build(model: Any, x: Any) -> None:
    """Creates missing weights by calling the model, or raises a ValueError."""
    has_weights = bool(model.built and model.weights)
    if len(kerases.layers_of(model)) == 1 and not has_weights:
        raise ValueError(f"`model` must have layers, got {model.name!r} with none.")
    if has_weights:
        return
    try:
        model(x, training=False)
    except Exception as error:
        raise ValueError(
            f"`model` must be built, or take `x`, got {model.name!r}. Calling it "
            f"failed: {error!s:.300}. Call it once on a batch: model(x)."
        ) from error


def finite_data(*batch: Any) -> None:
    """Raises a ValueError if a batch holds inf or NaN."""
    for name, part in zip(("x", "y", "sample_weight"), batch):
        bad = sum(map(_nonfinite, tf.nest.flatten(part)))
        if bad:
            raise ValueError(
                f"`{name}` must be finite, got {bad:,} values that are inf or NaN. "
                f"Clean the data until np.isfinite({name}).all()."
            )


def _nonfinite(tensor: Any) -> int:
    """Returns how many values of a dense, ragged or sparse tensor are not finite."""
    for name in ("flat_values", "values"):
        tensor = getattr(tensor, name, tensor)
    if tensor is None or not tensor.dtype.is_floating:
        return 0
    return int(np.sum(~np.isfinite(tf.cast(tensor, tf.float32).numpy())))
