"""The law of cures: what find_nonfinite says was tried, and whoever follows it trains.

This holds `cure.py` and `training_step.py`. The faults are in `support/cures.py`.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf
from cures import CURED, LOSSES, LOST_BEFORE, UNCURED, Program
from models import policy_of

from lossscale import DynamicLossScale, LossScaleOptimizer, find_nonfinite

QUICK = ("sqrt'(0)", "log of what was lost")
TRIED = "float32 was tried in this layer, and does not help"
DIVISION = r"division by zero, and add a small number, such as 1e-3, to the divisor"
LOGARITHM = "logarithm of zero, and add a small number"
POWER = "negative power or an inverse root of zero, and add a small number"
ROOT = r"infinite derivative, as a square root .* at zero.* tf\.sqrt\(x \+ 1e-"
RANGE = r"infinite at 1 and -1, .* tf\.clip_by_value\(x, 1e-3 - 1, 1 - 1e-3\)"
#: What is said of a fault that float32 does not cure.
SAID = {
    "0/0": DIVISION,
    "1/0": DIVISION,
    "norm": DIVISION,
    "log(0)": LOGARITHM,
    "log1p(-1)": LOGARITHM,
    "rsqrt(0)": POWER,
    "norm'(0)": ROOT,
    "sqrt'(0)": ROOT,
    "pow'(0)": ROOT,
    "acos'(1)": RANGE,
    "asin'(-1)": RANGE,
    "atanh(1)": RANGE,
    "log(0) in the loss": LOGARITHM,
    "sqrt'(0) in the loss": ROOT,
}


def rows(*tables):
    """Returns the faults of some tables, each in one mode, and those that are quick."""
    every = [name for table in tables for name in table]
    cases = [(name, ("eager", "graph")[n % 2]) for n, name in enumerate(every)]
    quick = [(name, "graph") for name in QUICK]
    slow = [pytest.param(*c, marks=pytest.mark.slow) for c in cases if c not in quick]
    return [*quick, *slow]


def said_of(program):
    return str(find_nonfinite(program.model(), program.x, program.y))


@pytest.mark.parametrize(("fault", "mode"), rows(UNCURED, LOSSES, CURED))
def test_whoever_follows_what_is_said_trains(family, fault, mode):
    program = Program(family, fault, mode)
    assert not program.trains(steps=24)
    said = said_of(program)
    if fault in CURED:
        assert re.search(r"Write\s+.*dtype=\"float32\", name='bad'\)", said), said
        assert TRIED not in said
    else:
        assert re.search(SAID[fault], said), said
        assert 'dtype="float32"' not in said
        assert (TRIED in said) == (fault in UNCURED)
    assert "min_loss_scale" not in said
    assert program.follow(said)
    again = said_of(program)
    assert "Nothing is at fault" in again or "no layer is at fault" in again, again
    assert program.trains()
    if fault in LOST_BEFORE:
        assert program.names == {"bad", "tiny"}


def chain(family, *computed, scale=1.0, y=1.0):
    """Returns a model of a dense layer and layers in float16, with data and targets."""
    keras = family.keras

    class Computing(keras.layers.Layer):
        def __init__(self, compute, **arguments):
            super().__init__(**arguments)
            self._compute = compute

        def call(self, x):
            return self._compute(x)

    with policy_of(keras, "mixed_float16"):
        model = keras.Sequential(
            [
                keras.Input([8]),
                keras.layers.Dense(4, use_bias=False, name="before"),
                *[Computing(each, name=f"c{i}") for i, each in enumerate(computed)],
                keras.layers.Dense(1, dtype="float32", name="out"),
            ]
        )
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.1), DynamicLossScale(scale))
    model.compile(optimizer, loss="mse")
    x = np.random.default_rng(0).normal(size=[32, 8]).astype("float32")
    return model, x, x[:, :1] * 0 + y


def test_a_loss_scale_at_which_no_gradient_arrives_is_no_cure(family):
    """At 2**-24 all gradients are finite, and zero: the steps would be applied."""
    found = find_nonfinite(*chain(family, lambda x: tf.sqrt(tf.nn.relu(x * 0))))
    assert (found.where, found.layer, found.operation) == ("gradient", "c0", "SqrtGrad")
    assert "No loss scale helps" in found.to_write
    assert "2**-24" not in found.to_write
    assert "Write" not in found.to_write


def test_a_low_loss_scale_does_not_cure_an_infinite_derivative(family):
    """It rounds the error of the row at fault to zero, and the other rows train."""
    model, x, y = chain(family, lambda x: tf.sqrt(tf.abs(x)))
    x[0], y[0] = 0.0, 2.0**-18
    found = find_nonfinite(model, x, y)
    assert (found.where, found.layer) == ("gradient", "c0")
    assert "No loss scale helps" in found.to_write
    assert "min_loss_scale" not in found.to_write


def test_two_faults_of_which_float32_cures_one(family):
    """The line for the one is confirmed, and the other gets none."""
    model = chain(
        family,
        lambda x: (x + 3) * 3e4 * 3 * 1e-5,
        lambda x: x / tf.reduce_sum(x * 0, -1, True),
    )
    said = str(find_nonfinite(*model))
    assert re.findall(r"name='(\w+)'\)", said) == ["c0"]
    assert "This alone is not enough. With it, another fault is left: c1 " in said
    assert "division by zero" in said


def test_what_cannot_be_tried_is_said_to_be_undecided(family):
    """A constant in float16 meets float32 as soon as the layer computes in it."""

    def compute(x):
        return tf.raw_ops.Mul(x=x, y=tf.constant(6e4, tf.float16)) * 6e4

    said = str(find_nonfinite(*chain(family, lambda x: compute(x + 3))))
    assert "could not be tried" in said


def test_gradients_that_are_zero_in_float32_too_decide_nothing(family):
    said = str(find_nonfinite(*chain(family, lambda x: x * 0 + tf.exp(x * 0 + 12))))
    assert "name='c0')" in said
    assert "this does not decide whether they will learn" in said


def test_a_call_that_casts_to_float16_itself_is_told(family):
    def compute(x):
        return tf.cast(tf.cast(x, tf.float16) * 6e4, x.dtype) * 6e4

    said = str(find_nonfinite(*chain(family, lambda x: compute(x + 3) * 1e-9)))
    assert "computes in float16 nevertheless: look there for casts to float16" in said
    assert "Write" not in said
