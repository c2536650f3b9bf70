"""Training runs whose every number is exact, and what they were on older versions.

Powers of two and one rounding per operation: no order of summation, no fused
multiplication can change a bit. So `tests/data/` holds for every version of TensorFlow.

    python tests/support/golden.py run       # writes tests/data/run.json
    python tests/support/golden.py files     # writes tests/data/lossscale-X.Y.Z/

The first was made on TensorFlow 2.15, the second by 3.1.0 on 2.21, with Keras 3.15:
half of a run with nonfinite_loss="skip", and one with its SpikeGuard, which held a loss
scale. tests/data/tensorflow-X.Y/ holds checkpoints of Keras's own wrappers, written
half-way by TensorFlow 2.4, 2.15 and, with Keras 3.3, 2.16.
"""

from __future__ import annotations

import json
import sys

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


def rule(**more):
    """Returns the loss scale of all runs."""
    return lossscale.DynamicLossScale(STARTS["float32"], **RULE, **more)


def wrapped(family, kind="skip"):
    """Returns the wrapper whose state and config the files hold."""
    how = {"nonfinite_loss": "skip"} if kind == "skip" else {}
    scale = rule(search_period=1)
    scale = scale if kind == "skip" else lossscale.SpikeGuard(scale, window=3)
    return lossscale.LossScaleOptimizer(sgd(family), scale, name="mine", **how)


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
    model.compile(optimizer, loss=keras.losses.MeanSquaredError())
    return model


def fit(model, first, last):
    """Trains on the batches of some steps, of one row each."""
    x = np.full([STEPS, 1], 0.5, np.float32) * specials()[:, None]
    y = targets()[:, :1]
    model.fit(x[first:last], y[first:last], batch_size=1, shuffle=False, verbose=0)


def state(model, scale=None):
    """Returns all that must be as it was. `scale` is in the place of our state."""
    weights = model.trainable_variables[0]
    if scale is None:
        engine = model.optimizer.engine
        own = [*engine.loss_scale.variables, *engine._saved().values()]
        scale = {v.name.split(":")[0]: _listed(v) for v in own}
    return {
        "scale": scale,
        "weights": _listed(weights),
        "momentum": _listed(momentum(model.optimizer, weights)),
    }


def write_run(found):
    """Writes the golden run of one family in eager mode."""
    runs = {dtype: loop(found[0], dtype, "eager") for dtype in STARTS}
    (DATA / "run.json").write_text(json.dumps(runs) + "\n")


#: A file of a model and its optimizer. A legacy one's state is in no .keras file.
MODEL_FILES = {
    "keras3": "model.keras",
    "keras2-new": "model.keras",
    "keras2-legacy": "model.h5",
}


def write_files(found):
    """Writes what this version of lossscale saves."""
    for family in found:
        for kind in ("skip", "guard"):
            home = DATA / f"lossscale-{lossscale.__version__}" / f"{family.name}-{kind}"
            home.mkdir(parents=True, exist_ok=True)
            model = compiled_model(family, wrapped(family, kind))
            fit(model, 0, STEPS // 2)
            model.save(str(home / MODEL_FILES[family.name]))
            checkpoint_of(model).write(str(home / "checkpoint"))
            expected = {"config": model.optimizer.get_config(), "half": state(model)}
            fit(model, STEPS // 2, STEPS)
            expected["end"] = state(model)  # of no use where it cannot be read
            text = json.dumps(expected, indent=1, default=float)
            (home / "expected.json").write_text(text + "\n")


if __name__ == "__main__":
    {"run": write_run, "files": write_files}[sys.argv[1]](families())
