"""Lets a Keras model compute in float32 for a while, then puts all back as it was.

The model is not copied: not every model can be, and two would need twice the memory.
Until the context ends, its layers have a policy that computes in float32.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator, List, Sequence, Tuple

import tensorflow as tf

from lossscale.runtime import kerases
from lossscale.runtime.kerases import layers_of, state_of

#: The dtypes of 16 bits, by name.
SIXTEEN_BITS = ("float16", "bfloat16")
_MISSING = object()
#: An object, the name of an attribute, and the value to give it for a while.
Change = Tuple[Any, str, Any]


@contextlib.contextmanager
def in_float32(keras: Any, model: Any) -> Iterator[None]:
    """Lets every layer that computes in 16 bits compute in float32."""
    changes = _to(keras, model, "float32", SIXTEEN_BITS)
    for layer in layers_of(model):
        changes += _inputs(layer)
    with changed(changes):
        yield


@contextlib.contextmanager
def in_float16(keras: Any, model: Any) -> Iterator[bool]:
    """Lets layers compute in float16. Yields whether any layer does.

    Layers in bfloat16 change to float16. Layers in float32 change only if the whole
    model is in float32, since one float32 layer among 16-bit layers is intended. In
    Keras 2 they never change: variables there keep the dtype they were created with.
    """
    dtypes = {layer.compute_dtype for layer in layers_of(model)}
    from_dtypes = ["bfloat16"]
    if kerases.is_keras3(keras) and not dtypes & set(SIXTEEN_BITS):
        from_dtypes.append("float32")
    with changed(_to(keras, model, "mixed_float16", from_dtypes)):
        yield any(layer.compute_dtype == "float16" for layer in layers_of(model))


def _to(keras: Any, model: Any, name: str, from_dtypes: Sequence[str]) -> List[Change]:
    """Returns the changes that give a policy to layers that compute in some dtypes."""
    policy = keras.mixed_precision.Policy(name)
    changes: List[Change] = []
    for layer in layers_of(model):
        if _quantized(layer) or layer.compute_dtype not in from_dtypes:
            continue
        # Every Keras has this private name. Keras 2 keeps the dtype a second time (seen
        # on 2.4 to 2.21, Keras 3.3 to 3.15).
        changes.append((layer, "_dtype_policy", policy))
        if "_compute_dtype_object" in vars(layer):
            dtype = tf.as_dtype(policy.compute_dtype)
            changes.append((layer, "_compute_dtype_object", dtype))
    return changes


def _quantized(layer: Any) -> bool:
    # A quantized policy of Keras 3 says more than dtypes, so it must not be replaced.
    policy = getattr(layer, "_dtype_policy", None)
    return getattr(policy, "quantization_mode", None) is not None


def _inputs(layer: Any) -> Iterator[Change]:
    # Keras 3's functional models cast their arguments to the dtype of their inputs.
    # That is float16 in a Sequential model without Input, and up to Keras 3.3 in all
    # models (seen on Keras 3.3 to 3.15).
    functional = getattr(layer, "_functional", None) or layer
    inputs = tf.nest.flatten(getattr(functional, "inputs", None) or [])
    for one in (layer, *inputs):  # an InputLayer has the dtype, too
        for name in ("_dtype", "dtype"):
            if vars(one).get(name) in SIXTEEN_BITS:
                yield one, name, "float32"


@contextlib.contextmanager
def outputs_of_layers(model: Any) -> Iterator[List[Tuple[Any, Any]]]:
    """Yields a list to which each layer's call adds pairs: the layer, a float output.

    If several layers return the same tensor, only the innermost is in the list.
    """
    found: List[Tuple[Any, Any]] = []
    layers = [layer for layer in layers_of(model) if layer is not model]
    with changed([(layer, "call", _noting(layer, found)) for layer in layers]):
        yield found


def _noting(layer: Any, found: List[Tuple[Any, Any]]) -> Callable[..., Any]:
    call = layer.call

    @functools.wraps(call)
    def noting(*args: Any, **kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        inner = {id(tensor) for _, tensor in found}
        for tensor in tf.nest.flatten(outputs):
            is_float = tf.is_tensor(tensor) and tensor.dtype.is_floating
            if is_float and id(tensor) not in inner:
                found.append((layer, tensor))
        return outputs

    return noting


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Undoes the changes of a forward pass in training: statistics, seeds, metrics."""
    saved = [(variable, variable.numpy()) for variable in _variables(model)]
    before = {id(metric) for metric in model.metrics}
    try:
        yield
    finally:
        for variable, value in saved:
            variable.assign(value)
        for metric in model.metrics:
            if id(metric) not in before:  # the first computation of the loss created it
                getattr(metric, "reset_state", None) or metric.reset_states()


def _variables(model: Any) -> List[Any]:
    found = [*model.variables, *state_of(model)]
    for metric in model.metrics:
        found += metric.variables
    return list({id(variable): variable for variable in found}.values())


@contextlib.contextmanager
def changed(changes: List[Change]) -> Iterator[None]:
    """Sets attributes without Keras's tracking, and sets them back at the end."""
    before = [(one, name, vars(one).get(name, _MISSING)) for one, name, _ in changes]
    try:
        for one, name, value in changes:
            object.__setattr__(one, name, value)
        yield
    finally:
        for one, name, value in reversed(before):
            if value is _MISSING:
                object.__delattr__(one, name)
            else:
                object.__setattr__(one, name, value)
