"""What `DynamicLossScale.update` costs, ours and `tf.compat.v1`'s.

python benchmarks/update.py
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import tensorflow as tf  # noqa: E402 - after the path is set
from workloads import interleaved, resnet50, timed  # noqa: E402

import lossscale  # noqa: E402

GRADIENTS = {
    "one of 1": [(1,)],
    "100 of 32x32": [(32, 32)] * 100,
    "resnet50": resnet50(),
}


def updating(loss_scale):
    """Returns `update` as a function that returns the flag."""
    return lambda grads: loss_scale.update(grads)[1]


def main():
    """Prints the milliseconds of one update, in `tf.function` and eagerly."""
    makers = {
        "ours": lossscale.DynamicLossScale,
        "tf.compat.v1": tf.compat.v1.mixed_precision.DynamicLossScale,
    }
    for title, shapes in GRADIENTS.items():
        grads = [tf.Variable(tf.ones(shape)).value() for shape in shapes]
        for mode in ("tf.function", "eager"):
            runs = {}
            for name, make in makers.items():
                call = updating(make())
                if mode == "tf.function":
                    call = tf.function(call, autograph=False)
                runs[name] = timed(functools.partial(call, grads))
            times = interleaved(runs, seconds=5)
            ours, theirs = (1e3 * statistics.median(times[name]) for name in makers)
            print(
                f"{title:14s} {mode:12s} ours {ours:8.3f} ms, "
                f"tf.compat.v1 {theirs:8.3f} ms, {theirs / ours:.2f} times as fast"
            )


if __name__ == "__main__":
    main()
