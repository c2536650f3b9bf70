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
    """Marks a function that is traced as it is written, while its callees may convert.

    AutoGraph converts a user's Keras 2 layers where they are called.
    `do_not_convert` would prevent that for everything that the function calls.
    """
    # Not public: `do_not_convert` marks its result with this attribute (seen on 2.4 to
    # 2.21). Without it AutoGraph would convert `function` too, and tracing would take
    # longer.
    function.autograph_info__ = {}  # type: ignore[attr-defined]
    return function
