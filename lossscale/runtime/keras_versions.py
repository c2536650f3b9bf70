"""Which versions of Keras are in use, and how they differ.

One process may use several: Keras 3, and Keras 2 as `tf.keras` (TensorFlow up to 2.15,
or with TF_USE_LEGACY_KERAS=1) or as the package `tf_keras`. If only one wrapper needs a
fact about its Keras, the fact stands in that wrapper, beside the line that needs it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import sys
from typing import Any, Callable, Dict, Iterator, List, Tuple

import tensorflow as tf

from lossscale.runtime.aliases import Tensor, Variable

#: Why a Keras could not be imported, by the name of its package.
failures: Dict[str, Exception] = {}


def imported(name: str) -> Any:
    """Imports a package. Returns None if it is missing, or cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # if it does not fit another's version, any error
        failures[name] = error
        return None


def of_tensorflow() -> Any:
    """Returns tf.keras, None if it is missing or broken."""
    try:
        tf.keras.Model  # noqa: B018 - TensorFlow 2.16 and later import Keras only now
    except Exception as error:
        # Only the first error says why. Later, TensorFlow's loader just calls itself.
        failures.setdefault("tf.keras", error)
        return None
    return tf.keras


def is_keras3(keras: Any) -> bool:
    """Whether a Keras is Keras 3."""
    # Without a __version__ it is the tf.keras of TensorFlow 2.13 to 2.15, so Keras 2.
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

    This package does not import `tf_keras` itself, since that takes a second.
    """
    modules: Dict[Any, Any] = {}
    for keras in (of_tensorflow(), sys.modules.get("tf_keras")):
        if keras is not None and not is_keras3(keras):
            # Two names of the same Keras have the same LossScaleOptimizer.
            modules.setdefault(keras.mixed_precision.LossScaleOptimizer, keras)
    return tuple(modules.values())


def for_each_keras2(act: Callable[[Any], None]) -> None:
    """Calls `act` with each Keras 2: now, or as soon as it is imported."""
    before = keras2()
    for keras in before:
        act(keras)

    def come() -> None:
        keras2.cache_clear()
        for keras in set(keras2()) - set(before):
            act(keras)

    if "tf_keras" not in sys.modules:
        when_imported("tf_keras", come)


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Calls a function once, at the end of a package's first successful import."""
    watches = (finder for finder in sys.meta_path if isinstance(finder, _Watch))
    watch = next((watch for watch in watches if watch.name == name), None)
    if watch is None:
        watch = _Watch(name)
        sys.meta_path.insert(0, watch)
    watch.calls.append(call)


class _Watch(importlib.abc.MetaPathFinder):
    """Finds a package as the other finders do, and notices its import.

    There is one for each package: several would ask each other in every order.
    """

    def __init__(self, name: str) -> None:
        self.name, self._asks = name, False
        self.calls: List[Callable[[], None]] = []

    def find_spec(self, fullname: str, *_: Any) -> Any:
        if self._asks or fullname != self.name:
            return None
        self._asks = True  # only the other finders answer now
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader  # this object loads nothing else
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                if self in sys.meta_path:  # a program may have changed the list
                    sys.meta_path.remove(self)
                for call in self.calls:
                    call()

            loader.exec_module = exec_module
        return spec


def generations(keras: Any) -> List[Tuple[bool, type, type]]:
    """Yields of each generation: if it is legacy, Keras's wrapper, its base class."""
    public, newest = keras.mixed_precision.LossScaleOptimizer, keras.optimizers
    # Up to TensorFlow 2.8 the public class is the legacy wrapper itself. Later it is
    # the base class of both wrappers.
    if issubclass(public, newest.Optimizer):
        return [(True, public, newest.Optimizer)]
    spaces = [getattr(newest, name, newest) for name in ("legacy", "experimental")]
    triples = []
    bases = [space.Optimizer for space in (*spaces, newest)]
    for wrapper in public.__subclasses__():
        if wrapper.__module__ == public.__module__:  # no user's own
            base = next(base for base in bases if issubclass(wrapper, base))
            triples.append((not hasattr(base, "update_step"), wrapper, base))
    return sorted(triples, key=lambda generation: generation[0])


def installed() -> List[Any]:
    """Returns every Keras that can train here. The one that tf.keras is comes first."""
    older, newest, default = list(keras2()), keras3(), of_tensorflow()
    if newest is None:
        return older
    return [newest, *older] if is_keras3(default or newest) else [*older, newest]


class _AnyCallback:
    """A base class of callbacks that needs no Keras."""


def callback_class() -> Any:
    """Returns a class whose objects are callbacks of every Keras that is in use."""

    def bases() -> Tuple[Any, ...]:
        # Keras 2 comes first, since it checks whether a method is its own default.
        # Keras 3.3 does not check.
        keras_versions = [*keras2(), *filter(None, [keras3()])]
        return (*(keras.callbacks.Callback for keras in keras_versions), _AnyCallback)

    class Callback(*bases()):  # type: ignore[misc]
        def __init__(self) -> None:
            for base in bases():
                base.__init__(self)
            # Without this attribute Keras 2 passes a copy of its logs to the callbacks,
            # and reads a GPU's metrics after every batch. Up to TensorFlow 2.4 each
            # callback gets another copy.
            self._supports_tf_logs = True

        def set_model(self, model: Any) -> None:
            self._model = model

        # Keras 2 assigns `model`. In Keras 3 it is a property that cannot be assigned.
        model = property(lambda self: self._model, set_model, doc="The model.")

    def come(_: Any) -> None:
        # So objects that exist already are callbacks of that Keras, too. No Keras lets
        # other classes pass for its own, and only its class has the private methods
        # that its `fit` calls.
        Callback.__bases__ = bases()

    for_each_keras2(come)
    return Callback


