"""Every row of the table of peers' defects is held by a test, on every Keras."""

from __future__ import annotations

import ast
import re

import peer_defects
import pytest
from installed import ROOT
from peer_defects import DEFECTS, marked

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


@pytest.mark.parametrize("row", [row for row in DEFECTS if DEFECTS[row].documented])
def test_a_page_has_the_sentence(row):
    assert DEFECTS[row].documented in re.sub(r"\s+", " ", PAGES)


def test_the_page_shows_the_table():
    page = (ROOT / "docs" / "reliability.md").read_text()
    shown = re.findall(r"(?m)^\| (\d+) \| (.*) \| (.*) \| (.*) \|$", page)
    table = DEFECTS.items()
    assert shown == [(str(n), row.who, row.peer, row.promise) for n, row in table]


@pytest.mark.parametrize("row", DEFECTS)
def test_a_test_shows_it_in_a_peer_or_the_table_says_why_not(row):
    assert bool(SHOWN.get(row)) != bool(DEFECTS[row].not_shown)


@pytest.mark.parametrize("row", sorted(set(DEFECTS) - WITHOUT_KERAS))
def test_it_is_held_on_every_keras(row):
    assert any(_asks_for_families(test) for test in HELD[row]), HELD[row]


@pytest.mark.parametrize("found", [HELD, SHOWN], ids=["peer_defect", "peer_fails"])
def test_no_marker_names_a_row_that_is_none(found):
    assert set(found) <= set(DEFECTS)


def test_markers_are_found_wherever_they_stand():
    tree = ast.parse(
        """
pytestmark = [pytest.mark.slow, pytest.mark.peer_defect(1)]

@pytest.mark.peer_defect(2, 3)
def test_a(): ...

@pytest.mark.peer_defect(4)
class TestB:
    @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.peer_defect(5))])
    def test_c(self): ...

    def helper(self): ...

def test_d(): ...
"""
    )
    assert list(peer_defects._marked_in(tree, "peer_defect")) == [
        ("test_a", [1, 2, 3]),
        ("TestB::test_c", [1, 4, 5]),
        ("test_d", [1]),
    ]


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
