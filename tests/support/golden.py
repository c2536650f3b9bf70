"""Training runs whose every number is exact, and what they were on older versions.

Powers of two and one rounding per operation: no order of summation, no fused
multiplication can change a bit. So `tests/data/` holds for every version of TensorFlow.

    python tests/support/golden.py run       # writes tests/data/run.json
    python tests/support/golden.py files     # writes tests/data/lossscale-X.Y.Z/
    python tests/support/golden.py held      # writes tests/data/lossscale-X.Y.Z/held/
    python tests/support/golden.py skip      # writes tests/data/lossscale-X.Y.Z-skip/

The first was made on TensorFlow 2.15; the second by each version from 0.1.0 to 3.0.0,
on 2.15 and, of Keras 3, on 2.21 with 3.15. tests/data/tensorflow-X.Y/ holds checkpoints
of ours and of Keras's own wrappers, written half-way by TensorFlow 2.4, 2.15 and, with
Keras 3.3, 2.16. The third, of loss scales that hold another one, was made by 3.0.0, on
the TensorFlow of its second. Its `.h5` files of Keras 2 could hold a SpikeGuard only.
The fourth, of runs with nonfinite_loss="skip", was made by 3.0.0 in the same way.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import numpy as np
import tensorflow as tf
from installed import ROOT, families
from models import checkpoint_of, compiled, variable_of

import lossscale
from lossscale.runtime import keras_versions

DATA = ROOT / "tests" / "data"
STEPS = 60
#: The steps at which a gradient is infinite on purpose, and one at which it is NaN.
BAD = {7: np.inf, 8: -np.inf, 20: np.nan, **dict.fromkeys(range(33, 39), np.inf)}
RULE = {
    "increment_period": 4,
    "multiplier": 4.0,
    "backoff_factor": 0.5,
    "hysteresis": 2,
    "hysteresis_reset": ["growth", "backoff"],
    "min_loss_scale": 2.0,
    "max_loss_scale": 2.0**18,
}
#: float16 ends at 65504: from some scale on, these gradients overflow by themselves.
STARTS = {"float32": 2.0**5, "float16": 2.0**12}


def sgd(family):
    """Returns the inner optimizer of all runs."""
    return family.optimizers.SGD(0.25, momentum=0.5)


def wrapped(family):
    """Returns the wrapper whose state and config the files hold."""
    scale = lossscale.DynamicLossScale(STARTS["float32"], **RULE)
    return lossscale.LossScaleOptimizer(sgd(family), scale, name="mine")


def skipping(family):
    """Returns one that ignores bad losses, and grows at each step until an overflow."""
    scale = lossscale.DynamicLossScale(STARTS["float32"], 4, search_period=1)
    return lossscale.LossScaleOptimizer(
        sgd(family), scale, name="mine", nonfinite_loss="skip"
    )


def targets():
    """Returns what the weights are drawn to at each step, in sixteenths."""
    step, column = np.mgrid[:STEPS, :4]
    return ((step * 37 + column * 11) % 64 - 32).astype(np.float32) / 16


def specials():
    """Returns the factor of each step's loss: 1, but at the bad steps."""
    return np.array([BAD.get(step, 1.0) for step in range(STEPS)], np.float32)


def loop(family, dtype, mode):
    """Returns the record of a run in a custom loop, of gradients in `dtype`."""
    start = np.array([1.0, -2.0, 0.5, 0.0], np.float32)
    weights = variable_of(family, start)
    scale = lossscale.DynamicLossScale(STARTS[dtype], **RULE)
    optimizer = lossscale.LossScaleOptimizer(sgd(family), scale)

    def step(target, special):
        with tf.GradientTape() as tape:
            distance = tf.cast(weights, dtype) - tf.cast(target, dtype)
            factor = tf.cast(special / 2.0, dtype)
            loss = tf.reduce_sum(factor * tf.square(distance))
            scaled_loss = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled_loss, [keras_versions.tensor_of(weights)])
        optimizer.apply_gradients(zip(grads, [weights]))

    step = compiled(step, mode)
    seen = []
    for target, special in zip(targets(), specials()):
        step(tf.constant(target), tf.constant(special))
        seen.append(counters(scale))
    return {
        "steps": seen,
        "weights": _listed(weights),
        "momentum": _listed(momentum(optimizer, weights)),
        "iterations": int(optimizer.iterations.numpy()),
    }


def counters(scale):
    """Returns the scale and its counters."""
    return [
        float(scale),
        int(scale.good_steps.numpy()),
        int(scale.bad_steps.numpy()),
        int(scale.skipped_steps.numpy()),
    ]


