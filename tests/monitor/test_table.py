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
from faulty import scaled_gradients, told_of
from models import FEATURES, data, policy_of

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
    """Leaves out the first four steps."""

    left_out_as = "the first"

    def __init__(self):
        super().__init__()
        self.seen = self._add_weight("seen", 0, tf.int64)

    def judge(self, state, largest):
        del largest
        return state.seen >= 4, {"seen": state.seen + 1}

    def get_config(self):
        return {}


def network(family, run):
    """Returns a compiled model of a hidden layer and a float32 one, as `run` says."""
    keras = family.keras
    dense, norm = keras.layers.Dense, keras.layers.BatchNormalization
    with policy_of(keras, run["policy"]):
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


def adding_up(family, clear):
    """Returns a model that adds its gradients up in variables, and then clears them."""

    class AddingUp(family.keras.Sequential):
        def train_step(self, batch):
            loss, grads = scaled_gradients(self, batch)
            unscaled = self.optimizer.get_unscaled_gradients(grads)
            for total, grad in zip(self.totals, unscaled):
                total.assign_add(grad)
            means = [tf.convert_to_tensor(total) / 2.0 for total in self.totals]
            self.optimizer.apply_gradients(zip(means, self.trainable_variables))
            for total in self.totals:
                total.assign(clear(total))
            return {"loss": loss}

    layers = [family.keras.layers.Dense(1) for _ in range(2)]
    model = AddingUp([family.keras.Input((FEATURES,)), *layers])
    inner, scale = family.optimizers.SGD(2.0**-9), DynamicLossScale(2.0**10)
    model.compile(LossScaleOptimizer(inner, scale))
    shapes = [weight.shape for weight in model.trainable_variables]
    model.totals = [tf.Variable(tf.zeros(shape), trainable=False) for shape in shapes]
    return model


def by_zero():
    """Returns what clears a sum badly: a product of infinity and 0 is NaN."""
    # In a graph TensorFlow makes zeros of a product with the constant 0.
    zero = tf.Variable(0.0, trainable=False)
    return lambda total: total * zero


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
NAN, ONE_ROW = {"x": (ALL, np.nan)}, {"x": (27, np.nan)}
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
ONE_IN_3 = (slice(0, None, 12), np.nan)
MANY_SPIKES = {"guard": lambda: SpikeGuard(window=2, threshold=1e-3, min_ratio=1.001)}

TABLE = {
    "healthy": Row({}, "", times=0),
    "healthy in bfloat16, twice": Row({**BF16, "fits": 2}, "", times=0),
    "healthy, a frozen layer": Row({"frozen": True, "norm": True}, "", times=0),
    "NaN in the data, float32": Row(
        {**F32, **NAN}, LOSS + OF_ROWS, times=1, cure={"x": None}
    ),
    "NaN in a data set, dead for three epochs": Row(
        {**NAN, "as_dataset": True, "epochs": 3},
        LOSS + "data negative activations float16",
        times=1,
    ),
    "NaN that a relu hides": Row(
        {**ONE_ROW, "activation": relu}, "input rows", cure={"x": None}
    ),
    "NaN that a relu hides, in all data": Row(
        {"activation": relu, **NAN, "epochs": 2}, "stall input rows", times=1
    ),
    "one bad batch in fifty": Row(
        {**ONE_ROW, "rows": 200}, "batches rows skip", times=1, cure=SKIP
    ),
    "one bad batch in three": Row({"rows": 160, "x": ONE_IN_3}, "batches rows"),
    "one bad batch in three, skip": Row(
        {**SKIP, "rows": 400, "x": ONE_IN_3}, "batches rows many", times=2
    ),
    "a bad batch, shuffled": Row({**ONE_ROW, "shuffle": True}, "batches rows skip"),
    "statistics, once although they stay so": Row(
        {**ONE_ROW, "norm": True, "epochs": 2}, "batches rows skip statistics", times=3
    ),
    "0/0 in a float16 loss, in one batch, shuffled": Row(
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
    "a learning rate, bfloat16": Row(
        {**FAST, **BF16}, "stall weights learning_rate", cure={"rate": 1e-3}
    ),
    "a learning rate, float16": Row(
        FAST,
        "stall learning_rate float16",
        "derivative large_gradients activations zero negative high_scale weights",
        cure={"rate": 1e-3},
    ),
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
    "a loss scale that checks nothing": Row(
        {**PLAIN, **NAN}, "unchecked weights data learning_rate", times=1
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
    "a guard of one's own": Row({"guard": SkipsTheFirst}, "left_out many_left_out"),
    "an accumulator that holds an infinity": Row(
        {"make": lambda family, _: adding_up(family, by_zero()), "y": (27, np.inf)},
        "stall accumulators",
        "batches rows skip",
    ),
    "an accumulator that is cleared": Row(
        {"make": lambda family, _: adding_up(family, tf.zeros_like), "y": (27, np.inf)},
        "",
        "batches rows skip",
    ),
    "NaN in the data of a resumed run, and fit called again": Row(
        {**NAN, **F32, "fits": 2, "applied": 9},
        LOSS + OF_ROWS + " learning_rate",
        times=2,
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


def fit(family, run):
    run = {**DEFAULTS, **run}
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
def test_what_is_said_is_true(family, name):
    row = TABLE[name]
    said, _, _ = fit(family, row.run)
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
    run = {**TABLE[name].run, **TABLE[name].cure}
    said, history, model = fit(family, run)
    steps = run.get("epochs", 1) * run.get("rows", DEFAULTS["rows"]) // ROWS
    assert history["skipped_steps"][-1] <= steps / 3
    assert not [text for text in said if "in a row" in text]
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    if "underflow" in name:  # the layer before learns
        assert float(model.optimizer.loss_scale.last_largest.numpy()) > 0.0
