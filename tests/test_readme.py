"""Every Python block of the README runs, each on its own, as pasted."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from conftest import families

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.skipif(
    families()[0].name != "keras3", reason="the README is written for Keras 3"
)
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block, tmp_path, monkeypatch):
    keras = families()[0].keras
    monkeypatch.chdir(tmp_path)
    try:
        (tmp_path / "block.py").write_text(block)  # AutoGraph reads a file's source
        runpy.run_path("block.py", run_name="__main__")
    finally:
        keras.mixed_precision.set_global_policy("float32")


def test_there_are_blocks_and_the_two_commands_come_first():
    assert len(BLOCKS) >= 8
    first = re.search(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    commands = [line.split("#")[0].strip() for line in first[1].splitlines()]
    assert commands == [
        'pip install ".[examples]" && python examples/digits.py',
        'pip install ".[test]" && pytest',
    ]
    assert first.start() < README.index("```python")


def test_the_pictures_are_there():
    for path in re.findall(r"!\[[^]]*\]\(([^)]*)\)", README):
        assert (Path(__file__).parent.parent / path).is_file()
