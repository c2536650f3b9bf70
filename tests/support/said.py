"""Of each finding and cause of the monitor: what it is asked of where it is true.

No `fit` runs. `TRUE` has, for each function of the two tables, what makes its subject.
"""

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
from lossscale.optimizer.record import GRADIENTS, LEFT_OUT, Spike

FAMILY = families()[0]


class Stub(Watched):
    """An optimizer of which is seen what a test sets, and nothing else."""

    faults = bad_weights = ()
    bad_loss = bad_layer = None
    bad_sums = {}  # noqa: RUF012 - never changed


def watched(scale=None, *, policy="mixed_float16", guard=None, seen=None, **now):
    """Returns an optimizer as it was read twice: as a `fit` began, and `now`."""
    scale = DynamicLossScale(8.0) if scale is None else scale
    optimizer = LossScaleOptimizer(FAMILY.optimizers.SGD(0.1), scale, guard=guard)
    w = Stub(optimizer, patience=2)
    model = regression(FAMILY, optimizer, policy)
    monitor = SimpleNamespace(model=model, on_stall="warn", params={})
    Run(monitor, [w]).data = Data(None, False)
    w.begin(Reading(now.pop("before", float(scale)), 0, 0))
    w.see(Reading(**{"loss_scale": float(scale), "skipped": 0, "applied": 0, **now}))
    vars(w).update(seen or {})
    return w


def seen(name, scale=None, **now):
    """Returns an optimizer of which one thing was seen: the name of an attribute."""
    w = watched(scale, **now)
    faults = [(w.run.model.trainable_weights[0], "nan")]
    set_to = {
        "bad_loss": "nan",
        "bad_sums": {"total": tf.zeros([])},
        "bad_layer": ("hidden/kernel", "hidden/bias"),
    }
    w.faults = faults  # at any stall
    setattr(w, name, set_to.get(name, faults))
    return w


def skips(count, why, **kwargs):
    """Returns what is read after steps that were all skipped, for one reason."""
    bad = 0 if why == LEFT_OUT else count
    last = tuple((number, why) for number in range(count))
    read = {"own": count, "nonfinite": bad, "last": last, "in_a_row": bad}
    return {"skipped": bad, **read, **kwargs}


LOSSES = skips(3, "nan", losses=3, bad_losses=3)
ONE_LOSS = {"loss_scale": 4.0, **skips(1, "nan", losses=1, bad_losses=1)}


def with_statistics():
    norm = FAMILY.keras.layers.BatchNormalization(name="norm")
    run = watched(**skips(1, GRADIENTS)).run
    run.model = FAMILY.keras.Sequential([FAMILY.keras.Input([2]), norm])
    norm.moving_mean.assign([np.nan, np.nan])
    return run


def beside_a_backup():
    """Called as Keras calls a callback, from a list of them."""
    backup = type("BackupAndRestore", (FAMILY.keras.callbacks.Callback,), {})()
    monitor = FAMILY.keras.callbacks.Callback()
    monitor.on_stall = "stop"
    self = FAMILY.keras.callbacks.CallbackList([monitor, backup])  # noqa: F841 - seen
    return list(findings.backup(SimpleNamespace(monitor=monitor)))


def with_spikes(count, **now):
    w = watched(guard=SpikeGuard(), **now, **skips(count, LEFT_OUT, left_out=count))
    spike = Spike("kernel", 8.0, 2.0, w.run.model.trainable_weights[0])
    vars(w.optimizer)["last_spike"] = lambda: spike
    return w


def with_room(room):
    w = watched(applied=9)
    w.room, w.roomy_epochs = room, w.patience
    return w


def recompiled(**now):
    keras = FAMILY.keras
    space = keras.optimizers if FAMILY.name == "keras3" else keras.mixed_precision
    theirs = space.LossScaleOptimizer(FAMILY.optimizers.SGD(0.1))
    model = SimpleNamespace(optimizer=theirs)
    return SimpleNamespace(model=model, watched=[watched(**now)])


def fixed(scale=8.0):
    return FixedLossScale(scale, skip_nonfinite=True)


OVERFLOW = {"before": 2.0**10, "applied": 9, **skips(3, GRADIENTS)}
Sharp = type("SharpnessAwareMinimization", (), {})
TRUE = {
    findings.sharpness: lambda: SimpleNamespace(model=Sharp()),
    findings.left_out: lambda: with_spikes(1),
    findings.bad_losses: lambda: watched(**ONE_LOSS),
    findings.bad_input: lambda: seen("bad_layer", **skips(1, GRADIENTS)),
    findings.many_bad_losses: lambda: watched(counted_losses=1),
    findings.statistics: with_statistics,
    findings.stall: lambda: seen("bad_loss", **LOSSES),
    findings.many_left_out: lambda: with_spikes(3, applied=9),
    findings.unchecked_weights: lambda: seen("bad_weights", FixedLossScale(8)),
    findings.underflow: lambda: with_room(30.0),
    findings.all_zero: lambda: with_room(np.inf),
    findings.replaced: recompiled,
    causes.of_weights: lambda: seen("bad_weights"),
    causes.of_loss: lambda: seen("bad_loss"),
    causes.of_accumulators: lambda: seen("bad_sums"),
    causes.of_input: lambda: seen("bad_layer"),
    causes.of_large_gradients: lambda: seen("faults", DynamicLossScale(1.0)),
    causes.of_high_scale: lambda: seen("faults", **OVERFLOW),
}


def texts():
    """Returns a text of each function of the two tables by its name, and of a few."""
    found = {find.__name__: list(find(make())) for find, make in TRUE.items()}
    in_float32 = causes.of_large_gradients(seen("faults", policy="float32"))
    floor = DynamicLossScale(8.0, min_loss_scale=8.0)
    guarded = with_spikes(1)
    vars(guarded.optimizer)["last_spike"] = lambda: None  # as with a guard of one's own
    found["own guard"] = list(findings.left_out(guarded))
    for name, scale in {"fixed": fixed(), "floor": floor}.items():
        found[name] = list(causes.of_high_scale(seen("faults", scale)))
    return {**found, "in float32": list(in_float32), "backup": beside_a_backup()}
