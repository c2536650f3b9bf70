"""Runs programs in one process, and keeps what each prints and is warned of.

    python print_blocks.py FILE...

The text is in `FILE.out` then, with our warnings as the pages show them: their words.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import warnings
from pathlib import Path

import keras

import lossscale


def show(message, category, *_):
    """Prints a warning of ours as the pages show it."""
    if issubclass(category, lossscale.LossScaleWarning):
        print(message)  # noqa: T201


for path in map(Path, sys.argv[1:]):
    warnings.simplefilter("always")
    warnings.showwarning = show
    with path.with_suffix(".out").open("w") as out, contextlib.redirect_stdout(out):
        runpy.run_path(str(path), run_name="__main__")
    keras.mixed_precision.set_global_policy("float32")
