"""Of each finding and cause of the monitor: what it is asked of where it is true.

No `fit` runs. `TRUE` has, for each function of the two tables, what makes its subject.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import tensorflow as tf
from installed import families
from models import regression

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer, SpikeGuard
from lossscale.monitor import causes, findings
from lossscale.monitor.model import Data
from lossscale.monitor.reading import Reading
from lossscale.monitor.watched import Run, Watched
from lossscale.optimizer.record import GRADIENTS, LEFT_OUT

FAMILY = families()[0]


class Stub(Watched):
    """An optimizer at whose last bad step these gradients were not finite."""

    faults = ()


def watched(scale=None, *, policy="mixed_float16", guard=None, change=None, **now):
    """Returns an optimizer as it was read twice: as a `fit` began, and `now`.

    `change` is called with its model.
    """
    scale = DynamicLossScale(8.0) if scale is None else scale
    optimizer = LossScaleOptimizer(FAMILY.optimizers.SGD(0.1), scale, guard=guard)
    w = Stub(optimizer, patience=2)
    model = regression(FAMILY, optimizer, policy)
    if change is not None:
        change(model)
    monitor = SimpleNamespace(model=model, on_stall="warn", params={})
    Run(monitor, [w]).data = Data(None, False)
    w.begin(Reading(now.pop("before", float(scale)), 0, 0))
    w.see(Reading(**{"loss_scale": float(scale), "skipped": 0, "applied": 0, **now}))
    return w


def skips(count, why, **kwargs):
    """Returns what is read after steps that were all skipped, for one reason."""
    bad = 0 if why == LEFT_OUT else count
    last = tuple((number, why) for number in range(count))
    read = {"own": count, "nonfinite": bad, "last": last, "in_a_row": bad}
    return {"skipped": bad, **read, **kwargs}


LOSSES = skips(3, "nan", losses=3, bad_losses=3)
ONE_LOSS = {"loss_scale": 4.0, **skips(1, "nan", losses=1, bad_losses=1)}
OVERFLOW = {"applied": 9, **skips(3, GRADIENTS)}


def with_nan(model):
    model.set_weights([weight * np.nan for weight in model.get_weights()])


def with_nan_kernel(**now):
    """The gradient of the first layer's kernel is NaN, that of its bias is not."""
    w = watched(**now)
    w.faults = [(w.run.model.trainable_weights[0], "nan")]
    return w


def with_bad_losses():
    w = with_nan_kernel(**LOSSES)
    vars(w.optimizer)["nonfinite_loss"] = lambda: "nan"
    return w


def of_model(**attributes):
    run = watched(**skips(1, GRADIENTS)).run
    vars(run).update(attributes)
    return run


def with_statistics():
    norm = FAMILY.keras.layers.BatchNormalization(name="norm")
    model = FAMILY.keras.Sequential([FAMILY.keras.Input([2]), norm])
    norm.moving_mean.assign([np.nan, np.nan])
    return of_model(model=model)


def seen(w=None, **found):
    """Returns what was seen at a stall: nothing but what is `found`."""
    nothing = {"loss": None, "gradients": (), "weights": (), "accumulators": {}}
    w = w or watched(applied=9)
    variable = w.run.model.trainable_weights[0]
    if "weights" in found:
        found["weights"] = [(variable, "nan")]
    if "loss" not in found and "weights" not in found:
        found["gradients"] = [(variable, "inf")]
    return causes.Seen(w, **{**nothing, "layer": None, **found})


Sharp = type("SharpnessAwareMinimization", (), {})


def beside_a_backup():
    """Called as Keras calls a callback, from a list of them."""
    backup = type("BackupAndRestore", (FAMILY.keras.callbacks.Callback,), {})()
    monitor = FAMILY.keras.callbacks.Callback()
    monitor.on_stall = "stop"
    self = FAMILY.keras.callbacks.CallbackList([monitor, backup])  # noqa: F841 - seen
    return list(findings.backup(of_model(monitor=monitor)))


def recompiled():
    keras = FAMILY.keras
    space = keras.optimizers if FAMILY.name == "keras3" else keras.mixed_precision
    theirs = space.LossScaleOptimizer(FAMILY.optimizers.SGD(0.1))
    return SimpleNamespace(model=SimpleNamespace(optimizer=theirs), watched=[watched()])


def with_rooms(room):
    w = watched(applied=9)
    w.rooms = [room] * w.patience
    return w


def fixed(scale=8.0):
    return FixedLossScale(scale, skip_nonfinite=True)


TRUE = {
    findings.sharpness: lambda: of_model(model=Sharp()),
    findings.unbuilt: lambda: of_model(build_error=ValueError("no shape")),
    findings.spike: lambda: watched(guard=SpikeGuard(), spikes=1),
    findings.bad_losses: lambda: watched(**ONE_LOSS),
    findings.bad_input: lambda: with_nan_kernel(**skips(1, GRADIENTS)),
    findings.many_bad_losses: lambda: watched(counted_losses=1),
    findings.stall: with_bad_losses,
    findings.left_out: lambda: watched(
        guard=SpikeGuard(), applied=9, spikes=3, **skips(3, LEFT_OUT, left_out=3)
    ),
    findings.unchecked_weights: lambda: watched(FixedLossScale(8), change=with_nan),
    findings.underflow: lambda: with_rooms(30.0),
    findings.all_zero: lambda: with_rooms(np.inf),
    findings.replaced: recompiled,
    findings.restored: lambda: of_model(
        statistics=SimpleNamespace(read=lambda: (1, ["norm/moving_mean"]))
    ),
    findings.statistics: with_statistics,
    causes.of_weights: lambda: seen(weights=True),
    causes.of_loss: lambda: seen(loss="nan"),
    causes.of_accumulators: lambda: seen(accumulators={"total": tf.zeros([])}),
    causes.of_input: lambda: seen(layer=("hidden/kernel", "hidden/bias")),
    causes.of_large_gradients: lambda: seen(watched(DynamicLossScale(1.0))),
    causes.of_high_scale: lambda: seen(watched(before=2.0**10, **OVERFLOW)),
}


def texts():
    """Returns a text of each function of the two tables by its name, and of a few."""
    found = {find.__name__: list(find(make())) for find, make in TRUE.items()}
    in_float32 = causes.of_large_gradients(seen(watched(policy="float32")))
    floor = DynamicLossScale(8.0, min_loss_scale=8.0)
    for name, scale in {"fixed": fixed(), "floor": floor}.items():
        found[name] = list(causes.of_high_scale(seen(watched(scale))))
    return {**found, "in float32": list(in_float32), "backup": beside_a_backup()}
