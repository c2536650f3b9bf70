"""What `DynamicLossScale.update` costs, ours and `tf.compat.v1`'s.

    python benchmarks/update.py

Calling a `tf.function` takes most of the time of a small update. So a third contender
only reads the gradients' variables, and its time is subtracted, round by round. Figures
are medians, ± the error (`timing.py`).
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[1]))

import tensorflow as tf
import timing
from workloads import resnet50, timed

import lossscale

GRADIENTS = {
    "one of 1": [(1,)],
    "100 of 32x32": [(32, 32)] * 100,
    "resnet50": resnet50(),
}


def updating(loss_scale, variables):
    """Returns a function that updates with the variables' values, as gradients."""
    return lambda: loss_scale.update([variable.value() for variable in variables])[1]


def read(variables):
    """Only reads the variables, as each contender does."""
    with tf.control_dependencies([variable.value() for variable in variables]):
        return tf.constant(True)


def main():
    """Prints the milliseconds of one update, in `tf.function` and eagerly."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=10, help="rounds of one line")
    add = parser.add_argument
    add("--gradients", nargs="+", choices=GRADIENTS, default=list(GRADIENTS))
    timing.add_plain(parser)
    options = parser.parse_args()
    timing.keep_memory(options.plain)
    makers = {
        "ours": lossscale.DynamicLossScale,
        "tf.compat.v1": tf.compat.v1.mixed_precision.DynamicLossScale,
    }
    for title in options.gradients:
        variables = [tf.Variable(tf.ones(shape)) for shape in GRADIENTS[title]]
        for mode in ("tf.function", "eager"):
            calls = {name: updating(make(), variables) for name, make in makers.items()}
            calls["call"] = functools.partial(read, variables)
            if mode == "tf.function":
                calls = {k: tf.function(v, autograph=False) for k, v in calls.items()}
            runs = {name: timed(call) for name, call in calls.items()}
            times = timing.interleaved(runs, options.seconds)
            call = timing.milliseconds(times["call"])
            ours, theirs = (timing.added(times[k], times["call"]) for k in makers)
            print(
                f"{title:13s} {mode:11s} call {call.shown(3)} ms, "
                f"ours {ours.shown(3, '+')}, tf.compat.v1 {theirs.shown(3, '+')}, "
                f"ours of theirs: {timing.shown_ratio(timing.ratio(ours, theirs))}",
                flush=True,
            )


if __name__ == "__main__":
    main()
