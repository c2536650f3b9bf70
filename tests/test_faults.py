"""What goes wrong outside: killed processes, damaged files, and very long runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import trainee
from models import assert_same

HERE = Path(__file__).parent
KILLS = 10
SECONDS = 280


@contextmanager
def started(family, folder):
    """Starts the trainee, which ends with this context, or after `SECONDS`."""
    command = [sys.executable, str(HERE / "trainee.py"), family.name, str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )

    def kill():
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    watchdog = threading.Timer(SECONDS, kill)
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        kill()
        process.communicate()


def lines_of(process, folder):
    """Yields the lines that the trainee prints."""
    while True:
        line = process.stdout.readline()
        assert line, (folder / "log").read_text()[-1500:]
        yield line.split()


def next_life(lines):
    """Returns with which step the next process begins, and its number."""
    _, *numbers = next(line for line in lines if line[0] == "from")
    return tuple(map(int, numbers))


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_never_killed(family, tmp_path):
    rng, safe = np.random.default_rng(3), 0
    with started(family, tmp_path) as process:
        lines = lines_of(process, tmp_path)
        for _ in range(KILLS):
            first, number = next_life(lines)
            assert first >= safe
            # Counted in lines, so also within a checkpoint. By the time that the signal
            # arrives, the process has gone on for a moment that nobody chose.
            for _ in range(int(rng.integers(2, 16))):
                seen = next(lines)
                if seen[0] == "end":
                    break
            os.kill(number, signal.SIGKILL)
            # Before a step begins, all checkpoints before it have been written.
            if seen[0] == "step":
                safe = int(seen[1]) // trainee.SAVE_EVERY * trainee.SAVE_EVERY
        assert next_life(lines)[0] >= safe > 0
        assert ["end"] in lines
    model = trainee.make(family)
    trainee.train(model, 0)
    with np.load(str(tmp_path / "end.npz")) as end:
        assert_same([end[name] for name in end.files], trainee.state(model))
