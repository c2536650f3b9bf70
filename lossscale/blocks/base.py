"""ScaledBlock: what the blocks of all Kerases have in common."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple

import tensorflow as tf

from lossscale import arguments
from lossscale.blocks import backward, signatures
from lossscale.blocks.outside import Outside
from lossscale.runtime import kerases, replicas
from lossscale.runtime.autograph import as_written
from lossscale.runtime.registry import PerKeras

_blocks = PerKeras()
#: Makes the decorated class the block of the layers of a class.
block_of = _blocks.takes
#: What a block has of its own, whatever its layer has.
_FIXED = ("dtype", "dtype_policy", "autocast")


class ScaledBlock:
    """A layer whose gradients are computed at a scale of their own.

    One loss scale serves gradients that lie within float16's 40 doublings. Those of a
    deep network can lie further apart: then the last blocks overflow before the first
    ones have any gradient. Around each block, a `ScaledBlock` fits the gradients into
    float16 anew:

    ```
    x = x + lossscale.ScaledBlock(keras.Sequential([norm, dense]))(x)
    ```

    Forward it is the layer, with its result in `float32`. Backward:

    ```
    scale = the power of two that brings the largest of the gradients that come in
            to 65504 / 2**headroom
    the layer's gradients, computed in float16 from the gradients times scale
    up to three times, while these are not finite although what came in is:
      scale = scale / 2**8, and again
    inputs' and weights' gradients / scale, in float32
    ```

    True gradients leave the block, in `float32`. So nothing outside needs to know of
    it: it works with any optimizer, with or without a loss scale, and on replicas, each
    of which has its own scales. It keeps no state.

    Arguments have their gradients, and so have the tensors that attributes of the layer
    hold, as after `layer.w = v * 2.0`. Others that it reads must be arguments.

    What is between blocks should be `float32`, as the sum above is: a gradient that
    goes through float16 there is rounded to zero as without blocks. A layer that does
    not compute in float16 is called as it is.

    Args:
      layer: A layer or model of any Keras, called with any nests of arguments.
      headroom: How many doublings below float16's 65504 the largest of the gradients
        that come in is. So much larger may gradients become within the block before it
        is tried again.
      recompute: Whether the backward pass computes the layer's forward pass again, and
        keeps nothing of the first one, as `tf.recompute_grad` does.
      **kwargs: `name`, and what else each layer of that Keras takes but dtypes.

    Raises:
      TypeError: `layer` is no layer of a Keras that computes with TensorFlow, or
        another argument has the wrong type.
      ValueError: `layer` is a ScaledBlock, or `headroom` is out of range. When it is
        called: it has synchronized batch normalization, on several replicas, or reads a
        tensor from elsewhere that a tape wants a gradient of.

    Source: Ramesh et al., "Zero-Shot Text-to-Image Generation" (arXiv 2102.12092),
    section 2.4 and appendix D: a scale per residual block. Theirs is kept and adjusted
    as a loss scale is; this one is read off the gradients.
    """

    layer: Any
    headroom: int
    recompute: bool
    #: What `gradient_ranges` knows a block by.
    has_own_scale = True
    #: Whether the forward pass that runs now is within the backward pass.
    _is_recomputing = False

    def __new__(cls, layer: Any = None, *_: Any, **__: Any) -> Any:
        """Picks the class for the Keras that `layer` belongs to."""
        # Copying calls it without arguments, on a class of one Keras.
        return super().__new__(for_layer(layer) if cls is ScaledBlock else cls)

    def __init__(
        self, layer: Any, headroom: int = 6, recompute: bool = False, **kwargs: Any
    ) -> None:
        _check_layer(layer, type(self))
        headroom = arguments.count("headroom", headroom, least=0, most=24)
        arguments.boolean("recompute", recompute)
        for name in _FIXED:
            if name in kwargs:
                raise ValueError(
                    f"`{name}` must not be given, got {kwargs[name]!r}. A block takes "
                    "and returns float32. Give it to the layer within."
                )
        # Before Keras's own constructor, which reads what it can be called with.
        object.__setattr__(self, "call", self._call_of(layer))
        super().__init__(dtype="float32", autocast=False, **kwargs)  # type: ignore[call-arg]
        self.layer = layer
        self.headroom = headroom
        self.recompute = recompute
        self.supports_masking = True

    def _call_of(self, layer: Any) -> Callable[..., Any]:
        takes_training = signatures.has(layer.call, "training")

        @as_written
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(args, kwargs, takes_training)

        call.__signature__ = signatures.with_training(layer.call)  # type: ignore[attr-defined]
        return call

    def _call(
        self, args: Tuple[Any, ...], kwargs: Dict[str, Any], takes_training: bool
    ) -> Any:
        training = kwargs.get("training")
        if not takes_training:
            kwargs.pop("training", None)
        layers = kerases.layers_of(self.layer)
        is_plain = all(layer.compute_dtype != "float16" for layer in layers)
        if is_plain or self._is_recomputing:
            return self.layer(*args, **kwargs)
        _refuse_synchronized(layers)
        outside = Outside(layers)
        again = self._again(training, outside) if self.recompute else None
        return backward.call(
            self.layer, args, kwargs, self.headroom, outside, again=again
        )

    def _again(self, training: Any, outside: Outside) -> Callable[..., Any]:
        """Returns what calls the layer again, with its state as it is now.

        Through the block's own `__call__`, from which layers within take `training`.
        """
        state = kerases.state_of(self.layer)
        before = [tf.identity(kerases.tensor_of(variable)) for variable in state]

        def again(*args: Any, **kwargs: Any) -> Any:
            after = [tf.identity(kerases.tensor_of(variable)) for variable in state]
            _assign(state, before)
            object.__setattr__(self, "_is_recomputing", True)
            try:
                own_call: Any = self.__call__  # type: ignore[operator]
                with outside.as_it_was():
                    return own_call(*args, **{**kwargs, "training": training})
            finally:
                object.__setattr__(self, "_is_recomputing", False)
                _assign(state, after)

        return again

    def build(self, *args: Any, **kwargs: Any) -> None:
        """Builds the layer, if shapes are given. Else it is built when it is called."""
        if (args or kwargs) and not self.layer.built:
            self.layer.build(*args, **kwargs)
        self.built = True

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the layer's."""
        return self.layer.compute_output_shape(*args, **kwargs)

    def compute_mask(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the layer's, None if that does not support masking."""
        if not self.layer.supports_masking:
            return None
        return self.layer.compute_mask(*args, **kwargs)

    def get_config(self) -> Dict[str, Any]:
        """Returns the constructor's arguments, in a form that JSON can hold."""
        config = {
            **super().get_config(),  # type: ignore[misc]
            "layer": self._serialize(self.layer),
            "headroom": self.headroom,
            "recompute": self.recompute,
        }
        return {name: value for name, value in config.items() if name not in _FIXED}

    @classmethod
    def from_config(cls, config: Dict[str, Any], custom_objects: Any = None) -> Any:
        """Returns a new block from `get_config`'s result.

        Args:
          config: The config.
          custom_objects: Classes of your own by name, registered ones excepted.
        """
        others = {name: value for name, value in config.items() if name != "layer"}
        others.pop("dtype", None)
        wanted = [kind for _, kind in _blocks.pairs] if cls is ScaledBlock else [cls]
        layer = wanted[0]._deserialize(config["layer"], custom_objects)
        return cls(layer, **others)

    @staticmethod
    def _serialize(layer: Any) -> Dict[str, Any]:
        raise NotImplementedError

    @staticmethod
    def _deserialize(config: Any, custom_objects: Any) -> Any:
        raise NotImplementedError


def for_layer(layer: Any) -> Any:
    """Returns the class of a block around `layer`.

    Raises:
      TypeError: It is not a layer of a Keras that computes with TensorFlow.
    """
    block = _blocks.class_for(layer)
    if block is not None:
        return block
    raise TypeError(
        "`layer` must be a Keras layer or model on the TensorFlow backend, got "
        f"{arguments.shown(layer)} of type {type(layer).__name__}. Pass an object such "
        "as keras.layers.Dense(8)."
    )


def _check_layer(layer: Any, block: type) -> None:
    right = for_layer(layer)
    if isinstance(layer, ScaledBlock):
        raise ValueError(
            f"`layer` must not be a ScaledBlock, got {layer!r}. Give it that one's "
            ".layer."
        )
    if not issubclass(block, right):
        raise TypeError(
            f"`layer` must belong to the Keras of {block.__name__}, got {layer!r}. Use "
            "lossscale.ScaledBlock, which picks."
        )


def _assign(variables: List[Any], values: List[Any]) -> None:
    for variable, value in zip(variables, values):
        variable.assign(value)


def _refuse_synchronized(layers: List[Any]) -> None:
    """Raises for a layer that adds gradients up over replicas within the block."""
    if replicas.count() == 1:
        return
    for layer in layers:
        if getattr(layer, "synchronized", False):
            raise ValueError(
                f"`layer` must not hold {layer.name!r} on {replicas.count()} replicas: "
                "it adds up gradients of all of them, which have scales of their own. "
                "Leave it outside of the block, or set synchronized=False."
            )
