"""Every call of a layer in eager mode, from the outermost to the innermost."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator, List, Optional, Protocol, Tuple

import tensorflow as tf

from lossscale.ranges.float32_model import changed
from lossscale.runtime import kerases
from lossscale.runtime.graphs import is_building

#: Keras 2 wraps operations in these layers, whose constructors take no dtype.
_OPERATIONS = ("TFOpLambda", "SlicingOpLambda")
#: Packages whose layers create layers of their own, which a user only configures.
_LIBRARIES = {
    *("keras", "tf_keras", "tensorflow", "keras_hub", "keras_nlp", "keras_cv"),
    *("official", "tensorflow_addons", "tensorflow_models"),
}


class Call:
    """One call of a layer.

    Attributes:
      layer: The layer, or an operation between the layers of a functional model.
      parent: The call that this call is part of. None for the call of the model.
      inputs: The float tensors among its arguments.
      outputs: The float tensors that it returned. Empty before it returns.
    """

    def __init__(self, layer: Any, parent: Optional[Call]) -> None:
        self.layer, self.parent = layer, parent
        self.inputs: List[Any] = []
        self.outputs: List[Any] = []

    @property
    def path(self) -> str:
        """The names of the enclosing layers and of this one, as encoder/ffn_3."""
        if self.parent is None:
            return str(self.layer.name)
        inside = self.parent.parent is not None
        return f"{self.parent.path}/{self.layer.name}" if inside else self.layer.name

    @property
    def is_layer(self) -> bool:
        """Whether this calls a layer, which takes a dtype, rather than an operation."""
        is_layer = hasattr(self.layer, "_flatten_layers")
        return is_layer and type(self.layer).__name__ not in _OPERATIONS

    @property
    def dtype(self) -> str:
        """The name of the dtype that the layer computes in."""
        found = getattr(self.layer, "compute_dtype", None)
        if found is None:
            found = self.outputs[0].dtype.name if self.outputs else "float32"
        return str(found)

    @property
    def owner(self) -> Call:
        """The call of the layer whose constructor the user writes.

        Layers of a library create layers of their own: attention creates projections, a
        recurrent layer its cell, KerasHub's transformers their feed-forward networks.
        """
        above = self.parent
        if above is None or above.parent is None:
            return self
        wraps = hasattr(above.layer, "layers") or hasattr(above.layer, "layer")
        is_made_by_user = wraps or not _of_library(above)
        return self if is_made_by_user else above.owner

    def is_within(self, other: Call) -> bool:
        """Tells whether this call is part of another, at any depth."""
        above = self.parent
        while above is not None and above is not other:
            above = above.parent
        return above is other


def _of_library(call: Call) -> bool:
    return type(call.layer).__module__.split(".")[0] in _LIBRARIES


class Watcher(Protocol):
    """Watches calls of layers. It may replace their arguments and outputs."""

    def begin(self, call: Call, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        """Notes a call that begins. Returns the arguments to call the layer with."""

    def end(self, call: Call, outputs: Any) -> Any:
        """Notes the outputs of a call. Returns those that the call shall return."""


class CallStack:
    """The calls that run now, the innermost last."""

    def __init__(self) -> None:
        self._open: List[Call] = []

    @property
    def innermost(self) -> Optional[Call]:
        """The innermost call that runs now, None outside of the model."""
        return self._open[-1] if self._open else None

    @contextlib.contextmanager
    def watched_by(self, watcher: Watcher, model: Any) -> Iterator[None]:
        """Tells a watcher of each call in a model, and restores the layers at the end.

        Meanwhile `tf.function`s run eagerly, since a layer may have compiled its call.
        """
        changes = [
            (thing, "call", self._watched(thing, watcher)) for thing in things_of(model)
        ]
        were_eager = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)
        try:
            with changed(changes):
                yield
        finally:
            tf.config.run_functions_eagerly(were_eager)

    def _watched(self, thing: Any, watcher: Watcher) -> Callable[..., Any]:
        original = thing.call

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if is_building():  # for example within a dataset's function
                return original(*args, **kwargs)
            this = Call(thing, self.innermost)
            self._open.append(this)
            try:
                args, kwargs = watcher.begin(this, args, kwargs)
                return watcher.end(this, original(*args, **kwargs))
            finally:
                self._open.pop()

        return watched


def floats_in(nest: Any) -> List[Any]:
    """Returns the dense float tensors in any nest."""
    return [
        each
        for each in tf.nest.flatten(nest)
        if isinstance(each, tf.Tensor) and each.dtype.is_floating
    ]


def things_of(model: Any) -> List[Any]:
    """Returns the model, its layers, and the operations between them."""
    found = {id(layer): layer for layer in kerases.layers_of(model)}
    for layer in list(found.values()):
        # Only Keras 3 has operations. Keras 2 wraps them in layers.
        inner = getattr(layer, "_functional", None) or layer
        for each in getattr(inner, "operations", ()):
            found.setdefault(id(each), each)
    return list(found.values())
