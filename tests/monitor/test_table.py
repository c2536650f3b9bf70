"""The table of runs: what happens in one, what must be said of it, and what must not.

Each row is judged by the causes that are named, not by the words of today. To read all
that is said, beside its program:

    pytest -n 0 -q -s -m "slow or not slow" tests/monitor/test_table.py
"""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from faulty import told_of
from models import FEATURES, data, policy_of
from own_steps import adding_up, by_zero, two_optimizers, wrapped
from strategies import scope_of

from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    Guard,
    HeadroomLossScale,
    LossScaleMonitor,
    LossScaleOptimizer,
    SpikeGuard,
)

ROWS = 4
#: What may be named, and the words by which it is known.
CAUSES = {
    "stall": "steps in a row were skipped",
    "batches": "skipped because the loss",
    "data": "inf or NaN in the data|data of that batch hold|, data hold inf",
    "rows": "rows of the data hold|in the data, in rows",
    "finite_data": "data are finite",
    "shuffled": "shuffle=False",
    "learning_rate": "learning rate that is too high|lower the learning rate",
    "float16": r"float16(?!, so a loss scale)",
    "activations": "activations beyond float16",
    "zero": "division by zero",
    "negative": "root of a negative",
    "derivative": "infinite derivative",
    "large_gradients": "gradients are too large",
    "high_scale": "loss scale is (still )?too high|falls to fit",
    "floor": "`min_loss_scale` is too high",
    "skip": r'nonfinite_loss="skip"\) leaves',
    "many": "more than one in five",
    "weights": "Weights that hold",
    "loaded": "what set them before",
    "unchecked": "checks no gradient",
    "statistics": "Non-trainable variables.*contain inf",
    "accumulators": "adds gradients up",
    "input": "input of this layer held",
    "underflow": "Gradients may underflow",
    "all_zero": "gradients that were read were zero",
    "spike": "skipped as a spike",
    "left_out": "Steps were skipped as",
    "many_left_out": "more than a tenth",
}
LOSS = "stall zero "
BACKWARD = "stall derivative "
#: What is named of NaN in all data, if the data are known.
OF_ROWS = "data rows zero negative"


class Row(NamedTuple):
    """A run. Both lists are names of `CAUSES`; all others must not be named."""

    run: dict
    must: str
    may: str = ""
    #: How many warnings there are, None: any number.
    times: int = None
    #: What the advice changes in the run: then nothing is said.
    cure: dict = None


def relu(x):
    """A relu that makes 0 of NaN, as TensorFlow's does where it is fused."""
    return tf.where(x > 0, x, tf.zeros_like(x))


def log_loss(small):
    return lambda y, p: -tf.math.log(small + 0.0 * p + 0.0 * y) * p**2


def root_loss(small):
    return lambda y, p: tf.sqrt(small + (p * y) ** 2)


def steep(y, p):
    return 2.0**21 * (y - p) ** 2


def divided(y, p):
    """In float16 0/0 where a target is zero."""
    y, p = tf.cast(y, tf.float16), tf.cast(p, tf.float16)
    return tf.cast(y / y * (p - y) ** 2, tf.float32)


class SkipsTheFirst(Guard):
    """Leaves out the first `least` steps."""

    left_out_as = "the first"

    def __init__(self, least):
        super().__init__()
        self.least = least
        self.seen = self._add_weight("seen", 0, tf.int64)

    def judge(self, state, largest):
        del largest
        return state.seen >= self.least, {"seen": state.seen + 1}

    def get_config(self):
        return {"least": self.least}


def network(family, run):
    """Returns a compiled model of a hidden layer and a float32 one, as `run` says."""
    keras = family.keras
    dense, norm = keras.layers.Dense, keras.layers.BatchNormalization
    with scope_of(run["strategy"]), policy_of(keras, run["policy"]):
        inner = family.optimizers.SGD(run["rate"])
        options = {"guard": run["guard"](), "nonfinite_loss": run["nonfinite_loss"]}
        optimizer = LossScaleOptimizer(inner, run["scale"](), **options)
        layer = dense(8, run["activation"], name="hidden", dtype=run["hidden"])
        parts = [keras.Input((FEATURES,)), layer]
        parts += [norm(name="norm")] if run["norm"] else []
        model = keras.Sequential([*parts, dense(1, name="last", dtype=run["last"])])
        rng = np.random.default_rng(3)
        model.set_weights([rng.normal(size=w.shape) / 4 for w in model.get_weights()])
        for name, value in run["weights"].items():
            weights = model.get_layer(name).get_weights()
            model.get_layer(name).set_weights([w * 0 + value for w in weights])
        layer.trainable = not run["frozen"]
        model.compile(optimizer, loss=run["loss"], **run["compile"])
    return model


