"""What `LossScaleMonitor(check_activations=True)` adds to a step of `fit`.

    python benchmarks/activations.py
    python benchmarks/activations.py --policies mixed_float16 --xla

It trains the transformer of `networks.py` with Adam on Keras 3. The steps with and
without the check take turns. Figures are medians, ± the error (`timing.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import networks
import tensorflow as tf
import timing

import lossscale
from lossscale.monitor.activations import Activations


def make_model(policy, xla):
    """Returns a compiled transformer, and an endless iterator of batches."""
    keras.mixed_precision.set_global_policy(policy)
    layers, texts = networks.transformer()
    model = keras.Sequential([*layers, keras.layers.Dense(10, dtype="float32")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = lossscale.LossScaleOptimizer(keras.optimizers.Adam(1e-4))
    model.compile(optimizer, loss=loss, jit_compile=xla)
    data = tf.data.Dataset.from_tensors((texts, tf.zeros([len(texts)], tf.int32)))
    return model, iter(data.repeat())


def run_of(model, batches):
    """Returns a function that times the training step that the model has now."""
    step, last = model.train_function, []

    def run():
        last[:] = [step(batches)]

    return timing.timed(run, lambda: [float(each) for each in last[0].values()])


def main():
    """Prints the time of a step, and what the check adds to it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    policies = ["float32", "mixed_float16"]
    parser.add_argument("--policies", nargs="+", default=policies)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--xla", action="store_true", help="jit_compile=True")
    timing.add_plain(parser)
    options = parser.parse_args()
    timing.keep_memory(options.plain)
    for policy in options.policies:
        model, batches = make_model(policy, options.xla)
        model.make_train_function(force=True)
        runs = {"without": run_of(model, batches)}
        activations = Activations(model, [model.optimizer.loss_scale])
        runs["checked"] = run_of(model, batches)
        times = timing.interleaved(runs, options.seconds)
        activations.end_fit()
        step = timing.milliseconds(times["without"])
        more = timing.added(times["checked"], times["without"])
        print(
            f"{policy}: a step {step.shown()} ms, checked {more.shown(2, '+')} ms, "
            f"{timing.shown_share(more, step, 1)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
