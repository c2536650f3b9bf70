"""Which Keras is installed. The only file with version checks.

There may be several in one process: Keras 3, and Keras 2 as `tf.keras` (TensorFlow up
to 2.15, or with TF_USE_LEGACY_KERAS=1) or as the package `tf_keras`.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Dict, List, Optional, Tuple, TypeVar

import tensorflow as tf

PACKAGE = "lossscale"
Class = TypeVar("Class", bound=type)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:  # not installed, or for another TensorFlow
        return None


def _major(keras: Any) -> int:
    # tf.keras of TensorFlow 2.13 to 2.15 has no __version__.
    return int(getattr(keras, "__version__", "2").split(".")[0])


@functools.lru_cache(maxsize=None)
def keras3() -> Any:
    """Returns Keras 3 if it is installed and computes with TensorFlow, else None."""
    keras = _import("keras")
    if keras is None or _major(keras) < 3 or keras.config.backend() != "tensorflow":
        return None
    return keras


@functools.lru_cache(maxsize=None)
def keras2() -> Tuple[Any, ...]:
    """Returns the modules of every Keras 2 that is installed: none, one or two."""
    found: Dict[Any, Any] = {}
    for keras in (getattr(tf, "keras", None), _import("tf_keras")):
        if keras is not None and _major(keras) < 3:
            # One Keras under two names has one LossScaleOptimizer.
            found.setdefault(keras.mixed_precision.LossScaleOptimizer, keras)
    return tuple(found.values())


def installed() -> List[Any]:
    """Returns every Keras that can train here, the one that tf.keras is first."""
    kerases: List[Any] = list(keras2())
    newest = keras3()
    if newest is None:
        return kerases
    default_is_newest = _major(tf.keras) >= 3
    return [newest, *kerases] if default_is_newest else [*kerases, newest]


def foreign_backend(optimizer: Any) -> Optional[str]:
    """Returns the backend of a Keras 3 optimizer if it is not TensorFlow."""
    keras = _import("keras")
    if keras is None or _major(keras) < 3 or not is_keras3(keras, optimizer):
        return None
    backend = str(keras.config.backend())
    return None if backend == "tensorflow" else backend


def is_keras3(keras: Any, optimizer: Any) -> bool:
    """Tells whether `optimizer` is one of Keras 3's."""
    return isinstance(optimizer, keras.optimizers.Optimizer)


def serializable(cls: Class) -> Class:
    """Registers a class with every Keras, so that it loads without custom_objects."""
    for keras in installed():
        register(keras, cls, cls.__name__)
    return cls


def register(keras: Any, cls: type, name: str) -> None:
    """Registers a class with one Keras, as `name` of our package."""
    _registry(keras).register_keras_serializable(PACKAGE, name)(cls)


def _registry(keras: Any) -> Any:
    # Keras 2 before 2.13 has no `saving`, Keras 3 has no `utils` for this.
    return keras.saving if _major(keras) >= 3 else keras.utils


def registered_name(cls: type) -> str:
    """Returns the name under which some Keras knows `cls`, else its own name."""
    for keras in installed():
        name = str(_registry(keras).get_registered_name(cls))
        if name != cls.__name__:
            return name
    return cls.__name__


def registered_class(name: str, custom_objects: Optional[Dict[str, Any]]) -> Any:
    """Returns the class that some Keras knows under `name`, else None."""
    for keras in installed():
        found = _registry(keras).get_registered_object(name, custom_objects)
        if found is not None:
            return found
    return None
