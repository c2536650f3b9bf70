"""Classes that a Keras must find by name, so that files load without custom_objects."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

from lossscale.runtime.kerases import (
    for_each_keras2,
    installed,
    is_keras3,
    keras3,
)

#: Under this name, with a ">" behind it, every Keras knows our classes: file format.
PACKAGE = "lossscale"
Class = TypeVar("Class", bound=type)
#: The decorated classes by name: they are found without any Keras, too.
_own: Dict[str, Any] = {}


class PerKeras:
    """Our classes, each for the objects of one class of a Keras.

    Attributes:
      pairs: Pairs of that class and ours, in the order in which they became known.
    """

    def __init__(self) -> None:
        self.pairs: List[Tuple[type, Any]] = []

    def takes(self, base: type) -> Callable[[Class], Class]:
        """Makes the decorated class the one for the objects of `base`."""

        def add(cls: Class) -> Class:
            self.pairs.append((base, cls))
            return cls

        return add

    def class_for(self, thing: Any) -> Any:
        """Returns our class for an object, None without one."""
        return next((cls for base, cls in self.pairs if isinstance(thing, base)), None)


def serializable(cls: Class) -> Class:
    """Registers a class with every Keras, so that it loads without custom_objects."""
    _own[cls.__name__] = cls
    newest = keras3()
    if newest is not None:
        register(newest, cls, cls.__name__)
    for_each_keras2(lambda keras: register(keras, cls, cls.__name__))
    return cls


def register(keras: Any, cls: type, name: str) -> None:
    """Registers a class with one Keras, as `name` of this package."""
    _registry(keras).register_keras_serializable(PACKAGE, name)(cls)


def register_like(known: type, cls: type) -> None:
    """Registers a class under the name of another, with each Keras that knows that."""
    for keras in installed():
        name = str(_registry(keras).get_registered_name(known))
        package, separator, own_name = name.partition(">")
        if separator:
            decorate = _registry(keras).register_keras_serializable(package, own_name)
            # TensorFlow 2.4 refuses a name that is taken: loading asks for the class.
            with contextlib.suppress(ValueError):
                decorate(cls)


def _registry(keras: Any) -> Any:
    # Keras 2 before 2.13 has no `saving` for this; for Keras 3 that is its home, and
    # `utils` a second name (seen on 2.4 to 2.21, Keras 3.3 to 3.15).
    return keras.saving if is_keras3(keras) else keras.utils


def registered_name(cls: type) -> str:
    """Returns the name under which some Keras knows `cls`, else its own name.

    That of a class that is `serializable` is its own: configs are read without a Keras.
    """
    if _own.get(cls.__name__) is cls:
        return str(cls.__name__)
    for keras in installed():
        name = str(_registry(keras).get_registered_name(cls))
        if name != cls.__name__:
            return name
    return cls.__name__


def registered_class(name: str, custom_objects: Optional[Dict[str, Any]]) -> Any:
    """Returns the class that we or some Keras know under `name`, else None."""
    own = _own.get(name.replace(f"{PACKAGE}>", ""))
    if own is not None:
        return own
    for keras in installed():
        found = _registry(keras).get_registered_object(name, custom_objects)
        if found is not None:
            return found
    return None
