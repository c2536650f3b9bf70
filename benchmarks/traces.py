"""What another trace of a step costs: time to build it, and memory that it keeps.

TensorFlow traces a training step for each shape of its batches, and keeps each trace.
All contenders run in one process and take turns. Memory is how much more malloc has
handed out after a trace's first run than before the trace, once Python has collected
its garbage. This needs Linux with glibc 2.33 or newer.

    python benchmarks/traces.py                                # five minutes
    python benchmarks/traces.py --workloads tiny --traces 40
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Behind PYTHONPATH: there is another checkout's, if one is compared with.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import tensorflow as tf
import timing
from workloads import INNER, WORKLOADS, Contender, Gradients, installed

#: The fields of glibc's `struct mallinfo2`, in its order.
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class MallInfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def handed_out():
    """Returns the bytes that malloc has handed out and not got back."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    gc.collect()
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def traced(contender, kept):
    """Traces a contender's step once more and runs it; returns seconds and bytes.

    Args:
      contender: The `Contender`.
      kept: A list that keeps the trace, as a program keeps it.
    """
    before = handed_out()
    function = tf.function(contender.function.python_function, autograph=False)
    start = time.perf_counter()
    function.get_concrete_function()
    seconds = time.perf_counter() - start
    function()
    kept.append(function)
    return seconds, handed_out() - before


def measure(workload, inner, names, traces):
    """Returns the seconds and the bytes of each contender's traces."""
    gradients = Gradients(*WORKLOADS[workload])
    kind = inner, "graph", gradients.make_variables(), gradients
    contenders = {name: Contender(name, *kind) for name in names}
    found, kept = {name: [] for name in names}, []
    for _ in range(traces + 2):
        for name, contender in contenders.items():
            found[name].append(traced(contender, kept))
    # The first traces fill caches that exist once.
    return {name: list(zip(*each[2:])) for name, each in found.items()}


def report(title, found):
    """Prints the time and memory of each contender's traces."""
    for name, (seconds, sizes) in found.items():
        megabytes = timing.figure([size / 1e6 for size in sizes])
        cells = [title, name, timing.milliseconds(seconds).shown(), megabytes.shown(2)]
        print("| " + " | ".join(cells) + " |", flush=True)


def main():
    """Prints a table of the traces that the arguments choose."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    there = installed()
    add("--workloads", nargs="+", choices=WORKLOADS, default=["tiny", "resnet50"])
    add("--inner", nargs="+", choices=INNER, default=["sgd"])
    add("--contenders", nargs="+", choices=there, default=there)
    add("--traces", type=int, default=10)
    timing.add_plain(parser)
    options = parser.parse_args()
    timing.keep_memory(options.plain)
    print("| another trace of | contender | built in, ms | leaves, MB |")
    print("| --- | --- | ---: | ---: |")
    for workload, inner in itertools.product(options.workloads, options.inner):
        found = measure(workload, inner, options.contenders, options.traces)
        report(f"{workload}, {inner}", found)


if __name__ == "__main__":
    main()
