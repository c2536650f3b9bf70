"""What a ScaledBlock around each block of a transformer adds to a training step.

    python benchmarks/blocks.py

It times whole steps of 12 blocks in mixed_float16: forward, backward, and Adam with a
dynamic loss scale; with every block wrapped, and with none. In one process the steps
take turns; the time until the first step is over includes tracing and compiling.
Memory is the most that a separate process ever held, compilers included. A CPU computes
float16 slowly, so a block adds a smaller share of a step there than on a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Behind PYTHONPATH: there is another checkout's, if one is compared with.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import keras
import networks
import tensorflow as tf
import timing

import lossscale
from lossscale.runtime.mode import COMPILED_BY_XLA

MODES = ("eager", "graph", "xla")
WAYS = {
    "without": lambda block: block,
    "blocks": lossscale.ScaledBlock,
    "recompute": lambda block: lossscale.ScaledBlock(block, recompute=True),
}


def make_step(way, mode, arguments):
    """Returns a training step of a transformer.

    Args:
      way: One of `WAYS`.
      mode: One of `MODES`.
      arguments: The arguments of the command line.
    """
    width, length = arguments.width, arguments.length
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy("mixed_float16")
    blocks = [WAYS[way](networks.Block(width)) for _ in range(arguments.blocks)]
    x = tf.random.normal([arguments.rows, length, width])
    y = tf.random.uniform([len(x)], maxval=networks.CLASSES, dtype=tf.int32)
    pooled = keras.layers.GlobalAveragePooling1D(dtype="float32")
    told = keras.layers.Dense(networks.CLASSES, dtype="float32")
    model = keras.Sequential([keras.Input(x.shape[1:]), *blocks, pooled, told])
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam(1e-4))
    optimizer.build(model.trainable_variables)
    held = [variable.value for variable in model.trainable_variables]

    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(loss_of(y, model(x, training=True)))
        optimizer.apply(tape.gradient(loss, held))
        return loss

    if mode == "eager":
        return step
    return tf.function(step, **(COMPILED_BY_XLA if mode == "xla" else {}))


def memory_of(way, mode):
    """Returns the most megabytes that a separate process held for some steps."""
    given = [*sys.argv[1:], "--memory", way, mode]
    return int(timing.printed_last(*given, env=timing.without_keep()))


def measured(mode, arguments):
    """Yields the rows of the table for one mode, one for each way."""
    runs, first = {}, {}
    for way in WAYS:
        step = make_step(way, mode, arguments)
        started = time.perf_counter()
        float(step())
        first[way] = time.perf_counter() - started
        runs[way] = timing.timed(lambda step=step: float(step()))
    times = timing.interleaved(runs, arguments.seconds)
    for way in WAYS:
        adds = timing.added(times[way], times["without"])
        yield [
            f"{mode}, {way}",
            timing.milliseconds(times[way]).shown(),
            "" if way == "without" else adds.shown(sign="+"),
            f"{first[way]:.1f}",
            "" if arguments.no_memory else f"{memory_of(way, mode)}",
        ]


def main():
    """Runs it all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--seconds", type=float, default=15, help="per mode")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--no-memory", action="store_true", help="measure only times")
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    timing.add_plain(parser)
    arguments = parser.parse_args()
    if arguments.memory:
        step = make_step(*arguments.memory, arguments)
        for _ in range(5):
            float(step())
        print(timing.status("VmHWM") // 1024)
        return
    timing.keep_memory(arguments.plain)
    head = ["training step", "ms", "blocks add, ms", "first step, s", "memory, MB"]
    rows = [row for mode in arguments.modes for row in measured(mode, arguments)]
    print(timing.markdown(head, rows))


if __name__ == "__main__":
    main()
