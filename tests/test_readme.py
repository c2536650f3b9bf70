"""Every Python block of the README runs, each on its own, as pasted."""

from __future__ import annotations

import re
import subprocess
import sys

from installed import ROOT, families
from limits import skip_without

README = (ROOT / "README.md").read_text()
MIGRATIONS = re.search(r"^## Coming from\n(.*?)^## ", README, re.DOTALL | re.M)[1]


def blocks(text):
    """Returns the Python blocks of a text."""
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


#: Runs the files that it is given, each as a program, in one process: TensorFlow takes
#: long to start. A process of its own, since one block makes a strategy of its own.
RUNNER = """
import runpy, sys, traceback
import tensorflow as tf
failed = []
for path in sys.argv[1:]:
    try:
        runpy.run_path(path, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        failed.append(path)
    tf.keras.mixed_precision.set_global_policy("float32")
sys.exit(f"failed: {failed}" if failed else 0)
"""


def assert_run(found, folder):
    paths = []
    for number, block in enumerate(found):
        paths.append(folder / f"block{number}.py")
        paths[-1].write_text(block)  # AutoGraph reads the source of a file
    answer = subprocess.run(
        [sys.executable, "-c", RUNNER, *map(str, paths)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]


def test_blocks_run(tmp_path):
    skip_without("the README", families()[0])
    assert_run([b for b in blocks(README) if b not in MIGRATIONS], tmp_path)


def test_migrations_run_on_every_version(tmp_path):
    assert_run(blocks(MIGRATIONS), tmp_path)


def test_each_migration_has_its_names_and_its_code():
    for section in MIGRATIONS.split("\n### ")[1:]:
        assert "| there | here |" in section
        assert len(blocks(section)) == 1, section.splitlines()[0]
    for origin in ("contrib", "train.experimental", "Keras 2", "Keras 3", "torch"):
        assert f"{origin}" in MIGRATIONS


def test_there_are_blocks_and_the_two_commands_come_first():
    assert len(blocks(README)) >= 12
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
