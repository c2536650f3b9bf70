"""What our wrapper, and the wrappers of Keras, add to an optimizer's step.

It times the update alone: gradients in, variables changed. That explains what the whole
step of `training_step.py` costs. All contenders run in one process, share their
variables and take turns in every round, so that a busy machine slows them alike. What a
wrapper adds is the median over rounds of its time minus that of its bare optimizer in
the same round; `timing.py` explains the error.

    python benchmarks/step_overhead.py                            # everything: an hour
    python benchmarks/step_overhead.py --workloads resnet50 --inner sgd --modes graph
    python benchmarks/step_overhead.py --device gpu --json gpu.json
    python benchmarks/step_overhead.py --workloads small-10000 --modes graph --as-traced

TensorFlow's own graph optimizer takes minutes with thousands of variables, for a bare
optimizer too: `--as-traced` switches it off for all contenders.

Each gradient comes out of a matrix product that has the scaled loss as a factor, as a
layer's gradient does: a fresh temporary tensor, which a division may overwrite and
which XLA does not fuse. Every contender's time includes these products, the bare
optimizer's too.

Next to the times is their *limit*: the time of one `reduce_sum` over a flat tensor of
the gradients' bytes, which is the one read of memory that a check needs.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[1]))

import tensorflow as tf
import timing
from workloads import (
    CONTENDERS,
    INNER,
    RIVAL,
    WORKLOADS,
    Contender,
    Gradients,
    installed,
    timed,
    versions,
)

#: With this many gradients or more, a step is first tried in a process of its own.
MANY = 1000


def contenders_of(workload, inner, mode, names):
    """Returns contenders, and the gradients that they share with the variables."""
    gc.collect()  # those of the table before
    gradients = Gradients(*WORKLOADS[workload])
    variables = gradients.make_variables()
    kind = inner, mode, variables, gradients
    return [Contender(name, *kind) for name in names], gradients


def cpu_peak(workload, inner, name):
    """Returns the megabytes that a contender's first step takes, in a new process.

    TensorFlow keeps memory that it once had, so that later steps show nothing; so does
    a malloc that is told to.
    """
    given = ["--peak-of", name, "--workloads", workload, "--inner", inner]
    return float(timing.printed_last(*given, env=timing.without_keep()))


def print_peak(workload, inner, name):
    """Prints what `cpu_peak` reads. Linux only."""
    (contender,), _ = contenders_of(workload, inner, "graph", [name])
    contender.trace()
    before = timing.status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    timed(contender.function)
    print((timing.status("VmHWM") - before) / 1e3)


def limit_of(gradients, mode):
    """Returns a function that reads the gradients' bytes once."""
    flat = tf.Variable(tf.ones([gradients.count()], gradients.dtype))
    function = tf.function(lambda: tf.reduce_sum(flat), jit_compile=mode == "xla")
    return timed(function)


def unfinished(options, workload, inner, mode, name):
    """Returns the phase that a contender's step does not finish in time, or None.

    It tries the step in a new process, as nothing can stop TensorFlow within its own,
    and only if there are so many gradients that the step may not finish.
    """
    if len(WORKLOADS[workload][0]) < MANY:
        return None
    command = [sys.executable, __file__, "--probe", name, "--workloads", workload]
    command += ["--inner", inner, "--modes", mode, "--device", options.device]
    command += ["--as-traced"] if options.as_traced else []
    try:
        subprocess.run(  # noqa: S603 - this file
            command, check=True, stdout=subprocess.PIPE, timeout=options.patience
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"starting").decode().splitlines()[-1]
    return None


def probe(workload, inner, mode, name):
    """Prepares a contender and prints each phase as it begins."""
    print("making variables and optimizer", flush=True)
    (contender,), _ = contenders_of(workload, inner, mode, [name])
    contender.prepare(lambda phase: print(phase, flush=True))


def able(options, chosen):
    """Returns the contenders that can be measured, and prints the skipped ones."""
    names = []
    for name in options.contenders:
        phase = unfinished(options, *chosen, name)
        if phase is None:
            names.append(name)
        else:
            what = ", ".join((*chosen, name))
            print(f"\nskipped: {what}: {phase} passed {options.patience:.0f} s")
    return names


def measure(options, workload, inner, mode):
    """Returns all contenders' facts and times for a table, None without contenders."""
    names = able(options, (workload, inner, mode))
    if not names:
        return None
    contenders, gradients = contenders_of(workload, inner, mode, names)
    for contender in contenders:
        contender.prepare()
        if options.peaks and mode == "graph":
            contender.facts["peak_mb"] = cpu_peak(workload, inner, contender.name)
    runs = {contender.name: contender.run for contender in contenders}
    runs["limit"] = limit_of(gradients, mode)
    times = timing.interleaved(runs, options.seconds)
    rows = {contender.name: _row(contender, times) for contender in contenders}
    _compare(rows)
    result = {"workload": workload, "inner": inner, "mode": mode, "rows": rows}
    result["gradients"] = len(gradients.shapes)
    result["limit_ms"] = timing.milliseconds(times["limit"])
    result["rounds"] = len(times["limit"])
    return result