DEFAULTS = {
    "rows": 64,
    # Which rows of the inputs and of the targets are another number, and which.
    "x": None,
    "y": None,
    "as_dataset": False,
    "shuffle": False,
    "epochs": 1,
    "fits": 1,
    "monitor": {},
    "applied": 0,
    "make": network,
    "strategy": None,
    "policy": "mixed_float16",
    "rate": 1e-3,
    "guard": lambda: None,
    "nonfinite_loss": "backoff",
    "scale": lambda: DynamicLossScale(2.0**10),
    "activation": "tanh",
    "hidden": None,
    "last": "float32",
    "norm": False,
    "frozen": False,
    "weights": {},
    "loss": "mse",
    "compile": {},
}
ALL = slice(None)
NAN, NAN_64 = {"x": (ALL, np.nan)}, {"rows": 64, "x": (27, np.nan)}
F32, BF16 = {"policy": "float32"}, {"policy": "mixed_bfloat16"}
FAST = {"rate": 1e3, "activation": None, "rows": 256}
LARGE = {"hidden": None, "activation": None, "weights": {"hidden": 9e4}, "rate": 2**-40}
TINY = {"scale": lambda: DynamicLossScale(1.0), "compile": {"loss_weights": 2.0**-25}}
LOOKS = {"monitor": {"patience": 2, "check_underflow": True}, "epochs": 3}
ALL_ZERO = {**TINY, **LOOKS, "last": None, "compile": {"loss_weights": 2.0**-60}}
FIXED = {"scale": lambda: FixedLossScale(2.0**24, skip_nonfinite=True)}
PLAIN = {"scale": lambda: FixedLossScale(8)}
SKIP = {"nonfinite_loss": "skip"}
SMALL = {"scale": lambda: DynamicLossScale(4.0)}
HIGH_FLOOR = {"scale": lambda: DynamicLossScale(2.0**20, min_loss_scale=2.0**20)}
FINITE_LOSS = {
    "activation": None,
    "x": (ALL, 1e22),
    "y": (ALL, 1e18),
    "weights": {"last": 0.0},
}
ONE_IN_3, ONE_IN_50 = (slice(0, None, 12), np.nan), (27, np.nan)
MANY_SPIKES = {"guard": lambda: SpikeGuard(window=2, threshold=1e-3, min_ratio=1.001)}

