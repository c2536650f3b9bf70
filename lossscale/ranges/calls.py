"""Every call of a model's layers and operations, in eager mode."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Callable, Iterator, List, Optional, Tuple

import tensorflow as tf

from lossscale.ranges.magnitudes import floats_in
from lossscale.ranges.model_state import changed
from lossscale.runtime import keras_versions, op_callbacks
from lossscale.runtime.graphs import do_not_convert, is_building

#: Keras 2 wraps operations in these layers, whose constructors take no dtype.
_OPERATIONS = ("TFOpLambda", "SlicingOpLambda")
#: Packages whose layers create layers of their own, which a user only configures.
_LIBRARIES = {
    *("keras", "tf_keras", "tensorflow", "keras_hub", "keras_nlp", "keras_cv"),
    *("official", "tensorflow_addons", "tensorflow_models"),
}
#: Attributes of layers of a library that hold layers which the user creates.
_GIVEN = ("layers", "layer", "forward_layer", "cells")


class Call:
    """One call of a layer.

    Attributes:
      layer: The layer, or an operation between the layers of a functional model.
      parent: The call that this call is part of. None for the call of the model.
      outputs: The float tensors that it returned. Empty before it returns.
    """

    def __init__(self, layer: Any, parent: Optional[Call]) -> None:
        self.layer, self.parent = layer, parent
        self.outputs: List[Any] = []

    @property
    def around(self) -> List[Call]:
        return [] if self.parent is None else [self.parent, *self.parent.around]

    @property
    def path(self) -> str:
        """The names of the enclosing layers and of this one, as encoder/ffn_3."""
        names = [str(call.layer.name) for call in (self, *self.around)]
        return "/".join(reversed(names[:-1] or names))

    @property
    def is_layer(self) -> bool:
        """Whether this calls a layer, which takes a dtype, rather than an operation."""
        kind = type(self.layer).__name__
        return hasattr(self.layer, "_flatten_layers") and kind not in _OPERATIONS

    @property
    def is_of_library(self) -> bool:
        """Whether the layer's class comes from Keras or a library based on it."""
        return type(self.layer).__module__.split(".")[0] in _LIBRARIES

    @property
    def is_written_around_layers(self) -> bool:
        """Whether a user wrote the `call`, and it calls further layers."""
        return not self.is_of_library and len(keras_versions.layers_of(self.layer)) > 1

    @property
    def makes_layers(self) -> bool:
        """Whether this layer of a library makes the layers that it calls itself."""
        # The user gives a cell to an RNN. LSTM and the like create their own.
        is_rnn = type(self.layer).__name__ == "RNN"
        is_given = is_rnn or any(hasattr(self.layer, name) for name in _GIVEN)
        return self.is_of_library and not is_given

    @property
    def is_recurrent(self) -> bool:
        """Whether this is a loop over time around a cell."""
        return self.is_of_library and hasattr(self.layer, "cell")

    @property
    def dtype(self) -> str:
        dtype = getattr(self.layer, "compute_dtype", None)
        of_outputs = [tensor.dtype.name for tensor in self.outputs]
        return str(dtype or [*of_outputs, "float32"][0])

    @property
    def owner(self) -> Call:
        """The call of the layer whose constructor the user writes.

        Layers of a library create layers of their own: attention creates projections, a
        recurrent layer its cell, KerasHub's transformers their feed-forward networks.
        """
        above = self.parent
        if above is None or above.parent is None or not above.makes_layers:
            return self
        return above.owner


class Watcher:
    """Notes each call. A subclass may replace arguments and outputs."""

    #: Stands for the model around what its `train_step` calls.
    root: Optional[Call] = None
    #: Whether the context `watching` is open.
    is_watching = False

    def __init__(self) -> None:
        self._here = threading.local()
        #: In the order in which they returned, so inner calls come first.
        self.calls: List[Call] = []
        #: The innermost call that raised an error.
        self.failed: Optional[Call] = None

    @property
    def innermost(self) -> Optional[Call]:
        return getattr(self._here, "call", None)

    def begin(self, _: Call, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        """Notes a call that begins. Returns the arguments to call the layer with."""
        return args, kwargs

    def end(self, call: Call, outputs: Any) -> Any:
        """Notes the outputs of a call. Returns those that the call shall return."""
        call.outputs = floats_in(outputs)
        self.calls.append(call)
        return outputs

    def note_op(self, *_: Any, **__: Any) -> bool:
        """Notes an operation of eager mode. Returns whether to be told of the next."""
        return False

    @contextlib.contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Tells this object of each call in a model, also within `tf.function`s."""
        before = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)
        self.root, self.is_watching = Call(model, None), True
        layers = keras_versions.layers_of(model)
        # Only Keras 3 has operations. Keras 2 wraps them in layers.
        holders = [getattr(layer, "_functional", None) or layer for layer in layers]
        parts = [op for each in holders for op in getattr(each, "operations", ())]
        things = {id(thing): thing for thing in (*layers, *parts)}.values()
        calls = [(thing, "call", self._watched(thing)) for thing in things]
        try:
            with changed(calls):
                op_callbacks.add(self)
                yield
        finally:
            self.is_watching = False
            tf.config.run_functions_eagerly(before)

    def _watched(self, thing: Any) -> Callable[..., Any]:
        original = thing.call

        @do_not_convert
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_building():  # for example within a dataset's function
                return original(*args, **kwargs)
            around, root = self.innermost, self.root
            is_model = root is None or thing is root.layer
            self._here.call = this = Call(thing, around or (None if is_model else root))
            try:
                positional, named = self.begin(this, args, kwargs)
                return self.end(this, original(*positional, **named))
            except Exception:
                self.failed = self.failed or this
                raise
            finally:
                self._here.call = around

        return call


def copy_of(tensor: Any, come_back: Callable[[Any], Any], value: Any = None) -> Any:
    """Returns a copy of a tensor, whose gradient becomes what `come_back` returns.

    The copy has another value if one is given.
    """

    def copied(own: Any) -> Any:
        return tf.identity(own if value is None else value), come_back

    return keras_versions.with_mask(tf.custom_gradient(copied)(tensor), tensor)
