"""Every row of the table of peers' defects is held by a test, on every Keras.

The table is in docs/reliability.md. The tests with the marker `peer_defect(row)` hold a
row, and those of them in test_peers.py show it in a peer. They are read from the files,
not from a collection: that depends on what is selected.
"""

from __future__ import annotations

import ast
import re

import pytest
from installed import ROOT
from pages import DOCS

#: Row -> who has the defect, what they do, what we do.
DEFECTS = {
    int(row): cells
    for row, *cells in re.findall(
        r"(?m)^\| (\d+) \| (.*) \| (.*) \| (.*) \|$",
        (DOCS / "reliability.md").read_text(),
    )
}
#: Sentences of docs/, for rows of documentation.
DOCUMENTED = {
    14: "With Keras 3 an optimizer, wrapped or not, applies its `clipnorm` to each "
    "replica's gradients before they are added up.",
    26: "What the forward pass did stays done: BatchNormalization's moving statistics,",
}
#: Rows that no test shows in a peer.
NOT_SHOWN = {
    25,  # neither Keras nor TensorFlow checks a norm
    29,  # not installed: run (jmp) and read (the others) once, by hand
}
#: Rows about loss scales without an optimizer: no Keras has a part in them.
WITHOUT_KERAS = {5, 7, 10, 21, 22, 25, 29}


def marked(paths):
    """Returns row -> for each test of it, what that and its fixtures ask for."""
    found = {}
    for path in paths:
        nodes = ast.parse(path.read_text()).body
        of_all = [node for node in nodes if isinstance(node, ast.Assign)]  # pytestmark
        for node in nodes:
            nodes += node.body if isinstance(node, ast.ClassDef) else []
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        asked = {node.name: {each.arg for each in node.args.args} for node in functions}
        for test in [each for each in functions if each.name.startswith("test_")]:
            for row in rows([*of_all, *test.decorator_list]):
                own = {each.arg for each in test.args.args}
                of_fixtures = (asked.get(name, ()) for name in own)
                found.setdefault(row, []).append(own.union(*of_fixtures))
    return found


def rows(expressions):
    """Returns the rows of all `pytest.mark.peer_defect(row)` in expressions."""
    return [
        node.args[0].value
        for expression in expressions
        for node in ast.walk(expression)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "peer_defect"
    ]


PEERS = ROOT / "tests" / "test_peers.py"
HELD = marked({*(ROOT / "tests").rglob("test_*.py")} - {PEERS})
SHOWN = marked([PEERS])


def test_there_are_thirty():
    assert list(DEFECTS) == list(range(1, 31))


@pytest.mark.parametrize("row", DEFECTS)
def test_a_test_holds_it(row):
    assert HELD.get(row), f"no test has the marker peer_defect({row})"
    if row not in WITHOUT_KERAS:
        assert any("family" in asked for asked in HELD[row]), "not on every Keras"


@pytest.mark.parametrize("row", DOCUMENTED)
def test_a_page_has_the_sentence(row):
    text = "".join(path.read_text() for path in DOCS.glob("*.md"))
    assert DOCUMENTED[row] in re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("row", DEFECTS)
def test_a_test_shows_it_in_a_peer_or_says_why_not(row):
    assert (row in SHOWN) != (row in NOT_SHOWN)


def test_no_marker_names_a_row_that_is_none():
    assert {*HELD, *SHOWN} <= {*DEFECTS}
