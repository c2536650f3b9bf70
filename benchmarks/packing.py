"""When stacking small gradients pays: what `lossscale.packing.SMALL` was chosen by.

    python benchmarks/packing.py

Divides, sums and subtracts gradients, as a step does, one by one and stacked. Below 1
stacking is faster.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import numpy as np  # noqa: E402 - after the path is set
import tensorflow as tf  # noqa: E402
from workloads import interleaved, timed  # noqa: E402

from lossscale.gradients import packing  # noqa: E402


def make_step(size, count, limit):
    """Returns a step on gradients, stacked if they have no more elements than `limit`.

    Args:
      size: The elements of a gradient.
      count: The number of gradients.
      limit: What takes the place of `packing.SMALL`.
    """
    value, divisor = tf.Variable(32.0), tf.Variable(4.0)
    weights = [tf.Variable(tf.zeros([size])) for _ in range(count)]

    def step():
        packing.SMALL = limit
        packed, groups = packing.pack([tf.fill([size], value) for _ in weights])
        packed = [grad / divisor for grad in packed]
        total = tf.add_n([tf.reduce_sum(grad) for grad in packed])

        def apply():
            for weight, grad in zip(weights, packing.unpack(packed, groups)):
                weight.assign_sub(grad, read_value=False)
            return tf.constant(True)

        return tf.cond(tf.math.is_finite(total), apply, lambda: tf.constant(False))

    return timed(tf.function(step, autograph=False))


def main():
    """Prints the time stacked as a fraction of the time one by one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[10, 100, 1000])
    sizes = [256, 1024, 4096, 16384, 65536]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    for count in options.counts:
        for size in options.sizes:
            runs = {
                "alone": make_step(size, count, 0),
                "stacked": make_step(size, count, size),
            }
            times = interleaved(runs, options.seconds)
            alone, stacked = (1e3 * np.median(times[name]) for name in runs)
            print(
                f"{count:5d} of {size:6d}: one by one {alone:8.3f} ms, stacked "
                f"{stacked:8.3f} ms, {stacked / alone:.2f} of it",
                flush=True,
            )


if __name__ == "__main__":
    main()
