"""What a tool is asked about: the model, its loss and loss scale, and finite data."""

from __future__ import annotations

import inspect
from typing import Any, Callable

import tensorflow as tf

from lossscale.ranges import magnitudes
from lossscale.runtime import kerases
from lossscale.runtime.graphs import is_building
from lossscale.scales.base import LossScale

_NO_LOSS = """\
`model` must be compiled with a loss, or `loss` given, got a model without one. Pass \
the loss that the model is trained with, such as loss="mse"."""


def keras_of(model: Any, asked_by: str) -> Any:
    """Returns the Keras of a model. Raises if it is no model that we can compute."""
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


def check_loss(model: Any, loss: Any, y: Any, asked_by: str) -> None:
    """Raises a ValueError if there is no loss to compute, or it has no targets."""
    if loss is None and getattr(model, "optimizer", None) is None:
        raise ValueError(_NO_LOSS)
    has_loss = loss is not None or getattr(model, "loss", None)
    if y is None and has_loss and not overrides_loss(model):
        raise ValueError(
            "`y` must be the targets that the loss needs, got None. Write "
            f"{asked_by}(model, x, y), or pass batches that hold both."
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
        # Ragged tensors hold values, and sparse ones.
        values = [
            getattr(each, "flat_values", getattr(each, "values", each))
            for each in tf.nest.flatten(part)
        ]
        bad = sum(magnitudes.look(each).bad for each in magnitudes.floats_in(values))
        if bad:
            raise ValueError(
                f"`{name}` must be finite, got {bad:,} values that are inf or NaN. "
                f"Clean the data until np.isfinite({name}).all()."
            )


def loss_function(keras: Any, model: Any, loss: Any) -> Callable[..., Any]:
    """Returns a function that computes the loss of a batch, as `fit` does.

    It takes `(x, y, outputs, sample_weight)`, and returns a float tensor: with the
    losses that the model's last forward pass added. `loss` is as `compile` takes it,
    None for the compiled one.
    """
    compiled = model
    if loss is not None:
        compiled = keras.Sequential()
        compiled.compile(loss=loss)

    def compute(x: Any, y: Any, outputs: Any, sample_weight: Any) -> Any:
        has_loss = loss is not None or getattr(model, "loss", None) or model.losses
        if not has_loss and not overrides_loss(model):
            raise ValueError(_NO_LOSS)
        if not hasattr(compiled, "compute_loss"):  # up to TensorFlow 2.4
            found = compiled.compiled_loss(y, outputs, sample_weight, compiled.losses)
        else:
            accepted = inspect.signature(compiled.compute_loss).parameters
            # Newer versions of Keras 3 take `training`; 3.3 does not.
            training = {"training": True} if "training" in accepted else {}
            found = compiled.compute_loss(x, y, outputs, sample_weight, **training)
        return found if compiled is model else tf.add_n([found, *model.losses])

    return compute


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


def overrides_loss(model: Any) -> bool:
    """Tells whether the model's class overrides `compute_loss`."""
    method = getattr(type(model), "compute_loss", None)
    home = (getattr(method, "__module__", None) or "keras").split(".")[0]
    return home not in ("keras", "tf_keras", "tensorflow")
