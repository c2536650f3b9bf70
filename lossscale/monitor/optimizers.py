"""Which optimizers a monitor watches: those it is given, or those of the model."""

from __future__ import annotations

from typing import Any, Dict, Iterator, Tuple

from lossscale.arguments import shown
from lossscale.optimizer import LossScaleOptimizer
from lossscale.runtime import keras_versions

_NONE_FOUND = """\
`model.optimizer` must be a lossscale.LossScaleOptimizer, got {got}{why}. Write

    model.compile(lossscale.LossScaleOptimizer(optimizer), ...)

or, for optimizers that are not attributes of the model,

    LossScaleMonitor(optimizers={{"name": optimizer}})
"""
_WRAPPED_BY_KERAS = """\
, Keras's own: under mixed_float16 `compile` wraps any optimizer without a wrapper"""


def given_optimizers(name: str, value: Any) -> Dict[str, Any]:
    """Returns the optimizers of the argument `name`. A single one has an empty name."""
    listed = value if isinstance(value, (list, tuple)) else [value]
    if isinstance(value, dict):
        optimizers = dict(value)
    elif len(listed) == 1:
        optimizers = {"": listed[0]}
    else:
        optimizers = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(listed)}
    are_named = all(isinstance(key, str) for key in optimizers)
    are_ours = all(
        isinstance(optimizer, LossScaleOptimizer) for optimizer in optimizers.values()
    )
    if not (optimizers and are_named and are_ours):
        raise TypeError(
            f"`{name}` must be a lossscale.LossScaleOptimizer, a list of them, or a "
            f"dict of them by name, got {shown(value)}. Pass the wrapper: "
            "lossscale.LossScaleOptimizer(optimizer)."
        )
    return optimizers


def optimizers_of(model: Any) -> Dict[str, Any]:
    """Returns the optimizers of a model by the names of its attributes, or raises.

    They are the compiled one, and those in its attributes, as a GAN has them. A single
    one has an empty name.
    """
    compiled = getattr(model, "optimizer", None)
    pairs = [("optimizer", compiled), *attributes_of(model)]
    optimizers: Dict[str, Any] = {}
    for name, value in pairs:
        is_new = not any(value is other for other in optimizers.values())
        if isinstance(value, LossScaleOptimizer) and is_new:
            optimizers[name.strip("_")] = value
    if optimizers:
        return (
            optimizers if len(optimizers) > 1 else dict(zip([""], optimizers.values()))
        )
    # A user with other optimizers may not know the one that Keras compiles by default.
    others = [
        f"model.{name.strip('_')} = {shown(value)}"
        for name, value in pairs
        if hasattr(value, "apply_gradients") and value is not compiled
    ]
    got = ", ".join(others) or shown(compiled)
    why = (
        _WRAPPED_BY_KERAS
        if keras_versions.is_own_wrapper(compiled) and not others
        else ""
    )
    raise TypeError(_NONE_FOUND.format(got=got, why=why))


def attributes_of(model: Any) -> Iterator[Tuple[str, Any]]:
    """Yields what is in a model's attributes, also in lists and dicts, with names."""
    for name, thing in vars(model).items():
        if not isinstance(thing, (dict, list, tuple)):
            yield name, thing
        elif not name.startswith("_"):  # Keras keeps the objects that it tracks there
            items = thing.items() if isinstance(thing, dict) else enumerate(thing)
            yield from ((f"{name}_{key}", value) for key, value in items)
