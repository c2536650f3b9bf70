"""How the benchmarks time: which malloc, in what order, and how sure a figure is.

A figure is a median. Its *error* is the longer side of the interval of the sign test,
which holds the true median with a probability of at least 90 %. The sign test assumes
nothing of how the times are distributed, only that they are independent. Rounds of one
process share a layout of memory, and the other load of the machine for a while. So
their error says how well that process repeats itself; the medians of several processes
say more. With fewer than five values there is no such interval.

What a wrapper adds is computed from differences within a round. It is *within noise* if
its error is as large as the figure.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

#: With these settings glibc keeps the memory that it has, and takes it from one place.
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
#: Rounds go on until the time is up, but there are at least this many.
LEAST_ROUNDS = 5
NOISE = "within noise"


def add_plain(parser):
    """Adds the argument that `keep_memory` asks for."""
    parser.add_argument("--plain", action="store_true", help="malloc as it is")


def keep_memory(plain):
    """Restarts this program, with a malloc that keeps freed memory, and says so.

    On machines that hand freed memory back to the host, a fresh temporary of 40 MB
    costs ten times as much as its arithmetic. malloc reads its settings when a process
    starts.

    Args:
      plain: Whether malloc is to stay as it is.

    Returns:
      The text that it printed.
    """
    settings = " ".join(f"{name}={value}" for name, value in KEEP.items())
    is_plain = plain or sys.platform != "linux"
    if not is_plain and not KEEP.items() <= os.environ.items():
        os.environ.update(KEEP)
        os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606 - this one
    started = f"started again with {settings}; --plain leaves that out"
    said = "malloc is as it is" if is_plain else started
    print(said, flush=True)
    return said


def without_keep():
    """Returns the environment of a process with malloc's default settings."""
    return {name: value for name, value in os.environ.items() if name not in KEEP}


def printed_last(*arguments, env=None):
    """Returns the last line that this program prints in a new process.

    Args:
      *arguments: The arguments of that process.
      env: Its environment; None: as this one's.
    """
    child = subprocess.run(  # noqa: S603 - this very program
        [sys.executable, sys.argv[0], *arguments],
        env=env,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return child.stdout.splitlines()[-1]


# Rounds


def timed(function, settle=lambda: None):
    """Returns a function from a number of calls to the seconds that one call takes.

    Args:
      function: What is called. It is called once now, so that TensorFlow traces it.
      settle: A function that waits until everything is done that the calls began.
    """
    function()

    def run(calls):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        settle()
        return (time.perf_counter() - start) / calls

    return run


def interleaved(runs, seconds):
    """Returns each run's seconds per call, in rounds that hold every one of them.

    Args:
      runs: The functions that `timed` returned, by name.
      seconds: How long to go on.
    """
    slowest = max(run(2) for run in runs.values())
    calls = max(1, min(20, int(0.02 / slowest)))
    times = {name: [] for name in runs}
    names = list(runs)
    end = time.perf_counter() + seconds
    done = 0
    while time.perf_counter() < end or done < LEAST_ROUNDS:
        # The order changes, so that no run always finds the caches of the same run.
        random.Random(done).shuffle(names)  # noqa: S311 - no secret
        for name in names:
            times[name].append(runs[name](calls))
        done += 1
    return times


# Figures


class Figure(NamedTuple):
    """A median and its error, in the unit of the values."""

    median: float
    error: float

    @property
    def is_noise(self):
        """Whether the true value may be zero."""
        return not abs(self.median) > self.error

    def shown(self, digits=1, sign=""):
        """Returns the figure as text; `sign="+"` shows the sign of a positive one."""
        error = f"{self.error:.{digits}f}" if math.isfinite(self.error) else "?"
        return f"{self.median:{sign}.{digits}f} ±{error}"


def figure(values):
    """Returns the `Figure` of values."""
    ordered = sorted(values)
    count, median = len(ordered), statistics.median(ordered)
    # The true median is left of the `cut` least or right of the `cut` greatest values
    # with 2 * P(at most `cut - 1` of `count` coins show heads). Whole numbers: a float
    # holds no 2**1024.
    cut, ways, outside = 0, 1, 2
    while 10 * outside <= 2**count:
        cut += 1
        ways = ways * (count - cut + 1) // cut
        outside += 2 * ways
    if not cut:
        return Figure(median, math.inf)
    return Figure(median, max(median - ordered[cut - 1], ordered[-cut] - median))


def milliseconds(seconds):
    """Returns the figure of times."""
    return figure([1e3 * each for each in seconds])


def added(seconds, base):
    """Returns the figure of what a run adds to a base, in ms, paired by round."""
    return milliseconds([mine - other for mine, other in zip(seconds, base)])


def over_processes(figures):
    """Returns the figure of processes' medians; a single process has its own error."""
    if len(figures) == 1:
        return figures[0]
    return figure([each.median for each in figures])


def ratio(mine, other):
    """Returns one figure over another, None if either is within noise or below 0.

    It assumes that the errors are independent. If both figures have the same base they
    are not, and the ratio's error is smaller.
    """
    if not (mine.median > mine.error and other.median > other.error):
        return None
    value = mine.median / other.median
    relative = math.hypot(mine.error / mine.median, other.error / other.median)
    return Figure(value, abs(value) * relative)


def is_sure(mine, step):
    """Tells whether a figure is worth printing: its error is small enough.

    The error may be a third of the figure, or of 2 % of the step if that is more.

    Args:
      mine: The figure of what a wrapper adds to a step.
      step: The figure of the step.
    """
    return mine.error <= max(abs(mine.median), 0.02 * step.median) / 3


def compared(mine, others):
    """Returns as text the ratio of what two wrappers add, or "same".

    For several processes it is the figure of their ratios: in a slow process both are
    slow. It is "same" if one of the two is within noise, or the other's is below 0, and
    they do not differ by more than their errors. A wrapper that adds less than 0 makes
    the step faster than a bare optimizer.

    Args:
      mine: For each process the figure of what the first wrapper adds.
      others: As many figures, for the second wrapper.
    """
    one, other = over_processes(mine), over_processes(others)
    differ = abs(one.median - other.median) > math.hypot(one.error, other.error)
    if not other.median > other.error or (one.is_noise and not differ):
        return "same" if not differ else f"{one.median - other.median:+.2f} ms"
    found = figure([a.median / b.median for a, b in zip(mine, others)])
    return found.shown(2)


def shown_ratio(found):
    """Returns the result of `ratio` as text."""
    return NOISE if found is None else found.shown(2)


def shown_share(more, base, digits):
    """Returns as text how many percent of one figure another one is."""
    return NOISE if more.is_noise else f"{more.median / base.median:+.{digits}%}"


def markdown(head, rows):
    """Returns a table of texts; all columns but the first are right-aligned."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])


def status(key):
    """Returns a line of this process's status in kB, 0 where there is no Linux.

    "VmHWM" is the most memory that the process ever held. `resource` would give the
    parent's, if the parent held more when it started this process.
    """
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(li.split()[1]) for li in lines if li.startswith(key)), 0)