def momentum(optimizer, weights):
    """Returns the slot of `weights`."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(inner, "get_slot"):
        return inner.get_slot(weights, "momentum")
    return inner.momentums[0]


def _listed(variable):
    return np.asarray(variable.numpy(), np.float64).ravel().tolist()


def compiled_model(family, optimizer):
    """Returns a model of one weight."""
    keras = family.keras
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(optimizer, loss="mse")
    return model


def fit(model, first, last):
    """Trains on the batches of some steps, of one row each."""
    x = np.full([STEPS, 1], 0.5, np.float32) * specials()[:, None]
    y = targets()[:, :1]
    model.fit(x[first:last], y[first:last], batch_size=1, shuffle=False, verbose=0)


def state(model, scale):
    """Returns all that must be as it was."""
    weights = model.trainable_variables[0]
    return {
        "scale": scale,
        "weights": _listed(weights),
        "momentum": _listed(momentum(model.optimizer, weights)),
    }


def write_run(found):
    """Writes the golden run of one family in eager mode."""
    runs = {dtype: loop(found[0], dtype, "eager") for dtype in STARTS}
    (DATA / "run.json").write_text(json.dumps(runs) + "\n")


#: The routes of a model with its optimizer to one file, by kind of optimizer.
MODEL_FILES = {
    "keras3": ["model.keras", "model.weights.h5"],
    "keras2-new": ["model.keras", "model.h5"],
    "keras2-legacy": ["model.h5"],  # its .keras files hold no optimizer's state
}


def write_files(found, make=wrapped, suffix=""):
    """Writes what this version of lossscale saves, by every route."""
    folder = DATA / f"lossscale-{lossscale.__version__}{suffix}"
    for family in found:
        home = folder / family.name
        home.mkdir(parents=True, exist_ok=True)
        model = compiled_model(family, make(family))
        optimizer, scale = model.optimizer, model.optimizer.loss_scale
        fit(model, 0, STEPS // 2)
        for name in MODEL_FILES[family.name]:
            save = model.save_weights if ".weights." in name else model.save
            save(str(home / name))
        checkpoint_of(model).write(str(home / "checkpoint"))
        half = state(model, counters(scale))
        fit(model, STEPS // 2, STEPS)
        expected = {
            "tensorflow": tf.__version__.split(".")[:2],
            "config": optimizer.get_config(),
            "half": half,
            "end": state(model, counters(scale)),
        }
        (home / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def holding(family, kind):
    """Returns a wrapper of a loss scale that holds another one."""
    from holders import Counts  # golden.py runs on old versions, which lack its names

    held = lossscale.DynamicLossScale(STARTS["float32"], **RULE)
    guard = {"threshold": 2.0, "window": 3, "max_in_a_row": 1, "min_ratio": 1.25}
    scale = lossscale.SpikeGuard(held, **guard) if kind == "guard" else Counts(held)
    return lossscale.LossScaleOptimizer(sgd(family), scale, name="mine")


def held_files(family, kind):
    """Returns the names of the files that 3.0.0 could write of such a loss scale."""
    names = MODEL_FILES[family.name]
    names = [*names, "model.h5"] if family.name == "keras3" else names
    return [
        name.replace("model", f"{family.name}-{kind}")
        for name in names
        if not (name == "model.h5" and kind == "own" and family.name != "keras3")
    ]


def write_held(found):
    """Writes a SpikeGuard and a loss scale of a user's that hold another one."""
    from holders import state_by_path

    home = DATA / f"lossscale-{lossscale.__version__}" / "held"
    home.mkdir(parents=True, exist_ok=True)
    for family in found:
        for kind in ("guard", "own"):
            model = compiled_model(family, holding(family, kind))
            fit(model, 0, STEPS // 2)
            for name in held_files(family, kind):
                save = model.save_weights if ".weights." in name else model.save
                save(str(home / name))
            checkpoint_of(model).write(str(home / f"{family.name}-{kind}-checkpoint"))
            state = state_by_path(model.optimizer.loss_scale)
            expected = {path: value.tolist() for path, value in state.items()}
            (home / f"{family.name}-{kind}.json").write_text(
                json.dumps(expected, indent=1) + "\n"
            )


if __name__ == "__main__":
    write_skip = partial(write_files, make=skipping, suffix="-skip")
    writers = {"run": write_run, "files": write_files, "held": write_held}
    {**writers, "skip": write_skip}[sys.argv[1]](families())
