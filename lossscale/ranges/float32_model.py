"""A Keras model that computes in float32 for a while, and is left as it was found.

No copy of the model is made: not every model can be copied, and a copy would need the
memory of two. Its layers are told to compute in float32 until the context ends.
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
#: An object, the name of its attribute, and the value that it has for a while.
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
    """Lets layers compute in float16. Yields whether any does.

    Those of bfloat16 do, and those of float32 if the whole model is in float32: what a
    layer is given beside others in 16 bits is meant to be. Not in Keras 2, whose
    variables know their dtype since they were made.
    """
    dtypes = {layer.compute_dtype for layer in layers_of(model)}
    from_dtypes = ["bfloat16"]
    if kerases.is_keras3(keras) and not dtypes & set(SIXTEEN_BITS):
        from_dtypes.append("float32")
    with changed(_to(keras, model, "mixed_float16", from_dtypes)):
        yield any(layer.compute_dtype == "float16" for layer in layers_of(model))


def _to(keras: Any, model: Any, name: str, from_dtypes: Sequence[str]) -> List[Change]:
    """Returns what gives a policy to all layers that compute in some dtypes."""
    policy = keras.mixed_precision.Policy(name)
    changes: List[Change] = []
    for layer in layers_of(model):
        if _quantized(layer) or layer.compute_dtype not in from_dtypes:
            continue
        # Private, of every Keras; Keras 2 keeps the dtype a second time (seen on 2.4
        # to 2.21, Keras 3.3 to 3.15).
        changes.append((layer, "_dtype_policy", policy))
        if "_compute_dtype_object" in vars(layer):
            dtype = tf.as_dtype(policy.compute_dtype)
            changes.append((layer, "_compute_dtype_object", dtype))
    return changes


def _quantized(layer: Any) -> bool:
    # A policy of Keras 3 that stands for more than dtypes.
    policy = getattr(layer, "_dtype_policy", None)
    return getattr(policy, "quantization_mode", None) is not None


def _inputs(layer: Any) -> Iterator[Change]:
    # Keras 3's functional models cast what they are given to the dtype of their inputs.
    # That is float16 in a Sequential model without Input, and up to Keras 3.3 in all
    # (seen on Keras 3.3 to 3.15).
    functional = getattr(layer, "_functional", None) or layer
    inputs = tf.nest.flatten(getattr(functional, "inputs", None) or [])
    for one in (layer, *inputs):  # an InputLayer says it too
        for name in ("_dtype", "dtype"):
            if vars(one).get(name) in SIXTEEN_BITS:
                yield one, name, "float32"


@contextlib.contextmanager
def outputs_of_layers(model: Any) -> Iterator[List[Tuple[Any, Any]]]:
    """Yields a list that every layer's call adds to: the layer, and each float output.

    Of several layers that return the same tensor only the innermost is in it.
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
    """Puts back what training's forward pass changes: statistics, seeds, metrics."""
    saved = [(variable, variable.numpy()) for variable in _variables(model)]
    before = {id(metric) for metric in model.metrics}
    try:
        yield
    finally:
        for variable, value in saved:
            variable.assign(value)
        for metric in model.metrics:
            if id(metric) not in before:  # made by the first computation of the loss
                getattr(metric, "reset_state", None) or metric.reset_states()


def _variables(model: Any) -> List[Any]:
    found = [*model.variables, *state_of(model)]
    for metric in model.metrics:
        found += metric.variables
    return list({id(variable): variable for variable in found}.values())


@contextlib.contextmanager
def changed(changes: List[Change]) -> Iterator[None]:
    """Sets attributes past Keras's own tracking, and sets them back."""
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
