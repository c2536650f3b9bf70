"""ScaledBlock: the code that the blocks of every Keras share."""

from __future__ import annotations

import copy
import inspect
from typing import Any, Callable, Dict, List

import tensorflow as tf

from lossscale import arguments
from lossscale.blocks import backward
from lossscale.runtime import kerases, replicas
from lossscale.runtime.graphs import is_recorded
from lossscale.runtime.registry import PerKeras

_blocks = PerKeras()
#: A decorator: its class becomes the block for layers of a given class.
block_of = _blocks.takes
#: A block sets these itself, whatever its layer has.
_FIXED = ("dtype", "dtype_policy", "autocast")
_TRAINING = inspect.Parameter("training", inspect.Parameter.KEYWORD_ONLY, default=None)


class ScaledBlock:
    """A layer whose gradients are computed at a scale of their own.

    float16 reaches from 2**-24 to 65504, which is 40 doublings. If the gradients of a
    deep network are further apart, no single loss scale serves all of them: where those
    of the first layers are above zero, those of the last layers overflow. Put a
    `ScaledBlock` around each block of layers, and each block fits its own gradients
    into float16:

    ```
    x = x + lossscale.ScaledBlock(keras.Sequential([norm, dense]))(x)
    ```

    The forward pass is that of the layer. Its result is cast to `float32`. The backward
    pass:

    ```
    incoming = the gradients that the block receives
    scale = the greatest power of two that keeps them within 65504 / 2**headroom
    outgoing = the layer's gradients, computed in float16 from incoming * scale
    up to three times, while outgoing is not finite although incoming is:
      scale = scale / 2**8
      outgoing = the same again
    the gradients of inputs and weights = outgoing / scale, in their dtypes
    ```

    So no code outside of the block changes: a block works with any optimizer, with or
    without a loss scale. On several replicas each has its own scales. The block has no
    variables besides those of its layer.

    The block computes the gradients of its arguments and of the variables that its
    layer reads. Pass it any other tensor whose gradient you need as an argument: to
    give it to the layer otherwise, as by `layer.w = v * 2.0`, is an error.

    Values between blocks should be `float32`, as the sum above is. If a gradient passes
    through float16 between blocks, it can become zero there, as without blocks. A layer
    that does not compute in float16 is called without any scaling or cast.

    Args:
      layer: A layer or model of any Keras. Its `call` may take any nest of tensors.
      headroom: The block scales the largest incoming gradient to this many doublings
        below float16's 65504. So gradients can double this often within the block. If
        they overflow, the block tries a smaller scale. From 0 to 24.
      recompute: Whether to save memory: no value of the forward pass is kept, and the
        backward pass computes it again, as `tf.recompute_grad` does.
      **kwargs: `name` and other arguments of a layer of that Keras, but no dtype.

    Raises:
      TypeError: `layer` is not a layer of a Keras on TensorFlow, or another argument
        has the wrong type.
      ValueError: `layer` is a ScaledBlock, or `headroom` is out of range, or `dtype` is
        given. When the block is called: the layer has synchronized batch normalization,
        and there are several replicas. Or the layer reads a tensor that has a gradient
        and is not an argument; in a graph this error may come when the gradient is
        computed. Or a tape watches a variable of the layer that is not trainable.

    Source: Ramesh et al., "Zero-Shot Text-to-Image Generation" (arXiv 2102.12092),
    section 2.4 and appendix D: a scale per residual block. Theirs is kept and adjusted
    like a loss scale; this one is computed from the gradients.
    """

    layer: Any
    headroom: int
    recompute: bool
    #: By this `gradient_ranges` recognizes a block.
    has_own_scale = True
    #: Whether the backward pass runs the forward pass again now.
    _is_recomputing = False
    #: The module of the layer's Keras.
    _keras: Any

    def __new__(cls, layer: Any = None, *_: Any, **__: Any) -> Any:
        """Picks the class for the Keras that `layer` belongs to."""
        # A copy calls this without arguments, on the class of one Keras.
        return super().__new__(_block_for(layer) if cls is ScaledBlock else cls)

    def __init__(
        self, layer: Any, headroom: int = 6, recompute: bool = False, **kwargs: Any
    ) -> None:
        right = _block_for(layer)
        if isinstance(layer, ScaledBlock):
            raise ValueError(
                f"`layer` must not be a ScaledBlock, got {layer!r}. Pass the layer "
                "that it holds, its attribute `layer`."
            )
        if not isinstance(self, right):
            raise TypeError(
                f"`layer` must belong to the Keras of {type(self).__name__}, got "
                f"{layer!r}. Use lossscale.ScaledBlock, which picks the class for it."
            )
        headroom = arguments.count("headroom", headroom, least=0, most=24)
        arguments.boolean("recompute", recompute)
        for name in _FIXED:
            if name in kwargs:
                raise ValueError(
                    f"`{name}` must not be given, got {kwargs[name]!r}. A block takes "
                    "and returns float32. Pass this to the layer within."
                )
        # This must precede Keras's constructor, which reads the signature of `call`.
        object.__setattr__(self, "call", self._call_of(layer))
        super().__init__(dtype="float32", autocast=False, **kwargs)  # type: ignore[call-arg]
        self.layer = layer
        self.headroom = headroom
        self.recompute = recompute
        self.supports_masking = True

    def _call_of(self, layer: Any) -> Callable[..., Any]:
        """Returns the method `call`, with the signature of the layer's own."""
        signature = inspect.signature(layer.call)
        others = list(signature.parameters.values())
        takes_training = "training" in signature.parameters

        def call(*args: Any, **kwargs: Any) -> Any:
            training = kwargs.get("training")
            if not takes_training:
                kwargs.pop("training", None)
            layers = kerases.layers_of(self.layer)
            is_plain = all(layer.compute_dtype != "float16" for layer in layers)
            if is_plain or self._is_recomputing:
                return self.layer(*args, **kwargs)
            _refuse_synchronized(layers)
            _refuse_watched(self.layer)
            again = self._again(training) if self.recompute else None
            return backward.call(self.layer, args, kwargs, self.headroom, again=again)

        if not takes_training:  # before **kwargs, if the signature ends with it
            ends = others and others[-1].kind is inspect.Parameter.VAR_KEYWORD
            others.insert(len(others) - 1 if ends else len(others), _TRAINING)
        # AutoGraph leaves a function that has this private attribute as it is written,
        # and converts the layer that it calls.
        call.autograph_info__ = {}  # type: ignore[attr-defined]
        # Every Keras reads from the signature what to pass: masks, and `training`,
        # which each layer within a block gets from the block.
        call.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return call

    def _again(self, training: Any) -> Callable[..., Any]:
        """Returns a function that calls the layer again, with its state of now.

        It uses the block's own `__call__`: layers within take `training` from that.
        """
        state = kerases.state_of(self.layer)
        before = [tf.identity(kerases.tensor_of(variable)) for variable in state]

        def again(*args: Any, **kwargs: Any) -> Any:
            after = [tf.identity(kerases.tensor_of(variable)) for variable in state]
            for variable, value in zip(state, before):
                variable.assign(value)
            object.__setattr__(self, "_is_recomputing", True)
            try:
                own_call: Any = self.__call__  # type: ignore[operator]
                return own_call(*args, **{**kwargs, "training": training})
            finally:
                object.__setattr__(self, "_is_recomputing", False)
                for variable, value in zip(state, after):
                    variable.assign(value)

        return again

    def build(self, *args: Any, **kwargs: Any) -> None:
        """Builds the layer if shapes are given. Otherwise its first call builds it."""
        if (args or kwargs) and not self.layer.built:
            self.layer.build(*args, **kwargs)
        self.built = True

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the layer's output shape."""
        return self.layer.compute_output_shape(*args, **kwargs)

    def compute_mask(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the layer's mask, None if the layer does not support masking."""
        if not self.layer.supports_masking:
            return None
        return self.layer.compute_mask(*args, **kwargs)

    def get_config(self) -> Dict[str, Any]:
        """Returns the constructor's arguments, in a form that JSON can hold."""
        config = {
            **super().get_config(),  # type: ignore[misc]
            "layer": self._keras.layers.serialize(self.layer),
            "headroom": self.headroom,
            "recompute": self.recompute,
        }
        return {name: value for name, value in config.items() if name not in _FIXED}

    @classmethod
    def from_config(cls, config: Dict[str, Any], custom_objects: Any = None) -> Any:
        """Returns a new block from a config.

        Args:
          config: What `get_config` returned.
          custom_objects: A dict from names to your own classes that the layer needs.
            Classes that are registered with Keras need no entry.
        """
        own = ("layer", "dtype")
        others = {name: value for name, value in config.items() if name not in own}
        layer = copy.deepcopy(config["layer"])  # Keras 2 changes what it deserializes
        kind = _blocks.pairs[0][1] if cls is ScaledBlock else cls
        return cls(kind._keras.layers.deserialize(layer, custom_objects), **others)


def _block_for(layer: Any) -> Any:
    """Returns the class of a block around `layer`. Raises unless it is a layer."""
    block = _blocks.class_for(layer)
    if block is not None:
        return block
    raise TypeError(
        "`layer` must be a Keras layer or model on the TensorFlow backend, got "
        f"{arguments.shown(layer)} of type {type(layer).__name__}. Pass an object such "
        "as keras.layers.Dense(8)."
    )


def _refuse_synchronized(layers: List[Any]) -> None:
    """Raises for a layer that sums gradients over replicas within the block."""
    for layer in layers:
        if getattr(layer, "synchronized", False) and replicas.count() > 1:
            raise ValueError(
                f"`layer` must not hold {layer.name!r} on {replicas.count()} replicas: "
                "it sums gradients of all replicas, but each replica has its own "
                "scale. Leave it outside of the block, or set synchronized=False."
            )


def _refuse_watched(layer: Any) -> None:
    """Raises if a tape watches a variable that is not trainable.

    TensorFlow does not tell a block that its layer reads such a variable.
    """
    if tf.distribute.has_strategy() and tf.distribute.in_cross_replica_context():
        return  # no tape is open here, and variables have no handles
    for variable in layer.non_trainable_variables:
        if is_recorded(getattr(kerases.tensor_of(variable), "handle", None)):
            raise ValueError(
                "`layer` must have trainable variables where a tape watches them, got "
                f"{kerases.variable_name(variable)!r}, which is not trainable. Make it "
                "trainable, and leave it out of what the optimizer applies."
            )
