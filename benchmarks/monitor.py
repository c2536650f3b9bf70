"""What `LossScaleMonitor` adds to a step of `fit`, with and without its options.

The same model is trained by `fit` with each choice in turn, in rounds, and what a
choice adds is the median of its differences to no monitor in the same round.

    python benchmarks/monitor.py                      # three minutes
    python benchmarks/monitor.py --models large --seconds 200
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Behind PYTHONPATH: there is another checkout's, if one is compared with.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import keras
import tensorflow as tf
import timing

import lossscale

#: Name -> the width of four dense layers with batch normalization.
MODELS = {"small": 16, "large": 1000}
#: Name -> the monitor's arguments. None: no monitor.
CHOICES = {
    "no monitor": None,
    "monitor": {},
    "every=100": {"every": 100},
    "every=1": {"every": 1},
    "check_underflow": {"check_underflow": True},
    "restore_statistics": {"restore_statistics": True},
}


class Run:
    """A model that `fit` trains with one choice."""

    def __init__(self, width, arguments, steps):
        keras.utils.set_random_seed(0)
        hidden = []
        for _ in range(4):
            hidden.append(keras.layers.Dense(width, "relu"))
            hidden.append(keras.layers.BatchNormalization())
        self._model = keras.Sequential([keras.Input([width]), *hidden])
        optimizer = lossscale.LossScaleOptimizer(keras.optimizers.SGD(1e-6))
        self._model.compile(optimizer, "mse")
        x = tf.random.normal([8 * steps, width])
        self._data = tf.data.Dataset.from_tensor_slices((x, x)).batch(8).cache()
        self._callbacks = []
        if arguments is not None:
            self._callbacks.append(lossscale.LossScaleMonitor(verbose=0, **arguments))
        self.epochs = timing.timed(self._fit)

    def _fit(self):
        quiet = {"verbose": 0, "shuffle": False}
        self._model.fit(self._data, callbacks=self._callbacks, **quiet)


def main():
    """Prints a table of the models and choices that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    add("--steps", type=int, default=200, help="of an epoch")
    add("--seconds", type=float, default=90, help="rounds of a model")
    timing.add_plain(parser)
    options = parser.parse_args()
    timing.keep_memory(options.plain)
    print("ms a step of `fit`; what a monitor adds")
    print("| model | " + " | ".join(options.choices) + " |")
    print("| --- |" + " ---: |" * len(options.choices))
    for model in options.models:
        runs = {
            name: Run(MODELS[model], CHOICES[name], options.steps).epochs
            for name in options.choices
        }
        times = {
            name: [seconds / options.steps for seconds in of_epochs]
            for name, of_epochs in timing.interleaved(runs, options.seconds).items()
        }
        first, *others = options.choices
        cells = [timing.milliseconds(times[first]).shown(3)]
        cells += [timing.added(times[name], times[first]).shown(3) for name in others]
        print(f"| {model} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
