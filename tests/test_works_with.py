"""docs/works-with.md: a test for each row of its table, here or elsewhere."""

import re

import numpy as np
import pytest
import tensorflow as tf
from installed import ROOT
from limits import TENSORFLOW, skip_without
from models import (
    FEATURES,
    assert_same,
    data,
    differ,
    inner_variables,
    regression,
    seed_all,
)
from pages import PAGES
from processes import printed

from lossscale import DynamicLossScale, LossScaleOptimizer

QUIET = {"batch_size": 16, "verbose": 0, "shuffle": False}


@pytest.mark.parametrize(
    "how",
    [
        {"steps_per_execution": 4},
        pytest.param({"run_eagerly": True}, marks=pytest.mark.slow),
        pytest.param({"jit_compile": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fit_leaves_a_bad_batch_out_and_trains_with_the_others(family, rng, how):
    if "jit_compile" in how:
        skip_without("compile(jit_compile=...)", family)
    x, y = data(rng, 48)
    bare = regression(family, family.optimizers.SGD(0.1), **how)
    bare.fit(np.delete(x, np.s_[16:32], 0), np.delete(y, np.s_[16:32], 0), **QUIET)
    y[20] = np.inf  # in the second of three batches
    scale = DynamicLossScale(2.0**10)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.1), scale)
    wrapped = regression(family, optimizer, **how)
    wrapped.fit(x, y, **QUIET)
    assert int(scale.skipped_steps.numpy()) == 1
    assert_same(bare.get_weights(), wrapped.get_weights())


def test_frozen_layers_and_what_fit_reports(family, rng):
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.0))
    model = regression(family, optimizer)
    model.layers[0].trainable = False
    model.compile(optimizer, loss="mse")
    x, y = data(rng)
    before = model.get_weights()
    logs = model.fit(x, y, **QUIET).history
    assert logs["loss"][0] == pytest.approx(model.evaluate(x, y, verbose=0), rel=1e-5)
    optimizer.learning_rate = 0.1
    y[-1] = np.nan  # the batch is skipped, and counts in the epoch's mean
    logs = model.fit(x, y, **QUIET).history
    assert not np.isfinite(logs["loss"][0])
    assert int(optimizer.loss_scale.skipped_steps.numpy()) == 1
    assert all(np.isfinite(each.numpy()).all() for each in inner_variables(optimizer))
    assert_same(model.get_weights()[:2], before[:2])
    assert differ(model.get_weights()[2:], before[2:])


@tf.custom_gradient
def halved(x):
    """Returns `x`, of which the gradient is halved."""
    return x, lambda grad: grad / 2.0


def test_what_fit_adds_to_the_loss_is_scaled_and_so_are_gradients_of_ones_own(
    family, rng
):
    keras, layers = family.keras, family.keras.layers

    class Adds(layers.Layer):
        def call(self, x):
            self.add_loss(0.25 * tf.reduce_mean(tf.square(x)))
            return halved(tf.recompute_grad(tf.tanh)(x))

    def trained(wrap):
        seed_all(keras)
        penalty = keras.regularizers.L2(0.125)
        x = keras.Input((FEATURES,))
        hidden = Adds()(layers.Dense(8, kernel_regularizer=penalty)(x))
        model = keras.Model(x, {n: layers.Dense(1, name=n)(hidden) for n in "ab"})
        losses, by = {"a": "mse", "b": "mse"}, {"a": 2.0, "b": 0.5}
        model.compile(wrap(family.optimizers.SGD(0.125)), losses, loss_weights=by)
        for _ in range(2):
            model.train_on_batch(inputs, targets, sample_weight=weights)
        return model.get_weights()

    inputs, y = data(rng)
    targets, weights = {"a": y, "b": 2.0 * y}, {"a": y[:, 0] ** 2, "b": y[::-1, 0] ** 2}
    assert_same(trained(lambda inner: inner), trained(LossScaleOptimizer))


DETERMINISTIC = """
import sys
import numpy as np
import tensorflow as tf
import lossscale

tf.config.experimental.enable_op_determinism()  # for the rest of the process
tf.keras.mixed_precision.set_global_policy("mixed_float16")
x = np.random.default_rng(0).normal(size=[256, 8])


def trained():
    tf.keras.utils.set_random_seed(1)
    layers = [tf.keras.layers.Dense(16, "relu"), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential(layers)
    scale = lossscale.DynamicLossScale(2.0**22)  # the first steps overflow
    optimizer = lossscale.LossScaleOptimizer(tf.keras.optimizers.Adam(1e-2), scale)
    model.compile(optimizer, "mse", jit_compile=sys.argv[1] == "xla")
    model.fit(x, x[:, :1], epochs=3, verbose=0)
    assert scale.skipped_steps.numpy() > 0 and optimizer.applied_steps.numpy() > 0
    return model.get_weights()


assert all(np.array_equal(a, b) for a, b in zip(trained(), trained()))
"""


@pytest.mark.slow
@pytest.mark.skipif(TENSORFLOW < (2, 8), reason="enable_op_determinism came later")
@pytest.mark.parametrize("how", ["graph", "xla"])
def test_two_deterministic_runs_are_equal_to_the_bit(how):
    printed("-c", DETERMINISTIC, how)


#: How a row of the page begins -> words of the test that holds it.
HELD_BY = {
    "`clipnorm`, `clipvalue`, `global_clipnorm`": '"global_clipnorm": 0.5',
    "Weight decay": '"weight_decay": 0.5',
    "Weight averages (`use_ema=True`)": '"use_ema": True',
    "`gradient_accumulation_steps` (Keras 3)": '"gradient_accumulation_steps": 2',
    "Learning rate schedules": '"halved at every step"',
    "`jit_compile=True`": '"jit_compile": True',
    "`steps_per_execution`": '"steps_per_execution": 4',
    "`run_eagerly=True`": '"run_eagerly": True',
    "`enable_op_determinism()`": "enable_op_determinism()  # for",
    "Sparse gradients (`Embedding`)": "tf.gather(values[1], [1, 3, 1])",
    "Gradients that are `None`": '"a gradient that is None"',
    "Frozen layers, `enable_lora`": "model.layers[0].trainable = False",
    "`sample_weight`, `class_weight`, `loss_weights`, `add_loss`, regularizers": (
        "loss_weights=by)"
    ),
    "`tf.recompute_grad`, `tf.custom_gradient`": "halved(tf.recompute_grad(tf.tanh)",
    "`train_on_batch`": "model.train_on_batch(inputs, targets",
    '`quantize("float8")` (Keras 3)': '].quantize("float8")',
    "Several optimizers": '"a shared loss scale"',
    "The loss that `fit` reports": "model.evaluate(x, y, verbose=0), rel",
    "Metrics of a skipped step": "counts in the epoch's mean",
}


def test_each_row_of_the_page_has_a_test():
    rows = re.findall(r"(?m)^\| (.*?) \| .* \|$", PAGES["works-with"].read_text())
    assert rows == ["feature", "---", *HELD_BY]
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for row, words in HELD_BY.items():
        assert tests.count(words) > 1, row  # once is here
