"""What loss scaling adds to an optimizer's step, ours and the wrappers of Keras.

Times the step alone: gradients in, variables changed. All contenders stand in one
process, hold the same shapes and take turns in every round, so that a busy machine
slows them alike. What a wrapper adds is the median over rounds of its time less that
of its bare optimizer in the same round.

    python benchmarks/step_overhead.py                            # everything: an hour
    python benchmarks/step_overhead.py --workloads resnet50 --inner sgd --modes graph
    python benchmarks/step_overhead.py --device gpu --json gpu.json

Gradients are fresh temporaries in graph mode, as after a backward pass, so that a
division may run in place. Under XLA they are the values of variables: arithmetic before
the step would be fused into the bare step, and real gradients come out of a matrix
product, which is not.

Next to the times stands their *limit*: one `reduce_sum` over one flat tensor of the
gradients' bytes, the one read of memory that a check needs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import numpy as np
import tensorflow as tf

import lossscale

try:
    import tf_keras
except ImportError:
    tf_keras = None

INNER = {"sgd": ("SGD", 1e-6), "adam": ("Adam", 1e-6)}
#: Name -> the Keras of the optimizer, what wraps it, and whom it is compared with.
CONTENDERS = {
    "bare": (keras, None, None),
    "keras3": (keras, "theirs", "bare"),
    "ours": (keras, "dynamic", "bare"),
    "ours-fixed": (keras, 1024.0, "bare"),
    "tf_keras-bare": (tf_keras, None, None),
    "tf_keras": (tf_keras, "theirs", "tf_keras-bare"),
    "ours-tf_keras": (tf_keras, "dynamic", "tf_keras-bare"),
}
RIVAL = {"ours": "keras3", "ours-fixed": "keras3", "ours-tf_keras": "tf_keras"}


def resnet50():
    """Returns the 161 shapes of ResNet-50's variables, 25.6 million numbers."""
    shapes = [(7, 7, 3, 64), (64,), (64,)]
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convs = [(1, width_in, width), (3, width, width), (1, width, 4 * width)]
            if block == 0:
                convs.append((1, width_in, 4 * width))
            for size, inputs, outputs in convs:
                shapes += [(size, size, inputs, outputs), (outputs,), (outputs,)]
            width_in = 4 * width
    return [*shapes, (2048, 1000), (1000,)]


#: Name -> the variables' shapes and, of an embedding, the rows that a step touches.
WORKLOADS = {
    "resnet50": (resnet50(), None),
    "large": ([(10_000_000,)] * 4, None),
    "small-1000": ([(32, 32)] * 1000, None),
    "small-10000": ([(16,)] * 10_000, None),
    "embedding-1e4": ([(10_000, 32)], 64),
    "embedding-1e6": ([(1_000_000, 32)], 64),
}


class Gradients:
    """Where the gradients of a workload come from, the same for all contenders."""

    def __init__(self, shapes, rows, mode):
        self.rows = rows
        self.shapes = [(rows, *shape[1:]) for shape in shapes] if rows else shapes
        self.dense_shapes = shapes
        self.value = tf.Variable(32.0, trainable=False)
        self.indices = tf.range(rows) * 7 if rows else None
        self.stored = None
        if mode == "xla":
            self.stored = [tf.Variable(tf.fill(shape, 32.0)) for shape in self.shapes]

    def __call__(self):
        dense = self.stored or [tf.fill(shape, self.value) for shape in self.shapes]
        if not self.rows:
            return [tf.convert_to_tensor(value) for value in dense]
        shape = self.dense_shapes[0]
        return [tf.IndexedSlices(v, self.indices, shape) for v in dense]

    def count(self):
        """Returns the number of elements."""
        return sum(int(np.prod(shape)) for shape in self.shapes)


