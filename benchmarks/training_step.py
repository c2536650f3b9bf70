"""What loss scaling adds to a whole training step: forward, backward and update.

The step alone (`step_overhead.py`) tells why; this tells what a user pays, since where
a gradient lies when the update reads it decides much. The layout of memory moves a
result by a factor of two, so it is measured in several processes, and each one's
median is shown. Within a process all contenders share the model's variables and take
turns; what one adds is the median of its differences to the bare step of that round.

    python benchmarks/training_step.py                       # graph and XLA, five each
    python benchmarks/training_step.py --inner adam --modes graph --processes 7
    python benchmarks/training_step.py --against ../other    # that checkout's, in turn

Processes are started with glibc told to keep the memory that it has: on machines that
hand freed memory back to the host a fresh temporary costs more than its arithmetic.
`--plain` leaves that out. The model is a deep network whose weights outweigh its
arithmetic: six matrices of 2000 x 2000, 32 rows of data.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
#: glibc keeps what it has, and takes it from one place.
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
CONTENDERS = ("bare", "keras3", "ours")
LAYERS, WIDTH, ROWS = 6, 2000, 32


def make_steps(inner, mode):
    """Returns a function for each contender that trains one step, and waits for it."""
    import keras  # noqa: PLC0415 - only in the process that is timed
    import tensorflow as tf  # noqa: PLC0415

    import lossscale  # noqa: PLC0415

    weights = [
        keras.Variable(tf.random.normal([WIDTH, WIDTH], stddev=WIDTH**-0.5))
        for _ in range(LAYERS)
    ]
    x, y = tf.random.normal([2, ROWS, WIDTH])

    def step_of(name):
        optimizer = getattr(keras.optimizers, inner)(1e-6)
        if name == "keras3":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        elif name == "ours":
            optimizer = lossscale.LossScaleOptimizer(optimizer, "dynamic")
        optimizer.build(weights)
        scale_loss = (lambda loss: loss) if name == "bare" else optimizer.scale_loss

        @tf.function(jit_compile=mode == "xla", autograph=False)
        def step():
            with tf.GradientTape() as tape:
                found = x
                for weight in weights:
                    found = tf.tanh(found @ weight.value)
                loss = scale_loss(tf.reduce_mean((found - y) ** 2))
            grads = tape.gradient(loss, [weight.value for weight in weights])
            optimizer.apply_gradients(zip(grads, weights))
            return loss

        return lambda: step().numpy()

    return {name: step_of(name) for name in CONTENDERS}


def measure(inner, mode, rounds):
    """Prints the bare step's milliseconds, and what the others add to it."""
    steps = make_steps(inner, mode)
    times = {name: [] for name in steps}
    for number in range(rounds + 3):
        order = list(steps.items())
        for name, step in order[number % 3 :] + order[: number % 3]:
            start = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - start) * 1e3)
    bare = times["bare"][3:]
    added = {
        name: statistics.median(t - b for t, b in zip(found[3:], bare))
        for name, found in times.items()
    }
    print(statistics.median(bare), added["keras3"], added["ours"])


def in_process(root, inner, mode, options):
    """Returns what `measure` prints in a new process, of a checkout's lossscale."""
    keep = {} if options.plain else KEEP
    command = [sys.executable, __file__, "--measure", "--inner", inner]
    command += ["--modes", mode, "--rounds", str(options.rounds)]
    child = subprocess.run(  # noqa: S603 - this file
        command,
        env={**os.environ, **keep, "PYTHONPATH": str(root)},
        check=True,
        capture_output=True,
        text=True,
    )
    return [float(word) for word in child.stdout.split()[-3:]]


def main():
    """Measures in processes, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--inner", nargs="+", default=["SGD", "Adam"])
    parser.add_argument("--modes", nargs="+", default=["graph", "xla"])
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--against", type=Path, help="another checkout's folder")
    parser.add_argument("--plain", action="store_true", help="as malloc is")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.inner[0], options.modes[0], options.rounds)
        return
    roots = {"ours": HERE}
    if options.against:
        roots["theirs"] = options.against.resolve()
    print("added ms, by process; in brackets the median")
    for mode in options.modes:
        for inner in options.inner:
            found = {name: [] for name in roots}
            for _ in range(options.processes):
                for name, root in roots.items():
                    found[name].append(in_process(root, inner, mode, options))
            report(mode, inner, found)


def report(mode, inner, found):
    """Prints one workload's rows."""
    every = [row for rows in found.values() for row in rows]
    print(f"{mode} {inner}: bare {statistics.median(row[0] for row in every):.1f} ms")
    columns = {"Keras 3's own": [row[1] for row in every]}
    columns.update({name: [row[2] for row in rows] for name, rows in found.items()})
    for name, values in columns.items():
        listed = " ".join(f"{value:.1f}" for value in values)
        print(f"  {name:14} {listed} ({statistics.median(values):.1f})", flush=True)


if __name__ == "__main__":
    main()
