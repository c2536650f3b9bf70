"""Registers classes with each Keras by name: files load without custom_objects."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

from lossscale.runtime.keras_versions import for_each_keras2, installed, keras3

#: Every Keras knows our classes by this name, a ">" and their own name: file format.
PACKAGE = "lossscale"
Class = TypeVar("Class", bound=type)
#: The decorated classes by name, so that they are found without any Keras, too.
_own: Dict[str, type] = {}


class PerKeras:
    """Our classes by the Keras class whose objects they serve."""

    def __init__(self) -> None:
        #: Pairs of a Keras class and our class, in the order of their registration.
        self.pairs: List[Tuple[type, Any]] = []

    def takes(self, base: type) -> Callable[[Class], Class]:
        """Returns a decorator: the decorated class serves the objects of `base`."""

        def add(cls: Class) -> Class:
            self.pairs.append((base, cls))
            return cls

        return add

    def class_for(self, thing: object) -> Any:
        """Returns our class that serves an object, None if there is none."""
        return next((cls for base, cls in self.pairs if isinstance(thing, base)), None)


def serializable(cls: Class) -> Class:
    """Registers a class with every Keras under its own name."""
    _own[cls.__name__] = cls
    if keras3() is not None:
        register(keras3(), cls, cls.__name__)
    for_each_keras2(lambda keras: register(keras, cls, cls.__name__))
    return cls


def register(keras: Any, cls: type, name: str) -> None:
    """Registers a class with one Keras, under a name within this package's names."""
    keras.utils.register_keras_serializable(PACKAGE, name)(cls)


def register_like(base: type, cls: type) -> None:
    """Registers a class under the name of `base`, where a Keras has registered it."""
    for keras in installed():
        name = str(keras.utils.get_registered_name(base))
        package, separator, own_name = name.partition(">")
        if separator:  # a registered name has a package in it
            decorate = keras.utils.register_keras_serializable(package, own_name)
            # TensorFlow 2.4 refuses a name that is taken. Loading then finds `base` by
            # that name, and `base` itself makes an object of the right class.
            with contextlib.suppress(ValueError):
                decorate(cls)


def registered_name(cls: type) -> str:
    """Returns the name by which some Keras knows a class, or else the class's name."""
    if _own.get(cls.__name__) is cls:  # we read configs without a Keras
        return str(cls.__name__)
    for keras in installed():
        name = str(keras.utils.get_registered_name(cls))
        if name != cls.__name__:
            return name
    return cls.__name__


def registered_class(name: str, custom_objects: Optional[Dict[str, Any]]) -> Any:
    """Returns the class that we or some Keras know by `name`, None if there is none."""
    cls: Any = _own.get(name.replace(f"{PACKAGE}>", ""))
    for keras in installed():
        cls = cls or keras.utils.get_registered_object(name, custom_objects)
    return cls
