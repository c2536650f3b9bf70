"""Keeps AutoGraph away from our own Python."""

from __future__ import annotations

from typing import Any, Callable, TypeVar, cast

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])


def do_not_convert(function: Function) -> Function:
    """Marks a function that `tf.function` must trace as it is written.

    It saves tracing time. This is TensorFlow's own decorator, with a type.
    """
    return cast(Function, tf.autograph.experimental.do_not_convert(function))
