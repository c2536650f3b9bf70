"""docs/warnings.md: an entry for each warning, by the words that it begins with."""

import re
from pathlib import Path

import pytest
from pages import PAGES
from said import texts

import lossscale
from lossscale.monitor.findings import FINDINGS
from lossscale.optimizer import files
from lossscale.provenance import warnings
from lossscale.runtime import float16_weights

ROOT = Path(lossscale.__file__).parent
#: What others than the monitor warn of, by the file.
OTHERS = {
    "optimizer/files.py": [files._DO_NOT_FIT, "`weights` must be the 5 values of"],
    "optimizer/keras3.py": [  # which only a process with Keras 3 can import
        "LossScaleOptimizer restored nothing from your checkpoint",
        files.NOT_BUILT,
    ],
    "provenance/warnings.py": [
        *(warnings._NEVER_SCALED, warnings._CHANGED),
        *(warnings._READ, warnings._ADDED),
    ],
    "ranges/forward.py": ["The model could not run in float16"],
    "ranges/gradient_report.py": ["These operations compute gradients in 16 bits"],
    "runtime/float16_weights.py": [float16_weights.IN_FLOAT16],
    "scales/adjustment.py": ["The loss scale was inf, but it must be finite"],
}


def entries():
    """Returns the words of each entry: several if there is something between them."""
    rows = re.findall(r"(?m)^\| (.*?) \| .* \| .* \|$", PAGES["warnings"].read_text())
    rows = [row for row in rows if row != "---" and not row.startswith("it begins")]
    return [re.findall(r"\*(.*?)\*", row) for row in rows]


def holds(words, text):
    """Tells whether a text holds some words, in their order."""
    place, text = 0, re.sub("[`]", "", text)
    for each in words:
        place = text.find(each, place)
        if place < 0:
            return False
    return True


def test_each_warning_has_an_entry_and_each_entry_is_of_a_warning():
    of_monitor = {name: said[0] for name, said in texts().items()}
    assert {row.find.__name__ for row in FINDINGS} <= set(of_monitor)
    others = [text for found in OTHERS.values() for text in found]
    everything = [*of_monitor.values(), *others]
    for text in everything:
        assert any(holds(words, text) for words in entries()), text
    for words in entries():
        assert words
        assert any(holds(words, text) for text in everything), words


@pytest.mark.smoke
def test_which_files_warn():
    """Who warns in another file adds it above, and its entry to the page."""
    call = re.compile(r"(?<!def )(?<!\.)\bwarn\(")
    paths = [p for p in ROOT.rglob("*.py") if call.search(p.read_text("utf-8"))]
    assert {path.relative_to(ROOT).as_posix() for path in paths} == {*OTHERS}
