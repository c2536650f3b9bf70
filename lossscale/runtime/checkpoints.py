"""Tells a question of TensorFlow's checkpoints from a user's question."""

from __future__ import annotations

import sys

#: Where TensorFlow keeps the code of checkpoints: up to 2.8, and since then (seen on
#: 2.4, 2.15, 2.16 and 2.21).
_MODULES = ("tensorflow.python.training.tracking.", "tensorflow.python.checkpoint.")


def is_asking() -> bool:
    """Tells whether a checkpoint called the function that calls this one.

    A checkpoint asks each optimizer that it finds for its slot variables. It refuses a
    slot variable that two optimizers name, as a wrapper and its inner optimizer would.
    """
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith(_MODULES)
