"""The rule once more in plain Python, against the real one over random runs."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from lossscale import DynamicLossScale

RESETS = ["good", "growth", "backoff"]


def reference(config, flags):
    """Returns the scale after each step, from the rule as it is written down."""
    scale, good, bad, seen = config["initial_loss_scale"], 0, 0, []
    for is_finite in flags:
        if is_finite:
            good += 1
            bad = 0 if "good" in config["hysteresis_reset"] else bad
            if good >= config["increment_period"]:
                good = 0
                bad = 0 if "growth" in config["hysteresis_reset"] else bad
                grown = scale * config["multiplier"]
                if config["max_loss_scale"] is not None:
                    scale = min(grown, config["max_loss_scale"])
                elif grown <= np.finfo(np.float32).max:
                    scale = grown
        else:
            good = 0
            bad += 1
            if bad >= config["hysteresis"]:
                factor = config["backoff_factor"] or 1 / config["multiplier"]
                scale = max(scale * factor, config["min_loss_scale"])
                bad = 0 if "backoff" in config["hysteresis_reset"] else bad
        seen.append(scale)
    return seen


def exponents(low, high):
    return st.integers(low, high).map(lambda exponent: 2.0**exponent)


@st.composite
def configs(draw):
    """Returns arguments. All are powers of two, so that every float32 step is exact."""
    floor = draw(st.integers(-20, 10))
    initial = draw(st.integers(floor, 120))
    ceiling = draw(st.one_of(st.none(), st.integers(initial, 127)))
    return {
        "initial_loss_scale": 2.0**initial,
        "increment_period": draw(st.integers(1, 5)),
        "multiplier": draw(exponents(1, 6)),
        "backoff_factor": draw(st.one_of(st.none(), exponents(-6, -1))),
        "hysteresis": draw(st.integers(1, 4)),
        "hysteresis_reset": draw(st.lists(st.sampled_from(RESETS), unique=True)),
        "min_loss_scale": 2.0**floor,
        "max_loss_scale": None if ceiling is None else 2.0**ceiling,
    }


@settings(max_examples=150, deadline=None)
@given(config=configs(), flags=st.lists(st.booleans(), max_size=40))
def test_every_step_of_every_run_is_the_references(config, flags):
    loss_scale = DynamicLossScale(**config)
    seen = []
    for flag in flags:
        _, should_apply = loss_scale.adjust(flag)
        assert bool(should_apply) == flag
        seen.append(float(loss_scale))
    assert seen == reference(config, flags)
    assert loss_scale.skipped_steps.numpy() == flags.count(False)
    assert bool(loss_scale.last_step_finite.numpy()) == (not flags or flags[-1])


@settings(max_examples=15, deadline=None)
@given(config=configs(), flags=st.lists(st.booleans(), min_size=1, max_size=40))
def test_compiled_runs_are_the_references_too(config, flags):
    for options in ({}, {"jit_compile": True}):
        loss_scale = DynamicLossScale(**config)

        @tf.function(**options)
        def step(flag, loss_scale=loss_scale):
            loss_scale.adjust(flag)
            return loss_scale()

        seen = [float(step(tf.constant(flag))) for flag in flags]
        assert seen == reference(config, flags)
