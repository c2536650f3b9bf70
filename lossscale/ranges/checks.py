"""What a tool is asked about: the model, its loss and loss scale, and finite data."""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from lossscale.ranges import magnitudes
from lossscale.runtime import kerases
from lossscale.runtime.graphs import is_building
from lossscale.scales.base import LossScale

_NO_LOSS = """\
`model` must be compiled with a loss, or `loss` given, got a model without one. Pass \
the loss that the model is trained with, such as loss="mse"."""


def keras_of(model: Any, asked_by: str) -> Any:
    """Returns the Keras of a model. Raises if it is no model that we can compute.

    Args:
      model: The argument that the user passed.
      asked_by: The name of the public function that the user called.
    """
    keras = owner_of(model)
    if keras is None:
        raise TypeError(f"`model` must be a Keras model, got {model!r:.80}.")
    if is_building() or tf.distribute.has_strategy():
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


def owner_of(model: Any) -> Any:
    """Returns the Keras that an object is a model of, None if it is no model."""
    owners = (keras for keras in kerases.installed() if isinstance(model, keras.Model))
    return next(owners, None)


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
        floats = magnitudes.floats_in(list(map(_dense, tf.nest.flatten(part))))
        bad = sum(magnitudes.look(each).bad for each in floats)
        if bad:
            raise ValueError(
                f"`{name}` must be finite, got {bad:,} values that are inf or NaN. "
                f"Clean the data until np.isfinite({name}).all()."
            )


def _dense(tensor: Any) -> Any:
    """Returns the values of a ragged or sparse tensor, a dense one as it is."""
    for name in ("flat_values", "values"):
        tensor = getattr(tensor, name, tensor)
    return tensor


class Loss:
    """Computes the loss of a batch as `fit` does, with the model's added losses.

    Args:
      keras: The Keras of the model.
      model: The model.
      loss: A loss as `compile` takes it. None: the compiled loss.
    """

    def __init__(self, keras: Any, model: Any, loss: Any) -> None:
        self._model = model
        #: The model whose compiled loss is computed: an empty one for a given loss.
        self._loss_model = model
        if loss is not None:
            self._loss_model = keras.Sequential()
            self._loss_model.compile(loss=loss)

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