TABLE = {
    "healthy": Row({}, "", times=0),
    "healthy in bfloat16, twice": Row({**BF16, "fits": 2}, "", times=0),
    "healthy, eagerly": Row({"compile": {"run_eagerly": True}}, "", times=0),
    "healthy, a frozen layer": Row({"frozen": True, "norm": True}, "", times=0),
    "healthy after a search": Row({"scale": lambda: DynamicLossScale(2.0**40)}, ""),
    "NaN in the data, float32": Row(
        {**F32, **NAN}, LOSS + OF_ROWS, times=1, cure={"x": None}
    ),
    "NaN in the data, dead for three epochs": Row(
        {**NAN, "epochs": 3}, LOSS + OF_ROWS + " activations float16", times=1
    ),
    "NaN in a data set": Row(
        {**NAN, "as_dataset": True}, LOSS + "data negative activations float16"
    ),
    "a bad batch of a data set": Row(
        {**NAN_64, "as_dataset": True}, "batches data skip"
    ),
    "NaN that a relu hides": Row(
        {"activation": relu, "x": (27, np.nan)}, "input rows", cure={"x": None}
    ),
    "NaN that a relu hides, in all data": Row(
        {"activation": relu, **NAN, "epochs": 2}, "stall input rows", times=1
    ),
    "one bad batch in fifty": Row(
        {"rows": 200, "x": ONE_IN_50}, "batches rows skip", times=1, cure=SKIP
    ),
    "one bad batch in fifty, skip": Row(
        {**SKIP, "rows": 200, "x": ONE_IN_50}, "batches rows", times=1
    ),
    "one bad batch in three": Row({"rows": 160, "x": ONE_IN_3}, "batches rows"),
    "one bad batch in three, skip": Row(
        {**SKIP, "rows": 400, "x": ONE_IN_3}, "batches rows many", times=2
    ),
    "a bad batch, shuffled": Row({**NAN_64, "shuffle": True}, "batches rows skip"),
    "an infinite target of a batch": Row({"y": (27, np.inf)}, "batches rows skip"),
    "four batches in a call": Row(
        {**NAN_64, "compile": {"steps_per_execution": 4}}, "batches rows skip"
    ),
    "two faults in an epoch": Row(
        {**NAN_64, "activation": relu, "y": (11, np.nan)},
        "batches input rows skip",
        times=2,
    ),
    "statistics, once although they stay so": Row(
        {**NAN_64, "norm": True, "epochs": 2}, "batches rows skip statistics", times=3
    ),
    "statistics, put back": Row(
        {**NAN_64, "norm": True, "monitor": {"restore_statistics": True}},
        "batches rows skip",
    ),
    "0/0 in a float16 loss": Row(
        {"loss": divided, "y": (ALL, 0.0)}, LOSS + "negative activations float16"
    ),
    "0/0 in a float16 loss, in one batch": Row(
        {"loss": divided, "y": (27, 0.0)}, "batches finite_data skip"
    ),
    "0/0 in one batch, shuffled": Row(
        {"loss": divided, "y": (27, 0.0), "shuffle": True},
        "batches finite_data skip shuffled",
    ),
    "a logarithm of zero": Row(
        {"loss": log_loss(0.0)},
        LOSS + "activations float16",
        cure={"loss": log_loss(1e-3)},
    ),
    "an activation beyond float16": Row(
        LARGE, LOSS + "activations float16 negative", cure={"hidden": "float32"}
    ),
    "a learning rate, float32": Row(
        {**FAST, **F32}, "stall weights learning_rate", cure={"rate": 1e-3}
    ),
    "a learning rate, float16": Row(
        FAST,
        "stall learning_rate float16",
        "derivative large_gradients activations zero negative high_scale weights",
        cure={"rate": 1e-3},
    ),
    "a learning rate, bfloat16": Row({**FAST, **BF16}, "stall weights learning_rate"),
    "an infinite derivative": Row(
        {"loss": root_loss(0.0), "y": (ALL, 0.0), **SMALL},
        BACKWARD + "large_gradients float16",
        cure={"loss": root_loss(1e-3)},
    ),
    "a gradient beyond float16": Row(
        {"loss": steep, "rate": 1e-12, **SMALL},
        BACKWARD + "large_gradients float16",
        cure={"hidden": "float32"},
    ),
    "a gradient beyond float32": Row(
        {**F32, **FINITE_LOSS}, BACKWARD + "large_gradients"
    ),
    "fixed too high": Row(
        {**FIXED, "rows": 256},
        BACKWARD + "high_scale",
        cure={"scale": DynamicLossScale},
    ),
    "a floor too high": Row(
        {**HIGH_FLOOR, "rows": 256},
        BACKWARD + "floor",
        cure={"scale": lambda: DynamicLossScale(2.0**20)},
    ),
    "a loss scale that checks nothing, NaN": Row(
        {**PLAIN, **NAN}, "unchecked weights data learning_rate", times=1
    ),
    "a loss scale that checks nothing, a learning rate": Row(
        {**PLAIN, **FAST, **F32}, "unchecked weights data learning_rate"
    ),
    "weights that are NaN": Row(
        {"weights": {"hidden": np.nan}}, "stall weights loaded"
    ),
    "frozen weights that are NaN": Row(
        {"weights": {"hidden": np.nan}, "frozen": True}, "stall weights loaded"
    ),
    "gradients that underflow": Row(
        {**TINY, **LOOKS},
        "underflow float16",
        times=1,
        cure={"scale": HeadroomLossScale},
    ),
    "none that underflows in float32": Row({**TINY, **LOOKS, **F32}, "", times=0),
    "all gradients underflow": Row(
        ALL_ZERO,
        "all_zero float16",
        cure={"last": "float32", "scale": lambda: HeadroomLossScale(2.0**40)},
    ),
    "a guard that leaves many out": Row(
        {**MANY_SPIKES, "rows": 256}, "spike many_left_out"
    ),
    "a guard of one's own": Row(
        {"guard": lambda: SkipsTheFirst(1)}, "left_out", times=1
    ),
    "a guard of one's own, many": Row(
        {"guard": lambda: SkipsTheFirst(4)}, "left_out many_left_out"
    ),
    "two optimizers": Row(
        {"make": lambda family, _: two_optimizers(family, wrapped), "x": (27, np.inf)},
        "batches rows skip",
        times=1,
    ),
    "an accumulator that holds an infinity": Row(
        {
            "make": lambda family, _: adding_up(family, by_zero()),
            "y": (27, np.inf),
        },
        "stall accumulators",
        "batches rows skip",
    ),
    "an accumulator that is cleared": Row(
        {"make": lambda family, _: adding_up(family, tf.zeros_like), "y": (27, np.inf)},
        "",
        "batches rows skip",
    ),
    "dead, and fit called again": Row(
        {**NAN, **F32, "fits": 2}, LOSS + OF_ROWS, times=2
    ),
    "NaN in the data of a resumed run": Row(
        {**NAN, **F32, "applied": 9}, LOSS + OF_ROWS + " learning_rate"
    ),
    "a bad row on the last of two replicas": Row(
        {**NAN_64, "strategy": True}, "batches rows skip", times=1
    ),
}
#: The others are told apart in the same way.
QUICK = (
    "healthy",
    "NaN in the data, float32",
    "a bad batch, shuffled",
    "an infinite derivative",
    "all gradients underflow",
)


