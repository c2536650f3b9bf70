"""Which Kerases are in use, and how they differ.

There may be several in one process: Keras 3, and Keras 2 as `tf.keras` (TensorFlow up
to 2.15, or with TF_USE_LEGACY_KERAS=1) or as the package `tf_keras`. What only the
wrapper of one Keras must know is in that wrapper, beside the line that needs it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

import tensorflow as tf

from lossscale.runtime.aliases import Variable
from lossscale.runtime.late_imports import when_imported

#: Why a Keras could not be imported, by the name it was asked for with.
failures: Dict[str, Exception] = {}


def imported(name: str) -> Any:
    """Returns a package, None if it is missing, or broken by another's version."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken one raises anything
        failures[name] = error
        return None


def of_tensorflow() -> Any:
    """Returns tf.keras, None if it is missing or broken."""
    try:
        tf.keras.Model  # noqa: B018 - from TensorFlow 2.16 on it is imported only now
    except Exception as error:
        # The first answer counts: asked again, TensorFlow's loader only calls itself.
        failures.setdefault("tf.keras", error)
        return None
    return tf.keras


def is_keras3(keras: Any) -> bool:
    """Tells whether a Keras is Keras 3."""
    # tf.keras of TensorFlow 2.13 to 2.15 has no __version__: it is Keras 2.
    return int(getattr(keras, "__version__", "2").split(".")[0]) >= 3


@functools.lru_cache(maxsize=None)
def keras3() -> Any:
    """Returns Keras 3 if it is installed and computes with TensorFlow, else None."""
    keras = imported("keras")
    if keras is None or not is_keras3(keras) or keras.config.backend() != "tensorflow":
        return None
    return keras


@functools.lru_cache(maxsize=None)
def keras2() -> Tuple[Any, ...]:
    """Returns the modules of every Keras 2 that is in use: none, one or two.

    `tf_keras` is in use if somebody has imported it: it takes a second, and a program
    of Keras 3 has no need of it.
    """
    found: Dict[Any, Any] = {}
    for keras in (of_tensorflow(), sys.modules.get("tf_keras")):
        if keras is not None and not is_keras3(keras):
            # One Keras under two names has one LossScaleOptimizer.
            found.setdefault(keras.mixed_precision.LossScaleOptimizer, keras)
    return tuple(found.values())


def for_each_keras2(act: Callable[[Any], None]) -> None:
    """Calls `act` with each Keras 2, with one that is not in use as soon as it is.

    So it makes no difference whether `tf_keras` is imported before this package.
    """
    known = keras2()
    for keras in known:
        act(keras)

    def come(_: Any) -> None:
        keras2.cache_clear()
        for keras in keras2():
            if keras not in known:
                act(keras)

    if "tf_keras" not in sys.modules:
        when_imported("tf_keras", come)


def wrapper_module(keras: Any) -> Any:
    """Returns the module in which one Keras 2 defines its loss scale wrappers."""
    return sys.modules[keras.mixed_precision.LossScaleOptimizer.__module__]


def generations(keras: Any) -> List[Tuple[bool, type, type]]:
    """Returns the generations of optimizers that one Keras 2 has.

    Each is a tuple: whether it is the legacy one, Keras's own loss scale wrapper for
    it, and the base class of its optimizers.
    """
    # The public name is the legacy wrapper itself up to TensorFlow 2.8, and later a
    # front for both, which are not exported (seen on 2.4, 2.8, 2.10-2.15, 2.16-2.21).
    module = wrapper_module(keras)
    found = []
    for is_legacy, wrapper_name, optimizer_name in (
        (False, "LossScaleOptimizerV3", "Optimizer"),
        (True, "LossScaleOptimizer", "OptimizerV2"),
    ):
        wrapper = getattr(module, wrapper_name, None)
        if wrapper is not None:
            named = (c for c in wrapper.__mro__ if c.__name__ == optimizer_name)
            found.append((is_legacy, wrapper, next(named)))
    return found


def deserialize_optimizer(
    keras: Any, config: Dict[str, Any], custom_objects: Any, is_legacy: bool
) -> Any:
    """Returns an optimizer of one generation of one Keras 2 from its config."""
    # Not the public module: before TensorFlow 2.11 that knows one generation only.
    deserialize = wrapper_module(keras).optimizers.deserialize
    try:
        return deserialize(config, custom_objects, use_legacy_optimizer=is_legacy)
    except TypeError:  # before TensorFlow 2.11 there is no such argument
        return deserialize(config, custom_objects)


