"""Every route from a model to disk and back, on each Keras."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import tensorflow as tf
from limits import skip_without
from models import checkpoint_of


class Route(NamedTuple):
    """How a model is written and read.

    Attributes:
      feature: What a Keras must have for it, see limits.py. None: each has it.
      write: Writes a model. The path has no ending.
      read: Returns a model with what was written: a new one, or the one that it is
        given, by the family and the path.
    """

    feature: Optional[str]
    write: Callable[[Any, Any], Any]
    read: Callable[[Any, Any, Any], Any]


def weights_of(optimizer):
    if hasattr(optimizer, "get_weights"):  # Keras 2's
        return optimizer.get_weights()
    return [v.numpy() for v in optimizer.variables]


def _write_weights(model, path):
    np.savez(f"{path}.npz", *weights_of(model.optimizer))


def _read_weights(_, path, other):
    with np.load(f"{path}.npz") as values:
        other.optimizer.set_weights([values[name] for name in values.files])
    return other


def _read_checkpoint(_, path, other):
    checkpoint_of(other).read(str(path)).expect_partial()
    return other


def _write_folder(model, path):
    if type(model).__module__.startswith("keras.src.models"):  # Keras 3's
        tf.saved_model.save(model, str(path))
    else:
        model.save(str(path), save_format="tf")


def _read_folder(family, path, other):
    variables = f"{path}/variables/variables"
    if family.name == "keras3":
        tf.train.Checkpoint(other).read(variables).expect_partial()
        return other
    model = family.keras.models.load_model(str(path))
    model.optimizer.build(model.trainable_variables)
    model.load_weights(variables).expect_partial()
    return model


def _by_model(feature, ending):
    return Route(
        feature,
        lambda model, path: model.save(f"{path}{ending}"),
        lambda family, path, _: family.keras.models.load_model(f"{path}{ending}"),
    )


def _by_weights(feature, ending):
    def read(_, path, other):
        other.load_weights(f"{path}{ending}")
        return other

    return Route(
        feature, lambda model, path: model.save_weights(f"{path}{ending}"), read
    )


ROUTES = {
    "checkpoint": Route(
        None,
        lambda model, path: checkpoint_of(model).write(str(path)),
        _read_checkpoint,
    ),
    "set_weights": Route(None, _write_weights, _read_weights),
    ".weights.h5": _by_weights("an optimizer in a .weights.h5 file", ".weights.h5"),
    "weights": _by_weights("weights in TensorFlow's format", ""),
    ".keras": _by_model("an optimizer in a .keras file", ".keras"),
    ".h5": _by_model("an optimizer in an .h5 file", ".h5"),
    "SavedModel": Route(None, _write_folder, _read_folder),
}


def there(family, name):
    """Returns the route of a name, or skips the test where a Keras has none."""
    route = ROUTES[name]
    if route.feature is not None:
        skip_without(route.feature, family)
    return route


def backup_and_restore(family, folder, **arguments):
    """Returns the callback of that name."""
    callbacks = family.keras.callbacks
    # TensorFlow 2.4 to 2.7 have it under another name.
    home = callbacks if hasattr(callbacks, "BackupAndRestore") else None
    return (home or callbacks.experimental).BackupAndRestore(str(folder), **arguments)
