"""When stacking small gradients pays: the reason for `check.SMALL`.

    python benchmarks/packing.py

It divides, sums and subtracts gradients, as a step does, one by one and stacked.
Figures are medians, ± the error (`timing.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[1]))

import tensorflow as tf
import timing
from workloads import timed

from lossscale.gradients import check


def make_step(size, count, limit):
    """Returns a step on gradients, stacked if they have no more elements than `limit`.

    Args:
      size: The elements of a gradient.
      count: The number of gradients.
      limit: The value of `check.SMALL` during the step.
    """
    value, divisor = tf.Variable(32.0), tf.Variable(4.0)
    weights = [tf.Variable(tf.zeros([size])) for _ in range(count)]

    def step():
        check.SMALL = limit
        packed, groups = check.pack([tf.fill([size], value) for _ in weights])
        packed = [grad / divisor for grad in packed]
        total = tf.add_n([tf.reduce_sum(grad) for grad in packed])

        def apply():
            for weight, grad in zip(weights, check.unpack(packed, groups)):
                weight.assign_sub(grad, read_value=False)
            return tf.constant(True)

        return tf.cond(tf.math.is_finite(total), apply, lambda: tf.constant(False))

    return timed(tf.function(step, autograph=False))


def main():
    """Prints the time one by one, and what stacking adds to it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[10, 100, 1000])
    sizes = [256, 1024, 4096, 16384, 65536]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes)
    parser.add_argument("--seconds", type=float, default=10)
    timing.add_plain(parser)
    options = parser.parse_args()
    timing.keep_memory(options.plain)
    for count in options.counts:
        for size in options.sizes:
            runs = {
                "alone": make_step(size, count, 0),
                "stacked": make_step(size, count, size),
            }
            times = timing.interleaved(runs, options.seconds)
            alone = timing.milliseconds(times["alone"])
            more = timing.added(times["stacked"], times["alone"])
            print(
                f"{count:5d} of {size:6d}: one by one {alone.shown(3)} ms, "
                f"stacked {more.shown(3, '+')} ms, "
                f"{timing.shown_share(more, alone, 0)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
