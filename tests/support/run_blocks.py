"""Runs programs of pages in one process, and compares what they print with the page.

    python run_blocks.py FILE.py...

FILE.txt, if it is there, holds what the page shows. A process of its own, since one of
the programs makes a strategy of its own.
"""

import contextlib
import io
import runpy
import sys
import traceback
import warnings
from pathlib import Path

import pages

import lossscale
from lossscale.runtime import keras_versions


def run(path):
    """Runs a program, and returns what it prints, with our warnings in their place.

    Raises:
      AssertionError: It warns other than as often as it says: `# warns 2 times`.
    """
    ours, printed = [], io.StringIO()

    def show(message, category, *_, **__):
        if issubclass(category, lossscale.LossScaleWarning):
            ours.append(message)
            print(message)

    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        warnings.showwarning = show
        runpy.run_path(str(path), run_name="__main__")
    assert len(ours) == pages.warnings_of(path.read_text()), list(map(str, ours))
    return printed.getvalue()


failed = []
for path in map(Path, sys.argv[1:]):
    try:
        printed, shown = run(path), path.with_suffix(".txt")
        for part in pages.missing(path.read_text(), printed, shown):
            sys.stderr.write(f"not printed: {part}\nbut: {printed[-2000:]}\n")
            failed.append(path)
    except BaseException:  # also what ends a program
        sys.stderr.write(path.read_text())
        traceback.print_exc()
        failed.append(path)
    for keras in filter(None, [keras_versions.keras3(), *keras_versions.keras2()]):
        keras.mixed_precision.set_global_policy("float32")
        keras.backend.clear_session()  # the next one's layers have their first names
sys.exit(f"failed: {failed}" if failed else 0)
