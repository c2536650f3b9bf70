"""A model's loss as training computes it, and the current loss scale of the model."""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from lossscale.scales.base import LossScale

_NO_LOSS = """\
`model` must be compiled with a loss, or `loss` given, got a model without one. Pass \
the loss that the model is trained with, such as loss="mse"."""


class Loss:
    """Computes the loss of a batch as `fit` does, with the model's added losses.

    Args:
      keras: The Keras of the model.
      model: The model.
      loss: A loss as `compile` takes it. None: the compiled loss.
    """

    def __init__(self, keras: Any, model: Any, loss: Any) -> None:
        self._model = model
        #: The model whose compiled loss is computed.
        self._loss_model = model if loss is None else _with_loss(keras, loss)

    def __call__(self, *batch: Any) -> Any:
        """Returns the loss of `(x, y, outputs, sample_weight)`, a float tensor."""
        if self._loss_model is self._model:
            model = self._model
            has_own = model.losses or overrides_loss(model)
            if not getattr(model, "loss", None) and not has_own:
                raise ValueError(_NO_LOSS)
            return _compute_loss(model, *batch)
        found = _compute_loss(self._loss_model, *batch)
        return tf.add_n([found, *self._model.losses])


def scale_of(model: Any) -> float:
    """Returns the number by which the model's optimizer multiplies the loss now."""
    optimizer = getattr(model, "optimizer", None)
    for name in ("loss_scale", "dynamic_scale", "initial_scale", "loss_scale_factor"):
        # Ours or Keras 2's wrapper; Keras 3's wrapper, built or not; Keras 3's others.
        value = getattr(optimizer, name, None)
        if isinstance(value, LossScale):
            return value._to_show()
        if value is not None:
            return float(value.numpy() if hasattr(value, "numpy") else value)
    return 1.0


def check_targets(model: Any, loss: Any, y: Any, asked_by: str) -> None:
    """Raises if the loss needs targets, and there are none."""
    has_loss = loss is not None or getattr(model, "loss", None)
    if y is None and has_loss and not overrides_loss(model):
        raise ValueError(
            "`y` must be the targets that the loss needs, got None. Write "
            f"{asked_by}(model, x, y), or pass batches that hold both."
        )


def _with_loss(keras: Any, loss: Any) -> Any:
    """Returns an empty model compiled with `loss`, which can compute it."""
    model = keras.Sequential()
    model.compile(loss=loss)
    return model


def overrides_loss(model: Any) -> bool:
    """Tells whether the model's class overrides `compute_loss`."""
    method = getattr(type(model), "compute_loss", None)
    home = (getattr(method, "__module__", None) or "keras").split(".")[0]
    return home not in ("keras", "tf_keras", "tensorflow")


def _compute_loss(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """Returns the compiled loss of a batch, with the model's added losses."""
    # TensorFlow 2.4 has no such method; 2.8 and later have it (seen on 2.8 to 2.21).
    if not hasattr(model, "compute_loss"):
        return model.compiled_loss(y, y_pred, sample_weight, model.losses)
    accepted = inspect.signature(model.compute_loss).parameters
    # Newer versions of Keras 3 take `training` (seen on 3.15; 3.3 does not).
    training = {"training": True} if "training" in accepted else {}
    return model.compute_loss(x, y, y_pred, sample_weight, **training)
