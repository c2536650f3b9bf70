"""Every row of the table of peers' defects is held by a test, on every Keras."""

from __future__ import annotations

import ast
import re

import pytest
from installed import ROOT
from peer_defects import DEFECTS, DOCUMENTED, NOT_SHOWN, marked

TESTS = ROOT / "tests"
PAGES = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
HELD, SHOWN = marked("peer_defect"), marked("peer_fails")
#: Rows about loss scales without an optimizer: no Keras has a part in them.
WITHOUT_KERAS = {5, 7, 10, 21, 22, 25, 29}


def test_there_are_thirty():
    assert list(DEFECTS) == list(range(1, 31))


@pytest.mark.parametrize("row", DEFECTS)
def test_a_test_holds_it(row):
    assert HELD.get(row), f"no test has the marker peer_defect({row})"


@pytest.mark.parametrize("row", DOCUMENTED)
def test_a_page_has_the_sentence(row):
    assert DOCUMENTED[row] in re.sub(r"\s+", " ", PAGES)


@pytest.mark.parametrize("row", DEFECTS)
def test_a_test_shows_it_in_a_peer_or_the_table_says_why_not(row):
    assert bool(SHOWN.get(row)) != (row in NOT_SHOWN)


@pytest.mark.parametrize("row", sorted(set(DEFECTS) - WITHOUT_KERAS))
def test_it_is_held_on_every_keras(row):
    assert any(_asks_for_families(test) for test in HELD[row]), HELD[row]


@pytest.mark.parametrize("found", [HELD, SHOWN], ids=["peer_defect", "peer_fails"])
def test_no_marker_names_a_row_that_is_none(found):
    assert set(found) <= set(DEFECTS)


def _asks_for_families(test):
    """Whether a test asks for the fixture `family`, itself or through its file's."""
    file, _, name = test.partition("::")
    arguments = {
        node.name: {argument.arg for argument in node.args.args}
        for node in ast.walk(ast.parse((TESTS / file).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    wanted = arguments[name.split("::")[-1]]
    return "family" in wanted.union(*(arguments.get(name, ()) for name in wanted))