class Contender:
    """One optimizer, wrapped or bare, with variables of its own, and its step."""

    def __init__(self, name, inner, gradients, mode):
        self.name = name
        keras_of, wrapping, self.base = CONTENDERS[name]
        class_name, rate = INNER[inner]
        optimizer = getattr(keras_of.optimizers, class_name)(rate)
        self._variables = _variables(keras_of, gradients.dense_shapes)
        if wrapping == "theirs":
            module = keras if keras_of is keras else keras_of.mixed_precision
            where = module.optimizers if keras_of is keras else module
            optimizer = where.LossScaleOptimizer(optimizer)
        elif wrapping is not None:
            optimizer = lossscale.LossScaleOptimizer(optimizer, wrapping)
        optimizer.build(self._variables)
        # Keras 2's convention is that the loop unscales.
        unscales = wrapping is not None and keras_of is not keras

        def step():
            grads = gradients()
            if wrapping is not None:
                scale = getattr(optimizer, "scale_loss", None)
                (scale or optimizer.get_scaled_loss)(tf.constant(1.0))
            if unscales:
                grads = optimizer.get_unscaled_gradients(grads)
            optimizer.apply_gradients(list(zip(grads, self._variables)))

        self.function = tf.function(step, jit_compile=mode == "xla", autograph=False)
        self._mode = mode
        self.facts = {}

    def trace(self):
        """Returns the traced step."""
        return self.function.get_concrete_function()

    def prepare(self):
        """Traces, compiles and runs the step, and notes what that took."""
        start = time.perf_counter()
        concrete = self.trace()
        traced = time.perf_counter()
        self.run = timed(self.function)
        settle()
        first = time.perf_counter()
        self.facts["trace_s"] = traced - start
        if self._mode == "xla":
            self.facts["compile_s"] = first - traced
        self.facts["nodes"] = executed_nodes(concrete.graph.as_graph_def())
        self.facts["peak_mb"] = gpu_peak(self.function)


_SHARED = {}


def _variables(keras_of, shapes):
    """Returns variables: one set for all contenders of one Keras, to save memory."""
    if keras_of not in _SHARED:
        make = keras.Variable if keras_of is keras else tf.Variable
        _SHARED[keras_of] = [make(tf.fill(shape, 1.0)) for shape in shapes]
    return _SHARED[keras_of]


def settle():
    """Waits for the device: a GPU runs behind."""
    if tf.config.list_physical_devices("GPU"):
        tf.test.experimental.sync_devices()


def executed_nodes(graph_def):
    """Returns the nodes that a good step runs: of a `cond` its first branch alone."""
    library = {f.signature.name: f.node_def for f in graph_def.library.function}
    idle = ("Const", "NoOp", "Placeholder", "Identity", "_Arg", "_Retval")

    def count(nodes):
        total = 0
        for node in nodes:
            total += node.op not in idle
            for key in ("then_branch", "body", "f"):
                if key in node.attr and node.attr[key].HasField("func"):
                    total += count(library[node.attr[key].func.name])
        return total

    return count(graph_def.node)


def gpu_peak(function):
    """Returns the megabytes that a step takes on a GPU, None without one."""
    if not tf.config.list_physical_devices("GPU"):
        return None
    tf.config.experimental.reset_memory_stats("GPU:0")
    function()
    settle()
    info = tf.config.experimental.get_memory_info("GPU:0")
    return (info["peak"] - info["current"]) / 1e6


def cpu_peak(workload, inner, name):
    """Returns the megabytes that a contender's first step takes, in a new process.

    TensorFlow keeps what it once had, so that later steps show nothing.
    """
    command = [sys.executable, __file__, "--peak-of", name, "--workloads", workload]
    child = subprocess.run(  # noqa: S603 - this file
        [*command, "--inner", inner], check=True, capture_output=True, text=True
    )
    return float(child.stdout.split()[-1])


def print_peak(workload, inner, name):
    """Prints what `cpu_peak` reads. Linux only."""
    contender = Contender(
        name, inner, Gradients(*WORKLOADS[workload], "graph"), "graph"
    )
    contender.trace()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    timed(contender.function)
    print((_status("VmHWM") - before) / 1e3)


