"""Any argument at all: a loss scale that stays finite, or an error that names it.

What is right is drawn, mixed with what a caller could pass by mistake. Either an object
comes back whose scale stays finite and positive for 25 random steps, or a ValueError or
TypeError that names an argument, before any variable exists.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from installed import families
from limits import IS_NEWEST

import lossscale
from lossscale import DynamicLossScale, LossScaleOptimizer, presets

STEPS = 25
#: Inputs of each target.
EXAMPLES = 60 if IS_NEWEST else 16

#: Numbers at which something changes; they are drawn with their neighbours.
EDGES = [0.0, 0.5, 1.0, 2.0, 2.0**15, 2.0**127, 2.0**-149, 2.0**-126, 3.4e38, 1.7e308]
EDGES += [1.0 + 2.0**-23, 1.0 - 2.0**-24, 2.0**63]
SPECIAL = [np.nan, np.inf, -np.inf, 2**63 - 1, 10**39, 10**400, 10**5000]
SPECIAL += [sign * edge * by for edge in EDGES for sign in (1, -1) for by in (1, 1.001)]
ODD = [None, True, np.True_, Ellipsis, object(), int, range(3), b"8", "", "a\0b", 8j]
ODD += [datetime.timedelta(3), np.datetime64("2020-01-01"), np.timedelta64(3, "ns")]
ODD += [*map(decimal.Decimal, ["8", "sNaN"]), fractions.Fraction(17, 2)]
ODD += [*map(np.array, [8.0, [8.0], ["8", "good"], None]), np.ma.masked, np.zeros([0])]
ODD += [*map(np.float16, [8, np.nan]), np.int8(8), np.uint64(2**63), np.longdouble(8)]
ODD += map(tf.constant, [8, 8.0, True, [8.0, 9.0], "8"])

leaves = st.one_of(
    st.sampled_from(SPECIAL),
    st.integers(-3, 3000),
    st.floats(),
    st.sampled_from([*presets.PRESETS, "good", "static"]) | st.text(max_size=3),
    st.sampled_from(ODD),
)
#: Anything at all.
anything = st.one_of(
    leaves,
    leaves,
    st.lists(leaves, max_size=3),
    st.dictionaries(st.sampled_from(["class_name", "config", 3]), leaves, max_size=2),
)

scales = st.one_of(st.floats(1, 2.0**127), st.integers(1, 2**70))
counts = st.integers(1, 7)
#: What the arguments of `DynamicLossScale` should be.
DYNAMIC = {
    "initial_loss_scale": scales,
    "increment_period": counts,
    "multiplier": st.floats(1.0 + 2.0**-20, 1e9),
    "backoff_factor": st.none() | st.floats(2.0**-60, 1.0 - 2.0**-20),
    "hysteresis": counts,
    "hysteresis_reset": st.lists(st.sampled_from(["good", "growth", "backoff"])),
    "min_loss_scale": st.floats(2.0**-126, 1.0),
    "max_loss_scale": st.none() | st.floats(2.0**127, 3.4e38),
    "search_period": st.none() | counts,
    "backoff_cooldown": st.none() | counts,
}


def mixed(right):
    """Draws what is right, most of the time, or anything."""
    return st.integers(0, 7).flatmap(lambda number: right if number else anything)


def some_of(right, needed=()):
    """Draws arguments, each of them right, most of the time, or anything."""
    return st.fixed_dictionaries(
        {name: mixed(right[name]) for name in needed},
        optional={n: mixed(drawn) for n, drawn in right.items() if n not in needed},
    )


def of_optimizer(family):
    """Draws arguments of one Keras's wrapper."""
    right = {
        "inner_optimizer": st.builds(family.optimizers.SGD, st.just(0.1)),
        "loss_scale": st.one_of(scales, st.sampled_from(["dynamic", "torch"])),
        "name": st.none() | st.text("ab/", max_size=3),
    }
    return some_of(right, ["inner_optimizer"])


#: Keras 3's second argument, behind a number, and Keras 2's, behind True.
OF_OPTIMIZER = ("dynamic_growth_steps", "initial_scale", "loss_scale_value", "config")
OF_OPTIMIZER += (*DYNAMIC,)
#: What is called, the arguments, and what errors may name besides: parts of arguments,
#: and what these ask for.
TARGETS = [
    (DynamicLossScale, some_of(DYNAMIC), ()),
    (
        lossscale.get,
        st.fixed_dictionaries({"identifier": scales | anything}),
        ("loss_scale", "config", *DYNAMIC),
    ),
    *((LossScaleOptimizer, of_optimizer(each), OF_OPTIMIZER) for each in families()),
]


def attempt(function, arguments, inner):
    """Returns what comes back, or None if the arguments are refused as promised."""
    made = []

    def creator(create, **given):
        made.append(given.get("name"))
        return create(**given)

    try:
        with tf.variable_creator_scope(creator):
            return function(**arguments)
    except (TypeError, ValueError) as error:
        message = str(error)
    assert not made, f"{made} existed before: {message}"
    assert any(f"`{name}" in message for name in (*arguments, *inner)), message
    return None


def hold(found, seed):
    """Asserts that the scale of what came back stays finite and positive."""
    found = found.loss_scale if isinstance(found, LossScaleOptimizer) else found
    # Most steps are finite, half of them, few, none or all.
    share = (0.95, 0.5, 0.1, 0.0, 1.0)[seed % 5]
    seen = [found.numpy()]
    for is_finite in np.random.default_rng(seed).random(STEPS) < share:
        found.adjust(is_finite)
        seen.append(found.numpy())
    assert np.isfinite(seen).all(), found
    assert min(seen) > 0, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "drawn", "inner"), TARGETS, ids=[each[0].__name__ for each in TARGETS]
)
def test_an_object_that_stays_finite_or_an_error_that_names(function, drawn, inner):
    tried = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # the first example that fails is small enough
        suppress_health_check=list(HealthCheck),
    )
    @given(arguments=drawn, seed=st.integers(0, 2**31))
    def each(arguments, seed):
        found = attempt(function, arguments, inner)
        tried["refused" if found is None else "accepted"] += 1
        hold(found, seed)

    each()
    assert min(tried["accepted"], tried["refused"]) >= max(EXAMPLES // 20, 1)
    assert sum(tried.values()) >= EXAMPLES
