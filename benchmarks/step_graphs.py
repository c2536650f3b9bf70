"""The graph gate: which operations a training step consists of.

A refactoring should move code and leave the step as it is. This script shows whether it
did: it traces small steps of every kind, counts their operations by type, and compares
the counts with those of another checkout. Names do not matter, only types.

    python benchmarks/step_graphs.py                           # one line for each step
    python benchmarks/step_graphs.py --details --modes graph   # and the counts by type
    python benchmarks/step_graphs.py --json before.json        # keeps them
    python benchmarks/step_graphs.py --against before.json     # compares: exit 0 or 1
    python benchmarks/step_graphs.py --against ../before       # with another checkout
    python benchmarks/step_graphs.py --modes launches          # and Keras's own wrapper

Equal counts do not prove equal steps: operations may be wired in another way. The tests
check what a step computes.

The script counts graphs as they are traced, with both branches of a `cond`. Next to
these counts it shows the nodes that a good step executes, as in `step_overhead.py`, and
the instructions that XLA makes of the step. A file of counts is valid for one machine
and its versions.

The mode `launches` counts the kernels that a good step of dense layers would start on a
GPU, with a bare optimizer, with the wrapper of its Keras and with ours. At the end a
table shows what either wrapper adds.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# The checkout to count: this one, or the one that it is compared with.
sys.path.insert(0, os.environ.get("STEPS_OF", str(Path(__file__).parents[1])))

import tensorflow as tf
from tensorflow.python.framework import op_callbacks
from workloads import INNER, executed_nodes, families, launches, versions

import lossscale

#: Small gradients, of which two have one shape, and one too large to be packed.
SHAPES = [(64, 64), (64,), (200, 100), (100,), (100,)]
LOOPS = ["scale-apply", "unscale-clip-apply"]
SCALES = {
    "dynamic": lossscale.DynamicLossScale,
    "fixed": functools.partial(lossscale.FixedLossScale, 128),
}
#: The steps of the mode `launches`, and whose wrapper they use.
LAYERS = {"2-layers": 2, "20-layers": 20}
WRAPPERS = ["bare", "its-own", "ours"]
#: One instruction of a program of XLA, and in it the name of what it does.
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?\S+ = .*?\s([a-z][a-z0-9-]*)\(", re.MULTILINE)


# The steps


def make_step(family, loop, inner, scale):
    """Returns a step, with variables and an optimizer of its own."""
    optimizers, make_variable, _ = families()[family]
    variables = [make_variable(tf.fill(shape, 0.01)) for shape in SHAPES]
    class_name, rate = INNER[inner]
    bare = getattr(optimizers, class_name)(rate)
    optimizer = lossscale.LossScaleOptimizer(bare, SCALES[scale]())
    optimizer.build(variables)

    def step():
        grads = scaled_gradients(optimizer, variables)
        if loop == "unscale-clip-apply":
            grads = optimizer.get_unscaled_gradients(grads)
            grads, _ = tf.clip_by_global_norm(grads, 1.0)
        optimizer.apply_gradients(list(zip(grads, variables)))

    return step


def make_layers_step(family, layers, inner, wrapper):
    """Returns a step of a few dense layers, as `make_step` does, that returns the loss.

    No two kernels are packed, since they are large. Biases are.
    """
    optimizers, make_variable, wrap = families()[family]
    shapes = [(100, 100), (100,)] * LAYERS[layers]
    variables = [make_variable(tf.fill(shape, 0.01)) for shape in shapes]
    held = [v if isinstance(v, tf.Variable) else v.value for v in variables]
    class_name, rate = INNER[inner]
    optimizer = getattr(optimizers, class_name)(rate)
    if wrapper != "bare":
        ours = lossscale.LossScaleOptimizer
        optimizer = (ours if wrapper == "ours" else wrap)(optimizer)
    if hasattr(optimizer, "build"):  # Keras 2's legacy ones have none
        optimizer.build(variables)
    scale = getattr(optimizer, "scale_loss", None)
    scale = scale or getattr(optimizer, "get_scaled_loss", tf.identity)
    inputs = tf.ones([4, 100])

    def step():
        with tf.GradientTape() as tape:
            values = inputs
            for kernel, bias in zip(held[::2], held[1::2]):
                values = tf.nn.bias_add(values @ kernel, bias)
            loss = tf.reduce_mean(values * values)
            scaled = scale(loss)
        grads = tape.gradient(scaled, held)
        if wrapper != "bare" and family != "keras3":
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(list(zip(grads, variables)))
        return loss

    return step


def scaled_gradients(optimizer, variables):
    """Returns the gradients of a scaled loss."""
    # A tape does not know Keras 3's variables, only the TensorFlow variables in them.
    held = [v if isinstance(v, tf.Variable) else v.value for v in variables]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(value * value) for value in held])
        scaled = optimizer.scale_loss(loss)
    return tape.gradient(scaled, held)


# Their operations: histograms, by what is counted


def eager(make):
    """Counts what one step executes eagerly, after two that create the variables."""
    found = collections.Counter()

    def count(kind, *_, graph=None, **__):
        if graph is None:  # executed, not added to a graph
            name = tf.compat.as_str(kind)
            # A function's ends in a number that no two processes share.
            found["(function)" if name.startswith("__") else name] += 1

    step = make()
    step()
    step()
    # Optimizers of earlier steps listen, and read variables, until they are freed.
    gc.collect()
    # Private; nothing public does it (seen on 2.8, 2.10, 2.15, 2.16 and 2.21).
    op_callbacks.add_op_callback(count)
    try:
        step()
    finally:
        op_callbacks.remove_op_callback(count)
    return {"ops": found}


def graph(make):
    """Counts the traced nodes of a step, and those that it executes."""
    function = tf.function(make(), autograph=False)
    traced = traced_nodes(function)
    return {"ops": traced, "executed": {"nodes": executed_nodes(function)}}


def xla(make):
    """Counts the traced nodes of a step, and the instructions that XLA makes of it."""
    function = tf.function(make(), autograph=False, jit_compile=True)
    program = function.experimental_get_compiler_ir()(stage="optimized_hlo")
    compiled = collections.Counter(INSTRUCTION.findall(program))
    return {"ops": traced_nodes(function), "hlo": compiled}


def replicas(make):
    """Counts the traced nodes of a step on two replicas."""
    strategy = mirrored()
    with strategy.scope():
        step = make()
    function = tf.function(lambda: strategy.run(step), autograph=False)
    return {"ops": traced_nodes(function)}


def started(make):
    """Counts the kernels that a good step starts."""
    return {"launches": launches(tf.function(make(), autograph=False))}


@functools.lru_cache(maxsize=None)
def mirrored():
    """Returns the only strategy: a second one would break its collectives."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def traced_nodes(function):
    """Counts the nodes of a `tf.function` and of all functions that it calls."""
    traced = function.get_concrete_function().graph.as_graph_def()
    bodies = [traced.node, *(each.node_def for each in traced.library.function)]
    return collections.Counter(node.op for body in bodies for node in body)