def _row(contender, times):
    contender.check()
    own = times[contender.name]
    row = dict(contender.facts, step_ms=timing.milliseconds(own))
    if contender.base in times:
        row["added_ms"] = timing.added(own, times[contender.base])
    return row


def _compare(rows):
    for name, row in rows.items():
        base = rows.get(CONTENDERS[name][2])
        if base is None:
            continue
        if row["nodes"] is not None:
            row["nodes_added"] = row["nodes"] - base["nodes"]
        if row["peak_mb"] is not None:
            row["peak_added_mb"] = row["peak_mb"] - base["peak_mb"]
        rival = rows.get(RIVAL.get(name))
        if rival is not None:
            row["of_rival"] = timing.ratio(row["added_ms"], rival["added_ms"])


def report(result):
    """Prints one table."""
    title = "{workload}, {inner}, {mode}: {gradients} gradients, {rounds} rounds"
    limit = result["limit_ms"]
    print("\n" + title.format(**result) + f", limit {limit.shown(3)} ms")
    head = ("", "step", "added", "of rival", "of limit", "nodes")
    columns = "{:15s} {:>15} {:>15} {:>12} {:>12} {:>6} {:>7} {:>8} {:>7}"
    print(columns.format(*head, "trace", "compile", "peak"))
    for name, row in result["rows"].items():
        cells = [name, row["step_ms"].shown(3), "", "", "", row["nodes"] or ""]
        if "added_ms" in row:
            cells[2] = row["added_ms"].shown(3)
            cells[4] = timing.shown_ratio(timing.ratio(row["added_ms"], limit))
        if "of_rival" in row:
            cells[3] = timing.shown_ratio(row["of_rival"])
        if "nodes_added" in row:
            cells[5] = f"+{row['nodes_added']}"
        cells.append(f"{row['trace_s']:.2f}")
        cells.append(f"{row['compile_s']:.2f}")
        peak = row.get("peak_added_mb", row["peak_mb"])
        mark = "+" if "peak_added_mb" in row else ""
        cells.append("" if peak is None else f"{mark}{peak:.0f}")
        print(columns.format(*cells), flush=True)


def parse():
    """Returns the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    modes = ["graph", "xla"]
    there = installed()
    add("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    add("--inner", nargs="+", choices=INNER, default=INNER)
    add("--modes", nargs="+", choices=modes, default=modes)
    add("--contenders", nargs="+", choices=there, default=there)
    add("--seconds", type=float, default=30, help="rounds of one table")
    add("--patience", type=float, default=300, help="seconds to prepare one of many")
    add("--as-traced", action="store_true", help="switch TensorFlow's optimizer off")
    add("--device", choices=["cpu", "gpu"], default="cpu")
    add("--peaks", action="store_true", help="peak memory on a CPU too")
    add("--peak-of", choices=there, help=argparse.SUPPRESS)
    add("--probe", choices=there, help=argparse.SUPPRESS)
    add("--json", default="step_overhead.json")
    timing.add_plain(parser)
    options = parser.parse_args()
    if options.device == "gpu" and not tf.config.list_physical_devices("GPU"):
        parser.error("`--device` must be cpu here, got gpu: TensorFlow sees no GPU.")
    return options


def tables(options, about):
    """Measures, prints and writes down one table after the other."""
    results = []
    every = itertools.product(options.modes, options.workloads, options.inner)
    for mode, workload, inner in every:
        result = measure(options, workload, inner, mode)
        if result is None:
            continue
        report(result)
        results.append(result)
        text = json.dumps({"about": about, "results": results}, indent=1)
        Path(options.json).write_text(text + "\n")


def main():
    """Measures what the arguments choose."""
    options = parse()
    if options.device == "cpu":
        tf.config.set_visible_devices([], "GPU")
    if options.as_traced:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    if options.peak_of:
        print_peak(options.workloads[0], options.inner[0], options.peak_of)
        return
    if options.probe:
        probe(options.workloads[0], options.inner[0], options.modes[0], options.probe)
        return
    about = versions()
    about["device"] = options.device
    about["malloc"] = timing.keep_memory(options.plain)
    print(about, "times in ms, trace and compile in s, peak in MB")
    print("A figure is a median over rounds, ± its error; see timing.py.")
    tables(options, about)


if __name__ == "__main__":
    main()
