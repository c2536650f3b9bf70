"""Keeps AutoGraph away from our own Python."""

from __future__ import annotations

from typing import Any, Callable, TypeVar, cast

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])


def do_not_convert(function: Function) -> Function:
    """Marks a function that `tf.function` must trace as it is written.

    AutoGraph would rewrite every function of ours that a traced step reaches, which
    only costs tracing time. TensorFlow's own decorator does the work; this one keeps
    the function's type.
    """
    return cast(Function, tf.autograph.experimental.do_not_convert(function))


def as_written(function: Function) -> Function:
    """Marks a function that is traced as it is written, but not what it calls.

    Layers of Keras 2 that a user wrote are converted where they are called, which
    `do_not_convert` would end for all that is called within.
    """
    # Not public: what `do_not_convert` marks its result with (seen on 2.4 to 2.21).
    # Without it `function` would be converted, too, and tracing take longer.
    function.autograph_info__ = {}  # type: ignore[attr-defined]
    return function