MODES = {
    "eager": eager,
    "graph": graph,
    "xla": xla,
    "replicas": replicas,
    "launches": started,
}


def chosen(options):
    """Yields the steps that the arguments choose, each as a tuple of its five names."""
    for mode in options.modes:
        loops, last = (LAYERS, WRAPPERS) if mode == "launches" else (LOOPS, SCALES)
        every = options.families, loops, options.inner, last
        for family, loop, inner, scale in itertools.product(*every):
            if scale != "fixed" or mode == "graph":
                yield mode, family, loop, inner, scale


def count_all(options, show):
    """Returns the histograms of all chosen steps, and prints each as it is counted."""
    steps = {}
    for mode, *kind in chosen(options):
        name = " ".join((mode, *kind))
        make = make_layers_step if mode == "launches" else make_step
        counted = MODES[mode](functools.partial(make, *kind))
        steps[name] = {part: dict(sorted(of.items())) for part, of in counted.items()}
        show(name, steps[name])
    return {"about": versions(), "lossscale": lossscale.__file__, "steps": steps}


def line(name, counted):
    """Prints how many operations a step has."""
    cells = name.split()
    for part in ("ops", "executed", "hlo", "launches"):
        total = sum(counted.get(part, {}).values())
        cells.append(f"{total:5} {part}" if part in counted else "")
    print("{:8} {:13} {:18} {:4} {:7} {} {}{}{}".format(*cells), flush=True)


