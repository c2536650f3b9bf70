"""A model's loss as training computes it, and the loss scale that it has now."""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from lossscale.scales.base import LossScale

_NO_LOSS = """\
`model` must be compiled with a loss, or `loss` given, got a model without one. Write \
loss="mse", or what it is trained with."""


class Loss:
    """Computes the loss of a batch, with the model's own losses, as in `fit`.

    Args:
      keras: The Keras of the model.
      model: The model.
      loss: What `compile` takes. None: the compiled one.
    """

    def __init__(self, keras: Any, model: Any, loss: Any) -> None:
        self._model = model
        #: The model whose compiled loss it is.
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
    """Returns by what the model's optimizer multiplies the loss now."""
    optimizer = getattr(model, "optimizer", None)
    for name in ("loss_scale", "dynamic_scale", "initial_scale", "loss_scale_factor"):
        # Ours and Keras 2's; Keras 3's, built or not; a bare optimizer of Keras 3.
        value = getattr(optimizer, name, None)
        if isinstance(value, LossScale):
            return value._to_show()
        if value is not None:
            return float(value.numpy() if hasattr(value, "numpy") else value)
    return 1.0


def check_targets(model: Any, loss: Any, y: Any, asked_by: str) -> None:
    """Raises unless there are targets, if the loss needs any."""
    has_loss = loss is not None or getattr(model, "loss", None)
    if y is None and has_loss and not overrides_loss(model):
        raise ValueError(
            "`y` must be the targets that the loss is computed with, got None. Write "
            f"{asked_by}(model, x, y), or pass batches that hold both."
        )


def _with_loss(keras: Any, loss: Any) -> Any:
    """Returns an empty model that has compiled `loss`, to compute it with."""
    model = keras.Sequential()
    model.compile(loss=loss)
    return model


def overrides_loss(model: Any) -> bool:
    """Tells whether a model computes its loss in a way of its own."""
    method = getattr(type(model), "compute_loss", None)
    home = (getattr(method, "__module__", None) or "keras").split(".")[0]
    return home not in ("keras", "tf_keras", "tensorflow")


def _compute_loss(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """Returns the compiled loss of a batch, with the model's own losses, as in fit."""
    # Missing on TensorFlow 2.4, and there from 2.8 on (seen on 2.4 and 2.8 to 2.21).
    if not hasattr(model, "compute_loss"):
        return model.compiled_loss(y, y_pred, sample_weight, model.losses)
    accepted = inspect.signature(model.compute_loss).parameters
    # Newer Kerases 3 ask for it (seen on 3.15; 3.3 has no such argument).
    training = {"training": True} if "training" in accepted else {}
    return model.compute_loss(x, y, y_pred, sample_weight, **training)
