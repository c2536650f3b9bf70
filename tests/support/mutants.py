"""Breaks the code, one decision at a time, and tells which tests see it.

    python tests/support/mutants.py                       # all, by the quick tests
    python tests/support/mutants.py --only law -- -m smoke

Each mutant is a line of the package that is changed in a copy. What follows `--` is
passed to pytest, after the files in which the decision is tested. A mutant that lives
is a promise that nothing holds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, NamedTuple

ROOT = Path(__file__).parents[2]
#: What the tests read beside the package.
BESIDE = ("tests", "docs", "examples", "benchmarks", "pyproject.toml", "README.md")


class Mutant(NamedTuple):
    """One broken decision: in `file`, `old` becomes `new`. `tests` should see it."""

    name: str
    file: str
    old: str
    new: str
    tests: str


PENDING, KINDS = "optimizer/pending.py", "optimizer/kinds.py"
LISTS = "optimizer/test_pending.py"
PROGRAMS = "optimizer/test_random_programs.py"
MUTANTS = [
    Mutant(
        "law 1: what was given to unscale may be unscaled",
        PENDING,
        "if kind.name == UNKNOWN and divisor is not None:",
        "if False:",
        LISTS,
    ),
    Mutant(
        "law 1: gradients are not known again by their number",
        PENDING,
        "others = tf.where(is_given, -pending, others)",
        "pass",
        LISTS,
    ),
    Mutant(
        "law 2: another optimizer's loss moves the state of one that waits",
        PENDING,
        "is_its = is_own or not self.observer.has_several",
        "is_its = True",
        PROGRAMS,
    ),
    Mutant(
        "law 2: an apply leaves its optimizer waiting",
        PENDING,
        "self._note_waiting(False)",
        "pass",
        LISTS,
    ),
    Mutant(
        "law 3: bodies are of unknown kind",
        KINDS,
        "if called and not is_used and",
        "if False and",
        LISTS,
    ),
    Mutant(
        "law 4: a counted overflow does not end",
        PENDING,
        "now = tf.where(held > COUNTED, SEEN, NONE)  # a counted one has ended",
        "now = held",
        LISTS,
    ),
    Mutant(
        "law 4: an overflow that no apply has counted ends with the next list",
        PENDING,
        "now = tf.where(is_finite, now, SEEN)",
        "now = tf.where(is_finite, NONE, SEEN)",
        PROGRAMS,
    ),
    Mutant(
        "law 5: mixed values are of unknown kind",
        KINDS,
        "return CHANGED if kind in {SQUARED, SCALED} and UNSCALED in found else kind",
        "return UNKNOWN if kind in {SQUARED, SCALED} and UNSCALED in found else kind",
        LISTS,
    ),
    Mutant(
        "law 5: nothing is said of gradients that another optimizer unscaled",
        PENDING,
        "elif not each.has_own:",
        "elif False:",
        LISTS,
    ),
    Mutant(
        "a list is divided by the loss scale of now",
        PENDING,
        "return tf.where(scaled_by > 0.0, scaled_by, now)",
        "return now",
        PROGRAMS,
    ),
]


def lives(mutant: Mutant, arguments: List[str]) -> bool:
    """Tells whether the tests pass although a decision is broken."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "lossscale", copy / "lossscale")
        for name in BESIDE:
            (copy / name).symlink_to(ROOT / name)
        path = copy / "lossscale" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.name}: {text.count(mutant.old)} such lines")
        path.write_text(text.replace(mutant.old, mutant.new))
        command = ["pytest", "-x", "-q", "-p", "no:cacheprovider", "--rootdir", folder]
        command += [*(f"tests/{each}" for each in mutant.tests.split()), *arguments]
        env = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=folder,
            env=env,
            capture_output=True,
            check=False,
        )
        if done.returncode not in (0, 1):
            raise SystemExit(done.stdout.decode()[-2000:] + done.stderr.decode()[-500:])
        return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="those with this in their names")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    given = parser.parse_args()
    chosen = [each for each in MUTANTS if given.only in each.name]
    left = []
    for each in chosen:
        is_alive = lives(each, given.pytest)
        left += [each.name] if is_alive else []
        print("LIVES" if is_alive else "dies ", each.name, flush=True)
    print(f"{len(chosen) - len(left)} of {len(chosen)} die")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