def fit(family, run, strategy=None):
    """Returns the warnings of a run, its history and its model."""
    run = {**DEFAULTS, **run}
    run["strategy"] = strategy if run["strategy"] else None
    x, y = data(np.random.default_rng(5), run["rows"])
    for values, bad in ((x, run["x"]), (y, run["y"])):
        if bad is not None:
            rows, value = bad
            values[rows] = value
    size, said = ROWS, []
    if run["as_dataset"]:
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS)
        x, y, size = dataset, None, None
    model = run["make"](family, run)
    model.optimizer.iterations.assign(run["applied"])
    monitor = LossScaleMonitor(**{"patience": 3, "verbose": 0, **run["monitor"]})
    options = {name: run[name] for name in ("shuffle", "epochs")}
    for _ in range(run["fits"]):
        told, history = told_of(model, x, y, monitor, size, **options)
        said += told
    return said, history, model


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in TABLE],
)
@pytest.mark.every
def test_what_is_said_is_true(family, name, request):
    row = TABLE[name]
    mirrored = "strategy" in row.run and request.getfixturevalue("mirrored")
    said, _, _ = fit(family, row.run, mirrored)
    sys.stdout.write("\n".join([f"\n## {name}, {family.name}", *said, ""]))
    text = "\n".join(said)
    named = {cause for cause, words in CAUSES.items() if re.search(words, text, re.S)}
    must = set(row.must.split())
    assert must <= set(CAUSES)
    assert not must - named
    assert not named - must - set(row.may.split())
    assert row.times in (None, len(said))


CURED = [name for name, row in TABLE.items() if row.cure]


@pytest.mark.slow
@pytest.mark.parametrize("name", CURED)
def test_what_it_advises_helps(family, name):
    run = {**DEFAULTS, **TABLE[name].run, **TABLE[name].cure}
    said, history, model = fit(family, run)
    steps = run["epochs"] * run["rows"] // ROWS
    assert history["skipped_steps"][-1] <= steps / 3
    assert not [text for text in said if "in a row" in text]
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    if "underflow" in name:  # the layer before learns
        assert float(model.optimizer.loss_scale.last_largest.numpy()) > 0.0
