"""LossScaleWarning, and the function that gives it."""

from __future__ import annotations

import sys
import warnings

#: The packages whose lines a user did not write.
_NOT_THE_USERS = {"lossscale", "tensorflow", "keras", "tf_keras"}


class LossScaleWarning(UserWarning):
    """The category of all warnings of this package. The text says what to change."""

    __module__ = "lossscale"  # pickles of it do not depend on a module


def warn(message: str) -> None:
    """Gives a `LossScaleWarning` that points at the user's line which led here.

    It reads the callers' frames: how many are ours, Keras's and TensorFlow's differs,
    and `warnings.warn(skip_file_prefixes=...)` exists from Python 3.12 on.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").split(".")[0]
        is_generated = "__autograph_generated_file" in frame.f_code.co_filename
        if package not in _NOT_THE_USERS and not is_generated:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, LossScaleWarning, stacklevel=level)
