"""What TensorFlow's checkpoints ask of objects, which is not what users ask."""

from __future__ import annotations

import sys

#: Where they are: up to TensorFlow 2.8, and since (seen on 2.4, 2.15, 2.16 and 2.21).
_MODULES = ("tensorflow.python.training.tracking.", "tensorflow.python.checkpoint.")


def is_asking() -> bool:
    """Tells whether it is a checkpoint that called the function that calls this one.

    A checkpoint asks each optimizer that it finds for its slots, and refuses one that
    two of them name: an optimizer, and another one within it.
    """
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith(_MODULES)
