"""The arguments of a block's call: those of its layer, and `training`."""

from __future__ import annotations

import inspect
from typing import Any, Callable

_TRAINING = inspect.Parameter("training", inspect.Parameter.KEYWORD_ONLY, default=None)


def has(function: Callable[..., Any], name: str) -> bool:
    """Tells whether a function has an argument of this name."""
    return name in inspect.signature(function).parameters


def with_training(function: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of a layer's `call`, with `training` if it has none.

    Every Keras reads from the signature what to pass: masks, and `training`, which each
    layer within a block gets from the block.
    """
    signature = inspect.signature(function)
    if "training" in signature.parameters:
        return signature
    others = list(signature.parameters.values())
    # Before **kwargs, if the signature ends with it.
    ends = others and others[-1].kind is inspect.Parameter.VAR_KEYWORD
    place = len(others) - 1 if ends else len(others)
    return signature.replace(parameters=[*others[:place], _TRAINING, *others[place:]])
