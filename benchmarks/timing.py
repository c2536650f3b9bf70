"""How the benchmarks time: which malloc, in what order, and what a figure is worth.

A figure is a median, and its *error* an interval around it that holds the true median
with at least 90 %: that of the sign test, by its longer side. It asks nothing of how
the times are distributed, but that they are independent. Rounds of one process share a
layout of memory and what else the machine does for a while, so their error says how
well that process repeats itself; the medians of several processes say more. With fewer
than five values nothing is so sure.

What a wrapper adds is taken from differences within a round, and is *within noise* if
the error reaches to nothing.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

#: glibc keeps what it has, and takes it from one place.
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
#: Rounds are taken until the time is up, but no fewer.
LEAST_ROUNDS = 5
NOISE = "within noise"


def add_plain(parser):
    """Adds the argument that `keep_memory` asks for."""
    parser.add_argument("--plain", action="store_true", help="malloc as it is")


def keep_memory(plain):
    """Starts this program once more, with a malloc that keeps what it has, and says so.

    On machines that hand freed memory back to the host a fresh temporary of 40 MB costs
    ten times its arithmetic. malloc reads its settings when a process starts.

    Args:
      plain: Whether malloc is to stay as it is.

    Returns:
      What it said.
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
    """Returns the environment of a process whose malloc is as it is."""
    return {name: value for name, value in os.environ.items() if name not in KEEP}


# Rounds


def timed(function, settle=lambda: None):
    """Returns a function of a number of calls, that returns the seconds of one.

    Args:
      function: What is called. Once now: that is when TensorFlow traces it.
      settle: Waits until all is done that calls have begun.
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
      runs: What `timed` returned, by name.
      seconds: How long to go on.
    """
    slowest = max(run(2) for run in runs.values())
    calls = max(1, min(20, int(0.02 / slowest)))
    times = {name: [] for name in runs}
    names = list(runs)
    end = time.perf_counter() + seconds
    done = 0
    while time.perf_counter() < end or done < LEAST_ROUNDS:
        # Nobody always follows the same neighbour, who leaves the caches as they are.
        random.Random(done).shuffle(names)  # noqa: S311 - no secret
        for name in names:
            times[name].append(runs[name](calls))
        done += 1
    return times


# Figures


class Figure(NamedTuple):
    """A median and its error, in what the values were."""

    median: float
    error: float

    @property
    def is_noise(self):
        """Whether it may as well be nothing."""
        return not abs(self.median) > self.error

    def shown(self, digits=1, sign=""):
        """Returns it as text; `sign="+"` shows the sign of what is added."""
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
    """Returns the figure of what is added to a base, in ms, paired by round."""
    return milliseconds([mine - other for mine, other in zip(seconds, base)])


def over_processes(figures):
    """Returns the figure of processes' medians; one process alone has its own error."""
    if len(figures) == 1:
        return figures[0]
    return figure([each.median for each in figures])


def ratio(mine, other):
    """Returns one figure over another, None where either is within noise or below 0.

    The errors are taken as independent. Where both have the same base they are not, and
    the ratio's is less.
    """
    if not (mine.median > mine.error and other.median > other.error):
        return None
    value = mine.median / other.median
    relative = math.hypot(mine.error / mine.median, other.error / other.median)
    return Figure(value, abs(value) * relative)


def is_sure(mine, step):
    """Tells whether a figure is worth printing: its error is small enough.

    That is a third of the figure, or of 2 % of the step, if that is more.

    Args:
      mine: The figure of what is added to a step.
      step: The figure of the step.
    """
    return mine.error <= max(abs(mine.median), 0.02 * step.median) / 3


def compared(mine, others):
    """Returns, as text, how often what one adds is what another adds, or "same".

    Of several processes it is the figure of their ratios: a process in which all is
    slow has both slow. It is "same" if either is within noise, or what another adds is
    less than nothing, and they do not differ by more than their errors. Below 0 it is
    faster than with nothing added.

    Args:
      mine: A figure for each process.
      others: As many.
    """
    one, other = over_processes(mine), over_processes(others)
    differ = abs(one.median - other.median) > math.hypot(one.error, other.error)
    if not other.median > other.error or (one.is_noise and not differ):
        return "same" if not differ else f"{one.median - other.median:+.2f} ms"
    found = figure([a.median / b.median for a, b in zip(mine, others)])
    return found.shown(2)


def shown_ratio(found):
    """Returns what `ratio` found as text."""
    return NOISE if found is None else found.shown(2)


def markdown(head, rows):
    """Returns a table of texts; all columns but the first are right-aligned."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])


def status(key):
    """Returns a line of this process's status in kB. 0 where Linux does not say.

    "VmHWM" is the most memory that it ever held. What `resource` says is the parent's,
    if that held more when it started this one.
    """
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(li.split()[1]) for li in lines if li.startswith(key)), 0)
