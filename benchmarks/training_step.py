"""What loss scaling adds to a whole training step: forward, backward and update.

`step_overhead.py` explains why an update costs what it does. This script measures what
a user pays: much depends on where a gradient lies in memory when the update reads it.
The layout of memory moves a result by a factor of two, so each row is measured in
several processes. Within a process all contenders share the model's variables and take
turns; what a wrapper adds is the median of its differences to the bare step of the same
round. The row's figure is the median over processes, with the error of `timing.py`; the
script prints each process's median, too. At the end it prints the table of
docs/cost.md.

Each row takes five processes, and more until the error of what is added is at most a
third of it, or of 2 % of the step. `--peaks 5` adds the greatest resident set of each
contender, from five processes that take three steps, with malloc's default settings.

    python benchmarks/training_step.py                       # all of it: hours
    python benchmarks/training_step.py --inner adam --modes graph --processes 8
    python benchmarks/training_step.py --families keras3 keras2-new keras2-legacy
    python benchmarks/training_step.py --models transformer mlp --dtypes float16
    python benchmarks/training_step.py --against ../other    # that checkout's, in turn
    python benchmarks/training_step.py --models wide --peaks 5 --processes 0
    BEFORE=../other python benchmarks/training_step.py --more before before-tf_keras

The last one has another checkout's lossscale in the same process, where it takes turns
with ours. That shows smaller differences than `--against`, whose checkouts are measured
in separate processes.

The models `four` and `four-skipped` are no networks, but four variables of 100 numbers
whose gradients are products of matrices. A transformer's embedding has sparse
gradients; "float16" is a policy under which variables and gradients are float16. With
five processes the error reaches to the farthest one; with eight or eleven it leaves out
one or two at each end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Behind PYTHONPATH: there is another checkout's, if one is compared with.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import networks
import tensorflow as tf
import timing
from workloads import CONTENDERS, INNER, RIVAL, Contender, families, timed

MODES = ["graph", "xla", "eager"]
DTYPES = ["float32", "mixed_float16", "float16"]
#: The names of the families' optimizers in the table.
TITLES = {
    "keras3": "Keras 3",
    "keras2-new": "tf_keras",
    "keras2-legacy": "tf_keras, legacy",
}
HEAD = ["training step", "optimizer of", "bare", "Keras's wrapper adds"]
HEAD += ["ours adds", "ours / Keras's"]
PEAKS = ["MB, bare", "Keras's wrapper", "ours"]


def names_of(family):
    """Returns a family's contenders: bare, its own wrapper, ours."""
    ours = next(
        name
        for name, (of, wrapping, _) in CONTENDERS.items()
        if (of, wrapping) == (family, "dynamic")
    )
    return [CONTENDERS[ours][2], RIVAL[ours], ours]


# One process


def measure(options):
    """Prints one row as JSON: the bare step's median, and what each wrapper adds."""
    (model,), (dtype,) = options.models, options.dtypes
    (inner,), (mode,) = options.inner, options.modes
    shared = networks.make(model, dtype)
    names = [name for family in options.families for name in names_of(family)]
    names += options.more
    contenders = [Contender(name, inner, mode, *shared) for name in names]
    runs = {each.name: timed(each.function) for each in contenders}
    times = timing.interleaved(runs, options.seconds)
    found = {}
    for each in contenders:
        each.check(skips=model == "four-skipped")
        base = times.get(each.base)
        own = times[each.name]
        found[each.name] = timing.added(own, base) if base else timing.milliseconds(own)
    print(json.dumps(found))


def print_peak(name, options):
    """Prints the greatest resident set of this process in MB, once it has trained."""
    (model,), (dtype,) = options.models, options.dtypes
    (inner,), (mode,) = options.inner, options.modes
    contender = Contender(name, inner, mode, *networks.make(model, dtype))
    for _ in range(3):
        contender.function()
    print(timing.status("VmHWM") / 1e3)


def printed(root, row, environment, *more):
    """Returns what a new process with a checkout's lossscale prints last."""
    model, dtype, inner, mode = row
    given = ["--models", model, "--dtypes", dtype, "--inner", inner, "--modes", mode]
    environment = {**environment, "PYTHONPATH": str(root)}
    return json.loads(timing.printed_last(*given, *more, env=environment))


def in_process(root, row, options):
    """Returns what `measure` prints in a new process with a checkout's lossscale."""
    more = ["--measure", "--seconds", str(options.seconds), "--more", *options.more]
    found = printed(root, row, os.environ, *more, "--families", *options.families)
    return {name: timing.Figure(*figure) for name, figure in found.items()}


