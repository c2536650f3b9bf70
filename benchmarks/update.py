"""What `DynamicLossScale.update` costs, ours and `tf.compat.v1`'s.

python benchmarks/update.py

Calling a `tf.function` takes most of the time of a small update. So there is a third
contender, a call that only reads the gradients' variables, and its time is taken off.
Medians of one run.
"""

from __future__ import annotations

import argparse
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


def updating(loss_scale, variables):
    """Returns a function that updates with the variables' values, as gradients."""
    return lambda: loss_scale.update([variable.value() for variable in variables])[1]


def read(variables):
    """Reads the variables, as each contender does, and no more."""
    with tf.control_dependencies([variable.value() for variable in variables]):
        return tf.constant(True)


def main():
    """Prints the milliseconds of one update, in `tf.function` and eagerly."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=10, help="rounds of one line")
    options = parser.parse_args()
    makers = {
        "ours": lossscale.DynamicLossScale,
        "tf.compat.v1": tf.compat.v1.mixed_precision.DynamicLossScale,
    }
    for title, shapes in GRADIENTS.items():
        variables = [tf.Variable(tf.ones(shape)) for shape in shapes]
        for mode in ("tf.function", "eager"):
            calls = {name: updating(make(), variables) for name, make in makers.items()}
            calls["call"] = functools.partial(read, variables)
            if mode == "tf.function":
                calls = {k: tf.function(v, autograph=False) for k, v in calls.items()}
            times = interleaved(
                {k: timed(v) for k, v in calls.items()}, options.seconds
            )
            ours, theirs, call = (1e3 * statistics.median(times[k]) for k in calls)
            added = f"ours +{ours - call:.3f}, tf.compat.v1 +{theirs - call:.3f}"
            faster = (theirs - call) / (ours - call)
            print(
                f"{title:13s} {mode:11s} call {call:.3f} ms, {added}: {faster:.2f} "
                f"times as fast, {theirs / ours:.2f} with the call"
            )


if __name__ == "__main__":
    main()
