"""Measures how long `simulate` takes for a million steps, compiling included.

    python benchmarks/simulate.py

Each figure is the median of several calls in one process, ± its error (`timing.py`),
after one short call that starts TensorFlow. Every call compiles anew; cases take turns.
"""

import argparse
import itertools
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
import timing

import lossscale


class Own(lossscale.LossScale):
    """A user's own rule."""

    def __init__(self):
        super().__init__(2.0**15)

    def next_state(self, state, is_finite):
        scale = state.current_loss_scale
        scale = tf.where(is_finite, scale * 1.001, scale * 0.5)
        return {"current_loss_scale": tf.clip_by_value(scale, 1.0, 2.0**24)}

    def get_config(self):
        return {}


CASES = {
    "DynamicLossScale()": lossscale.DynamicLossScale,
    'from_preset("megatron")': lambda: lossscale.get("megatron"),
    "a subclass": Own,
}


def seconds(make, arguments):
    """Returns how long one call takes."""
    loss_scale = make()
    started = time.perf_counter()
    lossscale.simulate(loss_scale, **arguments)
    return time.perf_counter() - started


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--calls", type=int, default=5)
    timing.add_plain(parser)
    options = parser.parse_args()
    timing.keep_memory(options.plain)
    rng = np.random.default_rng(0)
    runs = {
        "is_finite": rng.random(options.steps) < 0.999,
        "limit": 2.0 ** rng.uniform(10, 25, options.steps),
    }
    first = seconds(lossscale.DynamicLossScale, {"is_finite": [True]})
    print(f"TensorFlow {tf.__version__}, {os.cpu_count()} CPU cores")
    print(f"the first call in the process, one step: {first:.2f} s")
    print(f"{options.steps} steps, {options.calls} calls:\n")
    cases = list(itertools.product(CASES, runs))
    times = {case: [] for case in cases}
    for _ in range(options.calls):
        for title, name in cases:
            times[title, name].append(seconds(CASES[title], {name: runs[name]}))
    for (title, name), found in times.items():
        print(f"{title:28}{name:12}{timing.figure(found).shown(2):>14} s")


if __name__ == "__main__":
    main()