def callbacks_beside(callback: Any) -> List[Any]:
    """Returns all callbacks of the `fit` that calls `callback` now, itself included."""
    # No Keras shows a callback the others, so they are read from its caller.
    lists = tuple(keras.callbacks.CallbackList for keras in installed())

    def is_list(caller: Any) -> bool:
        return isinstance(caller, lists) and callback in caller.callbacks

    local_names = frame_where(lambda at: is_list(at.get("self")))
    return list(local_names["self"].callbacks) if local_names else []


def frame_where(is_wanted: Callable[[Dict[str, Any]], bool]) -> Dict[str, Any]:
    """Returns the local names of the nearest caller that is wanted, else none."""
    frame = inspect.currentframe()
    while frame is not None:
        if is_wanted(frame.f_locals):
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def is_own_wrapper(optimizer: Any) -> bool:
    """Whether `optimizer` is a Keras's own `LossScaleOptimizer`."""
    wrappers = [wrapper for keras in keras2() for _, wrapper, _ in generations(keras)]
    if keras3() is not None:
        wrappers.append(keras3().optimizers.LossScaleOptimizer)
    return isinstance(optimizer, tuple(wrappers))


def held_by(optimizer: Any) -> Iterator[Tuple[Any, Any]]:
    """Yields an optimizer and what it holds, each once, after the one that holds it.

    It looks into other optimizers, lists and dicts.
    """
    seen, waiting = set(), [(optimizer, optimizer)]
    while waiting:
        part, thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        yield part, thing
        if hasattr(thing, "apply_gradients"):
            part, thing = thing, vars(thing)
        held = thing.values() if isinstance(thing, dict) else thing
        if isinstance(thing, (dict, list, tuple)):
            waiting.extend((part, each) for each in held)


def variable_name(variable: Variable) -> str:
    """Returns a variable's name for people, such as "dense/kernel"."""
    # Keras 3's `name` is only "kernel". Keras 2's ends in ":0".
    return str(getattr(variable, "path", variable.name)).split(":")[0]


def layers_of(model: Any) -> List[Any]:
    """Returns a model or layer and all layers within it at any depth, each once."""
    layers = {id(layer): layer for layer in model._flatten_layers()}  # in every Keras
    return list(layers.values())


def casts_inputs(layer: Any) -> bool:
    """Whether a layer casts its inputs to the dtype in which it computes."""
    # A functional model does not cast: its layers do. Of models only a Sequential can
    # `pop`. In Keras 2 the attribute is private.
    is_functional = getattr(layer, "inputs", None) and not hasattr(layer, "pop")
    casts = getattr(layer, "autocast", getattr(layer, "_autocast", True))
    return bool(casts and not is_functional)


def statistics_of(model: Any) -> List[Variable]:
    """Returns the floating-point variables that are not trained, without metrics."""
    # A metric that is an attribute of a model of Keras 2 is one of its layers.
    of_metrics = {id(v) for metric in model.metrics for v in metric.variables}
    return [
        variable
        for variable in model.non_trainable_weights
        if tf.as_dtype(variable.dtype).is_floating and id(variable) not in of_metrics
    ]


def state_of(model: Any) -> List[Variable]:
    """Returns the variables that a step may change: statistics, seeds, own ones."""
    variables = list(model.non_trainable_variables)
    for layer in layers_of(model):
        # Keras does not count a layer's `tf.random.Generator` among its variables. That
        # of Keras 2's layers is in an object of their own, which is not public.
        for holder in (layer, getattr(layer, "_random_generator", None)):
            for held in getattr(holder, "__dict__", {}).values():
                for value in held if isinstance(held, (list, tuple)) else [held]:
                    if isinstance(value, tf.random.Generator):
                        variables.append(value.state)
                    elif isinstance(value, tf.Variable):  # Keras 3 does not count it
                        variables.append(value)
    return list({id(variable): variable for variable in variables}.values())


def tensor_of(variable: Variable) -> Tensor:
    """Returns the object that a `tf.GradientTape` takes for a variable of any Keras."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def stored_dtype(variable: Variable) -> tf.DType:
    """Returns the dtype in which a variable of any Keras keeps its value."""
    # Within a layer's `call`, `dtype` is the one to which Keras 3 and tf_keras cast the
    # value. Keras 2 has `true_dtype` for the other. Keras 3 has no public way.
    if isinstance(variable, tf.Variable):
        return tf.as_dtype(getattr(variable, "true_dtype", variable.dtype))
    kept: Any = getattr(variable, "_value", variable)
    return tf.as_dtype(kept.dtype)


def with_mask(tensor: Tensor, other: Tensor) -> Tensor:
    """Returns a tensor that stands for another, with the mask that Keras keeps."""
    mask = getattr(other, "_keras_mask", None)  # private, the same in every Keras
    if mask is not None and tensor is not other:
        tensor._keras_mask = mask
    return tensor
