"""Which wrapper goes with which optimizer, and which optimizers no wrapper takes."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Dict

import tensorflow as tf

from lossscale import arguments
from lossscale.optimizer.dialect import MARK
from lossscale.runtime import keras_versions, registry

_wrappers = registry.PerKeras()
#: `wraps(optimizer_class)` decorates a class: the wrapper of that class's optimizers.
wraps = _wrappers.takes


class Signature:
    """The signature that editors show, not that of `__new__`, which takes anything."""

    def __get__(self, _: Any, owner: Any) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)
        others = list(signature.parameters.values())[1:]
        return signature.replace(parameters=others, return_annotation=signature.empty)


def is_open(cls: type) -> bool:
    """Whether a class, the public one or a user's, belongs to no Keras yet."""
    return not hasattr(cls, "_dialect")


def for_call(cls: type, public: type, args: Any, kwargs: Dict[str, Any]) -> Any:
    """Picks the class of the object that a call of `cls` returns.

    `cls` is `public`, the public class, or one that a user derived from it. The first
    optimizer among the arguments is the inner one.
    """
    if cls is public:
        return for_optimizer(args[0] if args else kwargs.get("inner_optimizer"))
    passed = [*args, *kwargs.values()]
    classes = [w for w in map(_wrappers.class_for, passed) if w is not None]
    if not classes:
        raise TypeError(
            f"`inner_optimizer` must be an argument of {cls.__name__}, got "
            f"{arguments.shown(passed)}. Pass a Keras optimizer, or derive "
            f"{cls.__name__} from type(lossscale.LossScaleOptimizer(inner_optimizer))."
        )
    return _mixed(cls, classes[0])


@functools.lru_cache(maxsize=None)
def _mixed(cls: type, wrapper: Any) -> type:
    names = ("__module__", "__qualname__", "__doc__")
    members = {name: getattr(cls, name) for name in names}
    members["_asked_class"] = cls
    mixed: type = type(wrapper)(cls.__name__, (cls, wrapper), members)
    registry.register_like(cls, mixed)
    return mixed


def for_optimizer(inner_optimizer: Any) -> Any:
    """Returns the wrapper for an optimizer. Raises if no Keras of ours has it."""
    wrapper = _wrappers.class_for(inner_optimizer)
    if wrapper is not None:
        return wrapper
    thing, keras = inner_optimizer, keras_versions.imported("keras")
    is_keras3 = keras_versions.is_keras3(keras)
    if is_keras3 and isinstance(thing, keras.optimizers.Optimizer):
        but_got = (
            f" on the TensorFlow backend, got {arguments.shown(thing)} on the "
            f"{keras.config.backend()} backend. Set the environment variable "
            "KERAS_BACKEND=tensorflow before you import Keras."
        )
    elif isinstance(thing, tf.compat.v1.train.Optimizer):
        but_got = (
            f", got {arguments.shown(thing)} of tf.compat.v1.train. Wrap it in "
            "lossscale.compat.v1.LossScaleOptimizer."
        )
    else:
        but_got = (
            f", got {arguments.typed(thing)}. Pass an object such as "
            "keras.optimizers.Adam(1e-3)."
        )
    raise TypeError(f"`inner_optimizer` must be a Keras optimizer{but_got}")


def for_config(config: Dict[str, Any]) -> Any:
    """Returns the wrapper whose `get_config` made `config`."""
    inner = config["inner_optimizer"]
    if not isinstance(inner, dict):
        return for_optimizer(inner)
    every = [wrapper for _, wrapper in _wrappers.pairs]
    return next((w for w in every if w._dialect.recognizes(inner["config"])), every[0])


def check_inner(inner_optimizer: Any, wrapper: type) -> None:
    """Raises unless `inner_optimizer` may be wrapped by the class `wrapper`."""
    right = for_optimizer(inner_optimizer)
    for _, existing in keras_versions.held_by(inner_optimizer):
        is_optimizer = hasattr(existing, "apply_gradients")
        if not (is_optimizer and keras_versions.is_own_wrapper(existing)):
            continue  # ours derive from Keras's
        held = existing.inner_optimizer if existing is inner_optimizer else existing
        raise TypeError(
            "`inner_optimizer` must not be or wrap a LossScaleOptimizer, got a "
            f"{type(inner_optimizer).__name__} around a {type(held).__name__}. Use it "
            "as it is, or pass a new Keras optimizer. "
            "LossScaleOptimizer.from_keras(optimizer) replaces one of Keras itself."
        )
    if not issubclass(wrapper, right):
        raise TypeError(
            "`inner_optimizer` must belong to the Keras of "
            f"{wrapper.__qualname__}, got {arguments.shown(inner_optimizer)}. Use "
            "lossscale.LossScaleOptimizer, which picks the wrapper for each Keras."
        )
    if getattr(inner_optimizer, MARK, False):
        raise ValueError(
            "`inner_optimizer` must not be wrapped twice, got an optimizer of class "
            f"{type(inner_optimizer).__name__} that another LossScaleOptimizer already "
            "wraps. Create a new inner optimizer for each LossScaleOptimizer, or "
            "continue with another loss scale: optimizer.with_loss_scale(...)."
        )
    # TensorFlow Privacy's optimizers clip per example, between computing gradients and
    # applying them, and add noise of that size. No other known one has the attribute.
    homes = {cls.__module__.split(".")[0] for cls in type(inner_optimizer).__mro__}
    is_private = "tensorflow_privacy" in homes
    if is_private or hasattr(inner_optimizer, "_was_dp_gradients_called"):
        raise ValueError(
            "`inner_optimizer` must not clip gradients that it computes itself, got "
            f"{arguments.shown(inner_optimizer)}. It would clip scaled gradients, and "
            "so true ones to l2_norm_clip / loss_scale. Train without a loss scale, in "
            'float32 or under "mixed_bfloat16".'
        )
    refuse_own_accumulation(inner_optimizer)
    factor = getattr(inner_optimizer, "loss_scale_factor", None)  # Keras 3 has one
    if factor is not None:
        raise ValueError(
            "`inner_optimizer` must not scale the loss too, got one with "
            f"loss_scale_factor={factor!r}. Pass loss_scale={factor!r} instead."
        )


def refuse_own_accumulation(optimizer: Any) -> None:
    """Raises if Horovod's optimizer would add up gradients of several loss scales."""
    helper = getattr(optimizer, "_agg_helper", None)  # not public: Horovod 0.28.1
    if helper is not None:
        raise ValueError(
            "`backward_passes_per_step` must be 1 in Horovod's optimizer, got "
            f"{helper.backward_passes_per_step!r}. Add unscaled gradients of several "
            "batches up in your loop, then let Horovod sum them."
        )