def in_processes(roots, row, options):
    """Returns for each root a list of `in_process`'s results, until they are enough."""
    found = {name: [] for name in roots}
    for number in range(options.most if options.processes else 0):
        if number >= options.processes and all(map(is_enough, found.values())):
            break
        for name, root in roots.items():
            found[name].append(in_process(root, row, options))
    return found


def is_enough(processes):
    """Tells whether what each contender adds is known well enough."""
    for name in processes[0]:
        figures = [
            timing.over_processes([p[each] for p in processes])
            for each in (name, CONTENDERS[name][2] or name)
        ]
        if CONTENDERS[name][2] and not timing.is_sure(*figures):
            return False
    return True


# The table


def title_of(row):
    """Returns how a row is called."""
    model, dtype, inner, mode = row
    return f"{model}, {INNER[inner][0]}, {dtype}, {'XLA' if mode == 'xla' else mode}"


def rows_of(title, family, found, more):
    """Prints a family's figures, each process's too, and returns its row of the table.

    Args:
      title: What was measured.
      family: The kind of optimizers.
      found: A list of what `in_process` returned.
      more: The names of further contenders, which are not in the table.
    """
    if not found:  # only memory was asked for
        return [title, TITLES[family], *[""] * 4]
    figures = []
    of_family = [name for name in more if CONTENDERS[name][0] == family]
    for name in names_of(family) + of_family:
        processes = [process[name] for process in found]
        figures.append(timing.over_processes(processes))
        listed = " ".join(f"{each.median:.3f}" for each in processes)
        print(f"  {name:15} {figures[-1].shown(3):>14} ms, by process: {listed}")
    cells = [figure.shown(2) for figure in figures[: len(names_of(family))]]
    each = ([process[name] for process in found] for name in names_of(family)[:0:-1])
    return [title, TITLES[family], *cells, timing.compared(*each)]


def peaks_of(root, row, family, processes):
    """Returns the peak megabytes of a family's contenders, from new processes."""
    plain = timing.without_keep()
    cells = []
    for name in names_of(family):
        each = [printed(root, row, plain, "--peak-of", name) for _ in range(processes)]
        print(f"  {name:14} peak MB:", *(f"{peak:.0f}" for peak in each), flush=True)
        cells.append(timing.figure(each).shown(0))
    return cells


def table(options):
    """Measures, prints what each process found, and returns the rows of the table."""
    roots = {"": Path(__file__).resolve().parents[1]}
    if options.against:
        roots[f", {options.against.name}"] = options.against.resolve()
    rows = []
    every = options.models, options.dtypes, options.inner, options.modes
    for row in itertools.product(*every):
        for name, processes in in_processes(roots, row, options).items():
            title = title_of(row) + name
            print(title, flush=True)
            for family in options.families:
                rows.append(rows_of(title, family, processes, options.more))
                if options.peaks:
                    rows[-1] += peaks_of(roots[name], row, family, options.peaks)
    return rows


def parse():
    """Returns the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", maxsplit=1)[0],
        epilog="Milliseconds: medians over processes, ± their error.",
    )
    add = parser.add_argument
    there = list(families())
    two = [name for name in there if name != "keras2-legacy"] or there
    default = [name for name in networks.MODELS if name not in networks.FOUR]
    add("--models", nargs="+", choices=networks.MODELS, default=default)
    add("--dtypes", nargs="+", choices=DTYPES, default=DTYPES[:2])
    add("--inner", nargs="+", choices=INNER, default=list(INNER))
    add("--modes", nargs="+", choices=MODES, default=MODES[:2])
    add("--families", nargs="+", choices=there, default=two)
    add("--more", nargs="*", choices=CONTENDERS, default=[], help="to print, too")
    add("--processes", type=int, default=5, help="of a row at least; 0: no times")
    add("--most", type=int, default=12, help="processes of a row at most")
    add("--peaks", type=int, default=0, help="processes for peak memory; Linux only")
    add("--seconds", type=float, default=20, help="rounds of one process")
    add("--against", type=Path, help="another checkout's folder")
    add("--measure", action="store_true", help=argparse.SUPPRESS)
    add("--peak-of", choices=CONTENDERS, help=argparse.SUPPRESS)
    timing.add_plain(parser)
    return parser.parse_args()


def main():
    """Measures in processes, or is one of them."""
    options = parse()
    tf.config.set_visible_devices([], "GPU")
    if options.measure:
        measure(options)
        return
    if options.peak_of:
        print_peak(options.peak_of, options)
        return
    timing.keep_memory(options.plain)
    print("ms; what a wrapper adds, by process; ± the error, see timing.py")
    rows = table(options)
    head = [*HEAD, *PEAKS] if options.peaks else HEAD
    print("\n" + timing.markdown(head, rows))


if __name__ == "__main__":
    main()