def details(name, counted):
    """Prints how many operations a step has, and of which types."""
    line(name, counted)
    for part, histogram in counted.items():
        for kind, count in histogram.items():
            print(f"    {part:9} {kind:40} {count:6}")


def added(steps):
    """Returns a table: what each wrapper adds to the launches of a bare step."""
    rows = ["| optimizer of | step | bare | its own wrapper adds | ours adds |"]
    rows += ["| --- | --- | ---: | ---: | ---: |"]
    totals = {n: sum(of.get("launches", {}).values()) for n, of in steps.items()}
    for name, bare in totals.items():
        mode, family, layers, inner, wrapper = name.split()
        if mode == "launches" and wrapper == "bare":
            stem = name[: -len(wrapper)]
            theirs, ours = (totals[stem + by] - bare for by in WRAPPERS[1:])
            step = f"{layers.replace('-', ' ')}, {inner}"
            rows.append(f"| {family} | {step} | {bare} | {theirs} | {ours} |")
    return "\n".join(rows)


# The comparison


def counts_of(other, options):
    """Returns the counts of another checkout, or those in a file."""
    if Path(other).is_file():
        return json.loads(Path(other).read_text())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "counts.json")
        command = [sys.executable, __file__, "--json", str(file)]
        command += ["--modes", *options.modes, "--families", *options.families]
        command += ["--inner", *options.inner]
        env = dict(os.environ, STEPS_OF=str(Path(other).resolve()))
        quiet = subprocess.DEVNULL
        subprocess.run(command, check=True, env=env, stdout=quiet)  # noqa: S603
        return json.loads(file.read_text())


def differences(here, there):
    """Yields the differences of two steps: what was counted, its type, both counts."""
    for part in sorted({*here, *there}):
        mine, theirs = here.get(part, {}), there.get(part, {})
        for kind in sorted({*mine, *theirs}):
            counts = mine.get(kind, 0), theirs.get(kind, 0)
            if counts[0] != counts[1]:
                yield (part, kind, *counts)


def compare(here, there):
    """Prints what differs between two checkouts, and returns whether anything does."""
    print(f"here {here['lossscale']}, there {there['lossscale']}")
    if here["about"] != there["about"]:
        print(f"They may differ by where they ran: {here['about']}, {there['about']}")
    changed = 0
    for name, counted in here["steps"].items():
        found = list(differences(counted, there["steps"].get(name, {})))
        changed += bool(found)
        lines = [f"    {p:9} {k:40} here {n:6}, there {m:6}" for p, k, n, m in found]
        print("\n".join([name, *lines, ""]) if found else "", end="")
    verdict = f"{changed} differ" if changed else "all equal"
    print(f"{len(here['steps'])} steps: {verdict}")
    return changed > 0


def parse():
    """Returns the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    there = list(families())
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--families", nargs="+", choices=there, default=there)
    add("--inner", nargs="+", choices=INNER, default=list(INNER))
    add("--details", action="store_true", help="print the counts by type, too")
    add("--json", help="a file that the counts are written to")
    add("--against", help="another checkout's folder, or a file of its counts")
    options = parser.parse_args()
    other = options.against
    if other and not Path(other).is_file() and not Path(other, "lossscale").is_dir():
        parser.error(f"`--against` must be a checkout or a file, got {other}.")
    return options


def main():
    """Counts, and compares if there is something to compare with."""
    options = parse()
    there = counts_of(options.against, options) if options.against else None
    tf.get_logger().setLevel("ERROR")
    tf.config.set_visible_devices([], "GPU")
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    show = details if options.details else line
    here = count_all(options, (lambda *_: None) if there else show)
    if "launches" in options.modes and not there:
        print(added(here["steps"]))
    if options.json:
        Path(options.json).write_text(json.dumps(here, indent=1) + "\n")
    sys.exit(compare(here, there) if there else 0)


if __name__ == "__main__":
    main()
