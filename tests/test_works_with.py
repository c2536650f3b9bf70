"""docs/works-with.md: a test for each row of its table."""

from __future__ import annotations

import re

import numpy as np
import pytest
from installed import ROOT
from limits import skip_without
from models import (
    assert_same,
    data,
    differ,
    inner_variables,
    regression,
    training_state,
    with_infinity,
)
from pages import PAGES

from lossscale import DynamicLossScale, LossScaleOptimizer

QUIET = {"batch_size": 16, "verbose": 0, "shuffle": False}
#: Row -> what the optimizer is made with, of this Keras, what `compile` is given, and
#: the limit that says where there is no such thing.
SETTINGS = {
    "clipnorm": ({"clipnorm": 0.01}, {}, None),
    "clipvalue": ({"clipvalue": 0.01}, {}, None),
    "global_clipnorm": ({"global_clipnorm": 0.01}, {}, None),
    "Weight decay": ({"weight_decay": 0.1}, {}, "weight_decay"),
    "use_ema": ({"use_ema": True}, {}, "use_ema"),
    "gradient_accumulation_steps": (
        {"gradient_accumulation_steps": 2},
        {},
        "gradient_accumulation_steps",
    ),
    "Learning rate schedules": ({"learning_rate": None}, {}, None),
    "jit_compile": ({}, {"jit_compile": True}, "compile(jit_compile=...)"),
    "run_eagerly": ({}, {"run_eagerly": True}, None),
}


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("setting", SETTINGS)
def test_it_works_as_without_the_wrapper(family, rng, setting):
    """A run ends as the bare one's, a skipped step changes nothing, and it goes on."""
    arguments, how, limit = SETTINGS[setting]
    if limit:
        skip_without(limit, family)
    if "learning_rate" in arguments:
        decay = family.keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
        arguments = {"learning_rate": decay}
    x, y = data(rng)

    def inner():
        return family.optimizers.SGD(**{"learning_rate": 0.1, **arguments})

    def fitted(optimizer, *batches):
        model = regression(family, optimizer, **how)
        logs = [model.fit(*batch, **QUIET).history["loss"] for batch in batches]
        return model, logs

    # A power of two: the gradients are those of the bare optimizer, to the last bit.
    scale = DynamicLossScale(2.0**10)
    bare, losses = fitted(inner(), (x, y), (x, y))
    wrapped, ours = fitted(LossScaleOptimizer(inner(), scale), (x, y), (x, y))
    assert losses == ours
    assert_same(training_state(bare), training_state(wrapped))
    before = training_state(wrapped)
    wrapped.fit(with_infinity(x[:16]), y[:16], **QUIET)
    assert int(scale.skipped_steps.numpy()) == 1
    assert_same(training_state(wrapped), before)
    wrapped.fit(x, y, **QUIET)
    assert differ(training_state(wrapped), before)


@pytest.mark.parametrize(
    ("setting", "how", "limit"),
    [
        ({}, {"steps_per_execution": 4}, None),
        ({"gradient_accumulation_steps": 2}, {}, "gradient_accumulation_steps"),
    ],
    ids=["steps_per_execution", "gradient_accumulation_steps"],
)
def test_a_bad_batch_is_left_out_and_the_others_train(family, rng, setting, how, limit):
    if limit:
        skip_without(limit, family)
    inner = [family.optimizers.SGD(0.1, **setting) for _ in "ab"]
    x, y = data(rng, 48)
    bare = regression(family, inner[0], **how)
    bare.fit(np.delete(x, np.s_[16:32], 0), np.delete(y, np.s_[16:32], 0), **QUIET)
    bad = x.copy()
    bad[20] = np.inf  # in the second of three batches
    optimizer = LossScaleOptimizer(inner[1], DynamicLossScale(2.0**10))
    wrapped = regression(family, optimizer, **how)
    wrapped.fit(bad, y, **QUIET)
    assert int(optimizer.loss_scale.skipped_steps.numpy()) == 1
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


CONFORMANCE = "tests/optimizer/test_loops_in_every_mode.py"
#: What else holds a row: words of a file of tests.
ELSEWHERE = {
    "Sparse gradients (`Embedding`)": (CONFORMANCE, "tf.gather(values[1], [1, 3, 1])"),
    "Gradients that are `None`": (CONFORMANCE, '"a gradient that is None"'),
    "Several optimizers": (CONFORMANCE, '"a shared loss scale"'),
    '`quantize("float8")` (Keras 3)': ("tests/optimizer/test_overwriting.py", "float8"),
}


def test_each_row_of_the_page_has_a_test():
    rows = re.findall(r"(?m)^\| (.*?) \| .* \|$", PAGES["works-with"].read_text())
    assert rows[:2] == ["feature", "---"]
    own = "".join([*SETTINGS, "steps_per_execution", "Frozen layers", "fit` reports"])
    own += "Metrics of a skipped step"
    for row in rows[2:]:
        if row in ELSEWHERE:
            path, words = ELSEWHERE[row]
            assert words in (ROOT / path).read_text(), row
        else:
            names = re.findall(r"`(\w+)(?:=\w+)?`", row) or [row.split(" (")[0]]
            assert all(name in own for name in names), row
