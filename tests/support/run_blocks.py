"""Runs files, each as a program, in one process: TensorFlow takes long to start.

    python run_blocks.py FILE...

A process of its own, since one of them makes a strategy of its own.
"""

from __future__ import annotations

import re
import runpy
import sys
import traceback
import warnings
from pathlib import Path

import stand_ins

import lossscale
from lossscale.runtime import keras_versions


def run(path):
    """Runs a block. What the pages show is not warned of, but where they say so."""
    found = re.search(r"# warns(?: (\d+) times)?", Path(path).read_text())
    warns = int(found[1] or 1) if found else 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runpy.run_path(path, run_name="__main__")
    ours = [w for w in caught if issubclass(w.category, lossscale.LossScaleWarning)]
    assert len(ours) == warns, [str(each.message) for each in ours]


stand_ins.install()
failed = []
for path in sys.argv[1:]:
    try:
        run(path)
    except BaseException:  # also what ends a program
        sys.stderr.write(Path(path).read_text())
        traceback.print_exc()
        failed.append(path)
    for keras in filter(None, [keras_versions.keras3(), *keras_versions.keras2()]):
        keras.mixed_precision.set_global_policy("float32")
sys.exit(f"failed: {failed}" if failed else 0)
