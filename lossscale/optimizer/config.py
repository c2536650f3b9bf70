"""Turns a wrapper into a config, and configs into a wrapper."""

from __future__ import annotations

import inspect
from typing import Any, Dict, Optional

import numpy as np
import tensorflow as tf

from lossscale.optimizer import keras_arguments, keras_state, wrappers
from lossscale.scales import serialization


class Configurable:
    """A wrapper's configs: dicts of its constructor's arguments."""

    name: str
    loss_scale: Any
    _communication_dtype: Optional[str]

    @classmethod
    def from_config(
        cls, config: Dict[str, Any], custom_objects: Optional[Dict[str, Any]] = None
    ) -> Any:
        """Returns a new optimizer from a config.

        Args:
          config: What `get_config` of this wrapper returned, or of the wrapper of
            Keras 2, of Keras 3 or of TensorFlow 2.0 to 2.3. The inner optimizer's
            config decides which Keras the new optimizer belongs to.
          custom_objects: Your own classes by name. Registered classes need no entry.

        Raises:
          TypeError: `config` is none of these.
        """
        config = keras_arguments.config_as_ours(config)
        wrapper: Any = wrappers.for_config(config) if wrappers.is_open(cls) else cls
        # Keras 2 changes the config that it deserializes. The caller's stays as it is.
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
        """Returns a new optimizer.

        The constructor of a user's class may take Keras's own arguments in the place of
        `loss_scale`.
        """
        asked = wrappers.asked_class(cls)
        names = set(inspect.signature(asked).parameters)
        if "loss_scale" in names or not names & {*keras_arguments.OF_THE_SCALE}:
            return asked(inner, loss_scale, **others)
        # The user's class derived from Keras's own wrapper once, and from ours now.
        found: Any = serialization.get(loss_scale)
        theirs = keras_arguments.as_theirs(found)
        given = {**others, **theirs}
        return asked(inner, **{n: v for n, v in given.items() if n in names})

    @classmethod
    def from_keras(
        cls, optimizer: Any, *, communication_dtype: Optional[str] = None
    ) -> Any:
        """Returns an optimizer that goes on where Keras's own wrapper is.

        The new optimizer takes over the inner optimizer. You may convert in the middle
        of a run, before or after the optimizer is built. Do not use Keras's wrapper
        after this call: it would change the same weights. Call `from_keras` eagerly,
        in the scope of the strategy that trains the model:

        ```
        optimizer = lossscale.LossScaleOptimizer.from_keras(model.optimizer)
        model.compile(optimizer, loss="mse")
        ```

        Args:
          optimizer: Keras's own `LossScaleOptimizer`, of Keras 2 or of Keras 3.
          communication_dtype: As in the constructor.

        Returns:
          A `LossScaleOptimizer` around `optimizer.inner_optimizer`, with the same loss
          scale, the same count of finite steps, and the same arguments.

        Raises:
          TypeError: `optimizer` is not Keras's own `LossScaleOptimizer`.
          ValueError: Its loss scale has become zero or infinite, as Keras 3's can.
          RuntimeError: You called it in a graph, which cannot read the state.
        """
        wrappers.check_keras_own(optimizer)
        loss_scale = keras_state.loss_scale_of(optimizer)
        inner = optimizer.inner_optimizer
        wrappers.for_optimizer(inner)._release(inner)
        given = {"communication_dtype": communication_dtype}
        others = {} if communication_dtype is None else given
        return cls._of(inner, loss_scale, others)

    @classmethod
    def _release(cls, inner_optimizer: Any) -> None:
        """Removes the marks that a wrapper has left on its inner optimizer."""
        wrappers.mark(inner_optimizer, wrapped=False)

    @classmethod
    def _deserialize_inner(cls, config: Any, custom_objects: Any) -> Any:
        raise NotImplementedError

    def get_config(self) -> Dict[str, Any]:
        """Returns the constructor's arguments as a dict that JSON can hold."""
        config = {
            "name": self.name,
            "inner_optimizer": self._serialize_inner(),
            "loss_scale": serialization.serialize(self.loss_scale),
        }
        config.update(self._own_options())
        # Keras 2's configs hold NumPy scalars, which JSON cannot hold.
        return dict(tf.nest.map_structure(_plain, config))

    def _own_options(self) -> Dict[str, Any]:
        """Returns the arguments that older releases do not know, if they are set.

        So older releases can read every config that does not need these arguments.
        """
        dtype = self._communication_dtype
        return {} if dtype is None else {"communication_dtype": dtype}

    def _serialize_inner(self) -> Dict[str, Any]:
        raise NotImplementedError


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
