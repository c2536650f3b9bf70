"""Changes a Keras model for a while, and leaves it exactly as it was.

The model is not copied: not every model can be, and two would need twice the memory.
Until a context ends, its layers have another policy or other methods.
"""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Iterator, List, Sequence, Tuple

import tensorflow as tf

from lossscale.runtime import keras_versions, random_streams
from lossscale.runtime.keras_versions import layers_of, state_of

#: The dtypes of 16 bits, by name.
SIXTEEN_BITS = ("float16", "bfloat16")
_MISSING = object()
#: An object, the name of an attribute, and the value to give it for a while.
Change = Tuple[Any, str, Any]


@contextlib.contextmanager
def changed(changes: List[Change]) -> Iterator[None]:
    """Sets attributes without Keras's tracking, and sets them back at the end."""
    before = [
        (target, name, vars(target).get(name, _MISSING)) for target, name, _ in changes
    ]
    try:
        for target, name, value in changes:
            object.__setattr__(target, name, value)
        yield
    finally:
        for target, name, value in reversed(before):
            if value is _MISSING:
                object.__delattr__(target, name)
            else:
                object.__setattr__(target, name, value)


def in_float32(keras: Any, layers: List[Any]) -> ContextManager[None]:
    """Lets those of some layers that compute in 16 bits compute in float32."""
    inputs = [change for layer in layers for change in _inputs(layer)]
    return changed([*_to(keras, layers, "float32", SIXTEEN_BITS), *inputs])


@contextlib.contextmanager
def in_float16(keras: Any, model: Any) -> Iterator[bool]:
    """Lets layers compute in float16. Yields whether any layer does.

    Layers in bfloat16 change to float16. Layers in float32 change only if the whole
    model is in float32, since one float32 layer among 16-bit layers is intended. In
    Keras 2 they never change: variables there keep the dtype they were created with.
    """
    layers = layers_of(model)
    from_dtypes = ["bfloat16"]
    if keras_versions.is_keras3(keras) and all_in_float32(model):
        from_dtypes.append("float32")
    with changed(_to(keras, layers, "mixed_float16", from_dtypes)):
        yield any(layer.compute_dtype == "float16" for layer in layers)


def all_in_float32(model: Any) -> bool:
    """Whether no layer of a model computes in 16 bits."""
    return not any(layer.compute_dtype in SIXTEEN_BITS for layer in layers_of(model))


def _to(
    keras: Any, layers: List[Any], name: str, from_dtypes: Sequence[str]
) -> List[Change]:
    """Returns the changes that give a policy to layers that compute in some dtypes."""
    policy = keras.mixed_precision.Policy(name)
    changes: List[Change] = []
    for layer in layers:
        # A quantized policy of Keras 3 says more than dtypes: it must not be replaced.
        before = getattr(layer, "_dtype_policy", None)
        is_quantized = getattr(before, "quantization_mode", None) is not None
        if is_quantized or layer.compute_dtype not in from_dtypes:
            continue
        # Every Keras has this private name. Keras 2 keeps the dtype a second time.
        changes.append((layer, "_dtype_policy", policy))
        if "_compute_dtype_object" in vars(layer):
            dtype = tf.as_dtype(policy.compute_dtype)
            changes.append((layer, "_compute_dtype_object", dtype))
    return changes


def _inputs(layer: Any) -> Iterator[Change]:
    # Keras 3's functional models cast their arguments to the dtype of their inputs.
    # That is float16 in a Sequential model without Input, and up to Keras 3.3 in all
    # models.
    functional = getattr(layer, "_functional", None) or layer
    inputs = tf.nest.flatten(getattr(functional, "inputs", None) or [])
    for target in (layer, *inputs):  # an InputLayer has the dtype, too
        for name in ("_dtype", "dtype"):
            if vars(target).get(name) in SIXTEEN_BITS:
                yield target, name, "float32"


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Undoes changes of a model's statistics, seeds and metrics, and random streams."""
    variables = [*model.variables, *state_of(model)]
    for metric in model.metrics:
        variables += metric.variables
    saved = [(v, v.numpy()) for v in {id(v): v for v in variables}.values()]
    ids = {id(metric) for metric in model.metrics}
    # Keras 2 makes metrics with the first loss. It would log those over the loss that a
    # `train_step` returns.
    names = ("compiled_loss", "compiled_metrics")
    containers = [vars(model)[name] for name in names if vars(model).get(name)]
    lazy = [(vars(container), dict(vars(container))) for container in containers]
    # A `train_step` may count in Python. Keras 2 counts the draws of some layers there.
    layers = layers_of(model)
    generators = [getattr(layer, "_random_generator", None) for layer in layers]
    counted = [
        (holder, name, value)
        for holder in (*layers, *generators)
        for name, value in getattr(holder, "__dict__", {}).items()
        if isinstance(value, (int, float)) and (name == "_seed" or name[0] != "_")
    ]
    try:
        with random_streams.unchanged():
            yield
    finally:
        for holder, name, value in counted:
            is_number = type(vars(holder).get(name)) is type(value)
            if is_number and name != "built":
                object.__setattr__(holder, name, value)
        for variable, value in saved:
            variable.assign(value)
        for metric in model.metrics:
            if id(metric) not in ids:  # the first computation of the loss created it
                reset = getattr(metric, "reset_state", None) or metric.reset_states
                reset()
        for attributes, before in lazy:
            attributes.clear()
            attributes.update(before)
