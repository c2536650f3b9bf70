"""Every Python block of the README runs, each on its own, as pasted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import families

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)

#: Runs the files that it is given, each as a program, in one process: TensorFlow takes
#: long to start. A process of its own, since one block makes a strategy of its own.
RUNNER = """
import runpy, sys, traceback
import keras
failed = []
for path in sys.argv[1:]:
    try:
        runpy.run_path(path, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        failed.append(path)
    keras.mixed_precision.set_global_policy("float32")
sys.exit(f"failed: {failed}" if failed else 0)
"""


@pytest.mark.skipif(
    families()[0].name != "keras3", reason="the README is written for Keras 3"
)
def test_blocks_run(tmp_path):
    paths = []
    for number, block in enumerate(BLOCKS):
        paths.append(tmp_path / f"block{number}.py")
        paths[-1].write_text(block)  # AutoGraph reads the source of a file
    answer = subprocess.run(
        [sys.executable, "-c", RUNNER, *map(str, paths)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]


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
        assert (ROOT / path).is_file()
