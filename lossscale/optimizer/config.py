"""The wrapper as a config, and back."""

from __future__ import annotations

import inspect
from typing import Any, Dict, Optional

import numpy as np
import tensorflow as tf

from lossscale.optimizer import keras_arguments, keras_state, wrappers
from lossscale.scales import serialization


class Configurable:
    """What can be written as a config: the constructor's arguments."""

    name: str
    loss_scale: Any
    _communication_dtype: Optional[str]

    @classmethod
    def from_config(
        cls, config: Dict[str, Any], custom_objects: Optional[Dict[str, Any]] = None
    ) -> Any:
        """Returns a new optimizer from `get_config`'s result.

        Args:
          config: The config, or one of Keras 2's, Keras 3's or TensorFlow 2.0 to 2.3's
            own wrapper. Its inner optimizer says which Keras it belongs to.
          custom_objects: Classes of your own by name, registered ones excepted.

        Raises:
          TypeError: `config` is none of these.
        """
        config = keras_arguments.config_as_ours(config)
        wrapper: Any = wrappers.for_config(config) if wrappers.is_open(cls) else cls
        # Keras 2 writes into what it deserializes: the caller's own would change.
        config = dict(tf.nest.map_structure(lambda leaf: leaf, config))
        inner = wrapper._deserialize_inner(
            config.pop("inner_optimizer"), custom_objects
        )
        loss_scale = config.pop("loss_scale")
        if isinstance(loss_scale, dict):
            loss_scale = serialization.deserialize(loss_scale, custom_objects)
        return cls._of(inner, loss_scale, config)

    @classmethod
    def _of(cls, inner: Any, loss_scale: Any, others: Dict[str, Any]) -> Any:
        """Returns a new optimizer, also of a class that takes Keras's own arguments."""
        asked = wrappers.asked_class(cls)
        names = set(inspect.signature(asked).parameters)
        if "loss_scale" in names or not names & {*keras_arguments.OF_THE_SCALE}:
            return asked(inner, loss_scale, **others)
        # Derived from a Keras's own wrapper once, and from ours now.
        found: Any = serialization.get(loss_scale)
        theirs = keras_arguments.as_theirs(found)
        given = {**others, **theirs}
        return asked(inner, **{n: v for n, v in given.items() if n in names})

    @classmethod
    def from_keras(cls, optimizer: Any) -> Any:
        """Returns an optimizer that goes on where a Keras's own wrapper is.

        With the same inner optimizer, in the middle of a run as well, before it is
        built or after. Use Keras's wrapper no longer: it would move the weights too.
        Call it eagerly, and in the scope of the strategy that the model is trained
        with:

        ```
        optimizer = lossscale.LossScaleOptimizer.from_keras(model.optimizer)
        model.compile(optimizer, loss="mse")
        ```

        Args:
          optimizer: A `LossScaleOptimizer` of Keras 2 or of Keras 3 itself.

        Returns:
          A `LossScaleOptimizer` around `optimizer.inner_optimizer`, with the same loss
          scale, the same count of finite steps, and the same arguments.

        Raises:
          TypeError: `optimizer` is not a loss scale wrapper of a Keras.
          ValueError: Its loss scale is zero or infinite by now, as Keras 3's may be.
          RuntimeError: Called in a graph, where its state cannot be read.
        """
        wrappers.check_keras_own(optimizer)
        loss_scale = keras_state.loss_scale_of(optimizer)
        inner = optimizer.inner_optimizer
        wrappers.for_optimizer(inner)._release(inner)
        return cls._of(inner, loss_scale, {})

    @classmethod
    def _release(cls, inner_optimizer: Any) -> None:
        """Takes from an inner optimizer what its wrapper has left on it."""
        wrappers.mark(inner_optimizer, wrapped=False)

    @classmethod
    def _deserialize_inner(cls, config: Any, custom_objects: Any) -> Any:
        raise NotImplementedError

    def get_config(self) -> Dict[str, Any]:
        """Returns the constructor's arguments, in a form that JSON can hold."""
        config = {
            "name": self.name,
            "inner_optimizer": self._serialize_inner(),
            "loss_scale": serialization.serialize(self.loss_scale),
        }
        config.update(self._own_options())
        # Keras 2's configs hold NumPy scalars, which JSON does not.
        return dict(tf.nest.map_structure(_plain, config))

    def _own_options(self) -> Dict[str, Any]:
        """Returns the arguments that were given beyond those of every version.

        Releases from before these arguments read the configs that do not need them.
        """
        dtype = self._communication_dtype
        return {} if dtype is None else {"communication_dtype": dtype}

    def _serialize_inner(self) -> Dict[str, Any]:
        raise NotImplementedError


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
