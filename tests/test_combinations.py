"""What is left to the slow tests holds no value that the quick ones do not have."""

from __future__ import annotations

import ast
import itertools
import re
import shutil
from collections import Counter
from fnmatch import fnmatchcase

from combinations import rules
from installed import ROOT
from processes import printed

HOOK = """
import pytest
from combinations import beyond_pairs, left_over

def pytest_collection_modifyitems(items):
    for item in left_over(items):
        item.add_marker(pytest.mark.slow)
    for item in beyond_pairs(items):
        items.remove(item)
"""
TESTS = """
import pytest

@pytest.mark.parametrize("row, expected", [(0, 1), (1, 1), (1, 0)])
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("keras", ["two", "three", "legacy"])
def test_three(keras, mode, row, expected): ...

@pytest.mark.parametrize("row", range(4))
def test_one(row): ...

@pytest.mark.parametrize("a", range(2))
@pytest.mark.parametrize("b", range(2))
@pytest.mark.parametrize("c", range(3))
@pytest.mark.parametrize("d", range(2))
def test_four(a, b, c, d): ...

@pytest.mark.parametrize("a", ["x", pytest.param("y", marks=pytest.mark.slow)])
@pytest.mark.parametrize("b", ["u", "v"])
def test_slow(a, b): ...

def test_none(): ...
"""


def collected(tmp_path, expression):
    """Returns the tests that are collected: names and parameters."""
    shutil.copy(ROOT / "tests" / "support" / "combinations.py", tmp_path)
    (tmp_path / "conftest.py").write_text(HOOK)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    options = ["-q", "--collect-only", "-m", expression]
    told = printed("-m", "pytest", *options, cwd=tmp_path)
    return re.findall(r"::test_(\w+)(?:\[(.*)\])?", told)


def test_each_value_is_in_a_quick_test(tmp_path):
    found = collected(tmp_path, "not slow")
    three = [parameters.split("-") for name, parameters in found if name == "three"]
    assert len(three) == 3
    for position, values in enumerate(({"two", "three", "legacy"}, {"eager", "graph"})):
        assert {one[position] for one in three} == values
    assert {tuple(one[2:]) for one in three} == {("0", "1"), ("1", "1"), ("1", "0")}
    others = [name for name, _ in found if name not in ("three", "four")]
    # Of test_slow the two that were not slow anyhow.
    assert others == ["one"] * 4 + ["slow"] * 2 + ["none"]


def test_any_two_values_are_in_one_test(tmp_path):
    found = collected(tmp_path, "")
    for name, count in (("three", 3), ("four", 4)):
        tests = [parameters.split("-") for test, parameters in found if test == name]
        assert len(tests) < {"three": 18, "four": 24}[name]
        for pair in itertools.combinations(range(count), 2):
            seen = {tuple(one[position] for position in pair) for one in tests}
            every = [{one[position] for one in tests} for position in pair]
            assert len(seen) == len(every[0]) * len(every[1])
    # Of two parameters and less all are there.
    assert Counter(name for name, _ in found if name not in ("three", "four")) == {
        "one": 4,
        "slow": 4,
        "none": 1,
    }


def test_the_table_names_tests_that_there_are():
    known = {"smoke", "quick", "slow-on-newest", "every", "one-xla", "one-keras2"}
    for file, said in rules().items():
        nodes, names = ast.parse((ROOT / "tests" / file).read_text()).body, ["*"]
        for node in nodes:
            inside = node.body if isinstance(node, ast.ClassDef) else ()
            names += [f"{node.name}::{getattr(each, 'name', '')}" for each in inside]
            names.append(getattr(node, "name", ""))
        for pattern, words in said:
            assert words <= known, (file, pattern)
            name = pattern.partition("[")[0]
            assert any(fnmatchcase(each, name) for each in names), (file, pattern)