def installed() -> List[Any]:
    """Returns every Keras that can train here, the one that tf.keras is first."""
    kerases: List[Any] = list(keras2())
    newest = keras3()
    if newest is None:
        return kerases
    default = of_tensorflow()
    default_is_newest = default is None or is_keras3(default)
    return [newest, *kerases] if default_is_newest else [*kerases, newest]


class _AnyCallback:
    """What a callback is without any Keras."""


def callback_class() -> Any:
    """Returns a class whose objects are callbacks of every Keras that is in use."""

    def bases() -> Tuple[Any, ...]:
        # Keras 2 first: it asks whether a method is its own default, Keras 3.3 does
        # not.
        kerases = [*keras2(), *filter(None, [keras3()])]
        return (*(keras.callbacks.Callback for keras in kerases), _AnyCallback)

    def construct(self: Any) -> None:
        for base in bases():
            base.__init__(self)
        # Else Keras 2 hands a copy of its logs to callbacks, up to TensorFlow 2.4 not
        # the same copy to each, and reads a GPU's metrics after every batch.
        self._supports_tf_logs = True

    def set_model(self: Any, model: Any) -> None:
        self._model = model

    # Keras 2 assigns `model`, for Keras 3 it is a property that cannot be assigned.
    model = property(lambda self: self._model, set_model, doc="The model.")
    members = {"__init__": construct, "set_model": set_model, "model": model}
    callback = type("Callback", bases(), members)

    def come(_: Any) -> None:
        callback.__bases__ = bases()

    for_each_keras2(come)
    return callback


def callbacks_beside(callback: Any) -> List[Any]:
    """Returns the callbacks of the `fit` that calls one now, itself among them.

    No Keras tells a callback of the others: they are read from the list that calls it
    (seen on 2.4 to 2.21, Keras 3.3 to 3.15). None are known elsewhere.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller: Any = frame.f_locals.get("self")
        if type(caller).__name__ == "CallbackList":
            found = list(caller.callbacks)
            if any(each is callback for each in found):
                return found
        frame = frame.f_back
    return []


def is_own_wrapper(optimizer: Any) -> bool:
    """Tells whether `optimizer` is a loss scale wrapper of some Keras's own."""
    own = [wrapper for keras in keras2() for _, wrapper, _ in generations(keras)]
    if keras3() is not None:
        own.append(keras3().optimizers.LossScaleOptimizer)
    return isinstance(optimizer, tuple(own))


def variable_name(variable: Variable) -> str:
    """Returns a variable's name for people, such as "dense/kernel"."""
    # Keras 3's `name` is "kernel" alone, Keras 2's ends in ":0".
    return str(getattr(variable, "path", variable.name)).split(":")[0]


def layers_of(model: Any) -> List[Any]:
    """Returns a model or layer and all layers in it, however deep, each once."""
    # Private, and the same in every Keras (seen on 2.4 to 2.21, Keras 3.3 to 3.15).
    found = {id(layer): layer for layer in model._flatten_layers()}
    return list(found.values())


def casts_inputs(layer: Any) -> bool:
    """Tells whether a layer casts what it is given to the dtype that it computes in."""
    # Private in Keras 2, and the second of Keras 3 (seen on 2.4 to 2.21, Keras 3.15).
    # Functional models leave it to their layers.
    autocast = getattr(layer, "autocast", getattr(layer, "_autocast", True))
    return bool(autocast and getattr(layer, "_convert_input_args", True))


def state_of(model: Any) -> List[Any]:
    """Returns what a forward pass may change: statistics, seeds."""
    found = list(model.non_trainable_variables)
    for layer in layers_of(model):
        # Keras 2 does not count a layer's random generator among its variables (seen
        # on 2.8 to 2.21).
        generator = getattr(getattr(layer, "_random_generator", None), "_generator", 0)
        found += [generator.state] if hasattr(generator, "state") else []
    return list({id(variable): variable for variable in found}.values())


def tensor_of(variable: Variable) -> Any:
    """Returns what a `tf.GradientTape` takes for a variable of any Keras."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def foreign_backend(optimizer: Any) -> Optional[str]:
    """Returns the backend of a Keras 3 optimizer if it is not TensorFlow."""
    keras = imported("keras")
    if keras is None or not is_keras3(keras):
        return None
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return None
    backend = str(keras.config.backend())
    return None if backend == "tensorflow" else backend
