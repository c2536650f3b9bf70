"""A training step of several workers whose gradients cross in float32 or in float16.

    python benchmarks/workers.py

starts two processes on this machine, and then four, that train in step under
`MultiWorkerMirroredStrategy`. They talk over the loopback, which is faster than a
network: there the wait for the sum is a larger part. All kinds of steps take turns in
the same processes: medians of rounds, ± the error (`timing.py`). Bytes are those that
the loopback carried, by worker. "differs" is by how much the weights of a kind differ
from those of the bare optimizer at the end, of their largest change.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import multi_worker
import numpy as np
import tensorflow as tf
import timing

import lossscale
from lossscale.runtime import keras_versions

#: What wraps the optimizer of a kind of steps: the arguments, None for none.
KINDS = {
    "bare": None,
    "float32": {},
    "float16": {"communication_dtype": "float16"},
    "bfloat16": {"communication_dtype": "bfloat16"},
}
ROWS = 4
#: Where Linux counts what each network interface has sent.
COUNTERS = Path("/proc/net/dev")


# One worker


def make_step(strategy, keras, kind, options):
    """Returns a step of one kind, and its weights."""
    rng = np.random.default_rng(0)
    shape = [options.units, options.units]
    is_newest = not hasattr(keras.optimizers, "legacy")
    with strategy.scope():
        values = [
            np.float32(rng.normal(size=shape) / options.units**0.5)
            for _ in range(options.layers)
        ]
        make = keras.Variable if is_newest else tf.Variable
        weights = [make(value) for value in values]
        optimizer = keras.optimizers.SGD(0.01)
        if KINDS[kind] is not None:
            optimizer = lossscale.LossScaleOptimizer(optimizer, **KINDS[kind])
        optimizer.build(weights)
    rank = strategy.cluster_resolver.task_id
    x = tf.constant(
        np.float32(np.random.default_rng(rank).normal(size=[ROWS, options.units]))
    )
    tensors = [weight.value if is_newest else weight for weight in weights]

    def each():
        with tf.GradientTape() as tape:
            hidden = x
            for tensor in tensors:
                hidden = tf.tanh(hidden @ tensor)
            loss = tf.reduce_mean(hidden**2)
            if KINDS[kind] is not None:
                loss = optimizer.scale_loss(loss)
        optimizer.apply_gradients(list(zip(tape.gradient(loss, tensors), weights)))

    step = tf.function(lambda: strategy.run(each))

    def timed():
        step()
        tensors[0][:1].numpy()  # until it is done

    return timed, lambda: [tensor.numpy() for tensor in tensors]


def bytes_sent():
    """Returns how many bytes the loopback has carried, None where nobody counts."""
    if not COUNTERS.exists():
        return None
    lines = COUNTERS.read_text().splitlines()
    (own,) = (line.split(":")[1] for line in lines if line.strip().startswith("lo:"))
    return int(own.split()[8])


def work(options):
    """Measures as one worker. The first one prints what it found as JSON."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras = keras_versions.imported(options.keras)
    made = {kind: make_step(strategy, keras, kind, options) for kind in options.kinds}
    begun = {kind: read() for kind, (_, read) in made.items()}
    for step, _ in made.values():
        step()  # is traced
    found = {kind: {"seconds": [], "bytes": []} for kind in made}
    for number in range(options.rounds):
        # All workers in the same order, which is another one in each round.
        order = random.Random(number).sample(options.kinds, len(options.kinds))  # noqa: S311
        for kind in order:
            before, start = bytes_sent(), time.perf_counter()
            made[kind][0]()
            found[kind]["seconds"].append(time.perf_counter() - start)
            if before is not None:
                found[kind]["bytes"].append(bytes_sent() - before)
    ended = {kind: read() for kind, (_, read) in made.items()}
    for kind in made:
        pairs = zip(ended[kind], ended["bare"], begun["bare"])
        found[kind]["differs"] = max(
            float(np.abs(own - bare).max() / np.abs(bare - first).max())
            for own, bare, first in pairs
        )
    if strategy.cluster_resolver.task_id == 0:
        print(json.dumps(found))


# All of them


def run_workers(workers, keras, options):
    """Starts workers, and returns what the first one found."""
    command = [sys.executable, __file__, "--plain", "--keras", keras, "--kinds"]
    command += [*options.kinds, "--rounds", str(options.rounds)]
    command += ["--layers", str(options.layers), "--units", str(options.units)]
    processes = multi_worker.begin(command, workers)
    answers = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a worker failed")
    return json.loads(answers[0].splitlines()[-1])


def rows_of(workers, keras, found):
    """Yields the rows of a table: one for each kind of steps."""
    bare = found["bare"]
    for kind, of_kind in found.items():
        sent = [each / workers / 1e6 for each in of_kind["bytes"]]
        pairs = zip(of_kind["seconds"], bare["seconds"])
        ratio = timing.figure([own / other for own, other in pairs])
        yield [
            f"{workers} workers, {keras}, {kind}",
            timing.milliseconds(of_kind["seconds"]).shown(0),
            "1" if kind == "bare" else ratio.shown(2),
            f"{np.median(sent):.1f}" if sent else "?",
            f"{of_kind['differs']:.1g}",
        ]


def main():
    """Prints the table, or is one worker if TF_CONFIG says so."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--keras", nargs="+", default=["keras", "tf_keras"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--units", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=25)
    timing.add_plain(parser)
    options = parser.parse_args()
    if "TF_CONFIG" in os.environ:
        options.keras = options.keras[0]
        work(options)
        return
    timing.keep_memory(options.plain)
    rows = [
        row
        for workers in options.workers
        for keras in options.keras
        for row in rows_of(workers, keras, run_workers(workers, keras, options))
    ]
    head = ["", "ms a step", "of bare", "MB sent by each", "differs"]
    print(timing.markdown(head, rows))


if __name__ == "__main__":
    main()
