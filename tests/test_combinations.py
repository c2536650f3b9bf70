"""What is left to the slow tests holds no value that the quick ones do not have."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

from installed import ROOT

HOOK = """
import pytest
from combinations import left_over

def pytest_collection_modifyitems(items):
    for item in left_over(items):
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

@pytest.mark.parametrize("a", ["x", pytest.param("y", marks=pytest.mark.slow)])
@pytest.mark.parametrize("b", ["u", "v"])
def test_slow(a, b): ...

def test_none(): ...
"""


def test_each_value_is_in_a_quick_test(tmp_path):
    shutil.copy(ROOT / "tests" / "support" / "combinations.py", tmp_path)
    (tmp_path / "conftest.py").write_text(HOOK)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.findall(r"::test_(\w+)(?:\[(.*)\])?", answer.stdout)
    three = [parameters.split("-") for name, parameters in found if name == "three"]
    assert len(three) == 3
    for position, values in enumerate(({"two", "three", "legacy"}, {"eager", "graph"})):
        assert {one[position] for one in three} == values
    assert {tuple(one[2:]) for one in three} == {("0", "1"), ("1", "1"), ("1", "0")}
    others = [name for name, _ in found if name != "three"]
    # Of test_slow those that were slow anyhow, and the two quick ones.
    assert others == ["one"] * 4 + ["slow"] * 4 + ["none"]
