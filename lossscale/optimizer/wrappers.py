"""Which wrapper goes with which optimizer, and which optimizers no wrapper takes."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Tuple, TypeVar

from lossscale import arguments
from lossscale.runtime import kerases

Class = TypeVar("Class", bound=type)

#: Pairs of an optimizer's base class and the wrapper for it.
_wrappers: List[Tuple[type, Any]] = []

#: The mark on a wrapped optimizer. Keras 2 uses the same name (seen on 2.8 to 2.21).
_MARK = "_is_wrapped_by_loss_scale_optimizer"


def wraps(optimizer_class: type) -> Callable[[Class], Class]:
    """Makes the decorated class the wrapper of the optimizers of a Keras."""

    def register(wrapper: Class) -> Class:
        _wrappers.append((optimizer_class, wrapper))
        return wrapper

    return register


def for_optimizer(inner_optimizer: Any) -> Any:
    """Returns the wrapper for an optimizer.

    Raises:
      TypeError: It is not an optimizer of a Keras that computes with TensorFlow.
    """
    for optimizer_class, wrapper in _wrappers:
        if isinstance(inner_optimizer, optimizer_class):
            return wrapper
    backend = kerases.foreign_backend(inner_optimizer)
    if backend is not None:
        raise TypeError(
            "`inner_optimizer` must be a Keras optimizer on the TensorFlow backend, "
            f"got {inner_optimizer!r} of Keras 3 on the {backend} backend. Set the "
            "environment variable KERAS_BACKEND=tensorflow before Keras is imported."
        )
    raise TypeError(
        "`inner_optimizer` must be a Keras optimizer, got "
        f"{arguments.shown(inner_optimizer)} of type {type(inner_optimizer).__name__}. "
        "Pass an object such as keras.optimizers.Adam(1e-3)."
    )


def for_config(config: Dict[str, Any]) -> Any:
    """Returns the wrapper whose `get_config` made `config`."""
    inner = config["inner_optimizer"]
    if not isinstance(inner, dict):
        return for_optimizer(inner)
    for _, wrapper in _wrappers:
        if wrapper._recognizes(inner["config"]):
            return wrapper
    return _wrappers[0][1]


def check_inner(inner_optimizer: Any, wrapper: type) -> None:
    """Raises unless `inner_optimizer` may be wrapped by the class `wrapper`."""
    right = for_optimizer(inner_optimizer)
    found = _loss_scale_wrapper_in(inner_optimizer)
    if found is not None:
        where = "" if found is inner_optimizer else f", which wraps {found!r}"
        raise TypeError(
            "`inner_optimizer` must not be or wrap a LossScaleOptimizer, got "
            f"{inner_optimizer!r}{where}. Wrap its .inner_optimizer, in a new one."
        )
    if not issubclass(wrapper, right):
        raise TypeError(
            f"`inner_optimizer` must belong to the Keras of {wrapper.__name__}, got "
            f"{inner_optimizer!r}. Use lossscale.LossScaleOptimizer, which picks."
        )
    if getattr(inner_optimizer, _MARK, False):
        raise ValueError(
            f"`inner_optimizer` must not be wrapped twice, got {inner_optimizer!r}, "
            "which a LossScaleOptimizer wraps already. Create an optimizer for each."
        )
    factor = getattr(inner_optimizer, "loss_scale_factor", None)  # Keras 3 has one
    if factor is not None:
        raise ValueError(
            "`inner_optimizer` must not scale the loss too, got one with "
            f"loss_scale_factor={factor!r}. Pass loss_scale={factor!r} instead."
        )


def _loss_scale_wrapper_in(optimizer: Any) -> Any:
    """Returns the loss scale wrapper that an optimizer is or holds, None without one.

    By class, not by an attribute's name: optimizers that delegate to another one have
    any names. Looked for in what an optimizer has as attributes, in lists and dicts,
    too, and in the same of each optimizer that is found there.
    """
    optimizers = tuple(optimizer_class for optimizer_class, _ in _wrappers)
    seen: Dict[int, Any] = {}
    waiting = [optimizer]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, (list, tuple)):
            waiting += thing
        elif isinstance(thing, optimizers):
            if _is_loss_scale_wrapper(thing):
                return thing
            waiting += vars(thing).values()
    return None


def _is_loss_scale_wrapper(optimizer: Any) -> bool:
    ours = tuple(wrapper for _, wrapper in _wrappers)
    return isinstance(optimizer, ours) or kerases.is_own_wrapper(optimizer)


def mark(inner_optimizer: Any) -> None:
    """Marks an optimizer as wrapped."""
    setattr(inner_optimizer, _MARK, True)