def _status(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    return 0


def limit_of(gradients, mode):
    """Returns a function that reads the gradients' bytes once."""
    flat = tf.Variable(tf.fill([gradients.count()], 1.0))
    function = tf.function(lambda: tf.reduce_sum(flat), jit_compile=mode == "xla")
    return timed(function)


def timed(function):
    """Returns a function of a number of calls, that returns the seconds of one."""
    function()

    def run(calls):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        settle()
        return (time.perf_counter() - start) / calls

    return run


def measure(workload, inner, mode, names, seconds, *, with_peaks):
    """Returns the facts and times of all contenders for one table."""
    _SHARED.clear()
    gc.collect()
    gradients = Gradients(*WORKLOADS[workload], mode)
    contenders = [Contender(name, inner, gradients, mode) for name in names]
    for contender in contenders:
        contender.prepare()
        if with_peaks and mode == "graph":
            contender.facts["peak_mb"] = cpu_peak(workload, inner, contender.name)
    runs = {contender.name: contender.run for contender in contenders}
    runs["limit"] = limit_of(gradients, mode)
    times = interleaved(runs, seconds)
    rows = {}
    for contender in contenders:
        rows[contender.name] = _row(contender, times)
    _compare(rows)
    result = {"workload": workload, "inner": inner, "mode": mode, "rows": rows}
    result["gradients"] = len(gradients.shapes)
    result["limit_ms"] = 1e3 * statistics.median(times["limit"])
    result["rounds"] = len(times["limit"])
    return result


def interleaved(runs, seconds):
    """Returns each run's seconds per call, in rounds that hold every one of them."""
    slowest = max(run(2) for run in runs.values())
    calls = max(1, min(20, int(0.02 / slowest)))
    times = {name: [] for name in runs}
    names = list(runs)
    end = time.perf_counter() + seconds
    done = 0
    while time.perf_counter() < end or done < 5:
        # Nobody always follows the same neighbour, who leaves the caches as they are.
        np.random.default_rng(done).shuffle(names)
        for name in names:
            times[name].append(runs[name](calls))
        done += 1
    return times


def _row(contender, times):
    own = np.array(times[contender.name])
    row = dict(contender.facts, step_ms=1e3 * float(np.median(own)))
    if contender.base in times:
        added = 1e3 * (own - np.array(times[contender.base]))
        low, middle, high = np.percentile(added, [25, 50, 75])
        # The median's own uncertainty: rounds are independent.
        spread = (high - low) / np.sqrt(len(added))
        row.update(added_ms=float(middle), added_iqr=[float(low), float(high)])
        row.update(added_error_ms=float(spread))
    return row


def _compare(rows):
    for name, row in rows.items():
        base = rows.get(CONTENDERS[name][2])
        if base is None:
            continue
        row["nodes_added"] = row["nodes"] - base["nodes"]
        if row["peak_mb"] is not None:
            row["peak_added_mb"] = row["peak_mb"] - base["peak_mb"]
        rival = rows.get(RIVAL.get(name))
        if rival is not None:
            row["of_rival"] = row["added_ms"] / rival["added_ms"]


def report(result):
    """Prints one table."""
    title = "{workload}, {inner}, {mode}: {gradients} gradients, {rounds} rounds"
    print("\n" + title.format(**result) + f", limit {result['limit_ms']:.2f} ms")
    head = ("", "step", "added", "quartiles", "of rival", "of limit", "nodes")
    columns = "{:14s} {:>9} {:>9} {:>15} {:>9} {:>9} {:>6} {:>7} {:>8} {:>7}"
    print(columns.format(*head, "trace", "compile", "peak"))
    for name, row in result["rows"].items():
        cells = [name, f"{row['step_ms']:.3f}", "", "", "", "", row["nodes"]]
        if "added_ms" in row:
            cells[2] = f"{row['added_ms']:.3f}"
            cells[3] = "{:.2f} {:.2f}".format(*row["added_iqr"])
            cells[5] = f"{row['added_ms'] / result['limit_ms']:.2f}"
            cells[6] = f"+{row['nodes_added']}"
        if "of_rival" in row:
            cells[4] = f"{row['of_rival']:.2f}"
        cells.append(f"{row['trace_s']:.2f}")
        cells.append(f"{row['compile_s']:.2f}" if "compile_s" in row else "")
        peak = row.get("peak_added_mb", row["peak_mb"])
        mark = "+" if "peak_added_mb" in row else ""
        cells.append("" if peak is None else f"{mark}{peak:.0f}")
        print(columns.format(*cells), flush=True)


def main():
    """Measures what the arguments choose, prints it, and writes it down."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--inner", nargs="+", choices=INNER, default=INNER)
    modes = ["graph", "xla"]
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS)
    parser.add_argument("--seconds", type=float, default=30, help="rounds of one table")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--peaks", action="store_true", help="peak memory on a CPU too")
    parser.add_argument("--peak-of", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--json", default="step_overhead.json")
    args = parser.parse_args()
    if args.device == "cpu":
        tf.config.set_visible_devices([], "GPU")
    elif not tf.config.list_physical_devices("GPU"):
        parser.error("`--device` must be cpu here, got gpu: TensorFlow sees no GPU.")
    if args.peak_of:
        print_peak(args.workloads[0], args.inner[0], args.peak_of)
        return
    names = [n for n in args.contenders or CONTENDERS if CONTENDERS[n][0] is not None]
    about = {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tf_keras": getattr(tf_keras, "__version__", None),
        "device": args.device,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(about, "times in ms, trace and compile in s, peak in MB")
    results = []
    for mode in args.modes:
        for workload in args.workloads:
            for inner in args.inner:
                chosen = (workload, inner, mode, names)
                result = measure(*chosen, args.seconds, with_peaks=args.peaks)
                report(result)
                results.append(result)
                text = json.dumps({"about": about, "results": results}, indent=1)
                Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
