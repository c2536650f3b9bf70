"""Any argument at all: a loss scale that stays finite, or an error that names it.

fuzzing.py draws what is right, mixed with what is not. Either an object comes back
whose scale stays finite and positive for 25 random steps, or a ValueError or TypeError
that names an argument, before any variable exists.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import fuzzing
import numpy as np
import pytest
import tensorflow as tf
from fuzzing import DYNAMIC, FIXED, MANAGER, anything, mixed, some_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from installed import families
from limits import IS_NEWEST

import lossscale
from lossscale import DynamicLossScale, LossScale, LossScaleOptimizer, presets

STEPS = 25
#: Inputs of each target.
EXAMPLES = 60 if IS_NEWEST else 16


class Target(NamedTuple):
    """What is called.

    Attributes:
      drawn: Dicts of arguments.
      call: Takes such a dict.
      inner: What errors may name besides: parts of arguments, and what these ask for.
    """

    drawn: Any
    call: Any
    inner: Any = ()


def of(function, right, needed=()):
    """Returns the target of a function, of which `right` says what it takes."""
    return Target(some_of(right, needed), lambda arguments: function(**arguments))


def optimizer_of(family):
    """Returns the target of one Keras's wrapper."""
    right = {
        "inner_optimizer": st.builds(family.optimizers.SGD, st.just(0.1)),
        "loss_scale": st.one_of(fuzzing.scales, st.sampled_from(["dynamic", "torch"])),
        "name": st.none() | st.text("ab/", max_size=3),
    }
    # Behind a number a number is Keras 3's second argument.
    inner = ("dynamic_growth_steps", "loss_scale_value", "config", *DYNAMIC)
    return of(LossScaleOptimizer, right, ["inner_optimizer"])._replace(inner=inner)


FLAGS = st.lists(st.booleans(), min_size=1, max_size=4)
LIMITS = st.lists(st.floats(0, 1e9), min_size=1, max_size=4)
PATHS = st.integers(0, 3).flatmap(
    lambda number: st.just("run.npz") if number else fuzzing.no_paths
)
TARGETS = {
    "FixedLossScale": of(lossscale.FixedLossScale, FIXED, ["loss_scale_value"]),
    "DynamicLossScale": of(DynamicLossScale, DYNAMIC),
    "FixedLossScaleManager": of(
        lossscale.FixedLossScaleManager, {"loss_scale": fuzzing.scales}, ["loss_scale"]
    ),
    "ExponentialUpdateLossScaleManager": of(
        lossscale.ExponentialUpdateLossScaleManager,
        MANAGER,
        ["init_loss_scale", "incr_every_n_steps"],
    ),
    "get": Target(
        st.fixed_dictionaries({"loss_scale": fuzzing.scales | anything}),
        lambda arguments: lossscale.get(arguments["loss_scale"]),
        ("loss_scale_value", "config", *DYNAMIC),
    ),
    "deserialize": of(
        lossscale.deserialize, {"config": fuzzing.configs()}, ["config"]
    )._replace(inner=(*FIXED, *DYNAMIC)),
    "from_preset": of(
        DynamicLossScale.from_preset,
        {"name": st.sampled_from(list(presets.PRESETS)), **DYNAMIC},
        ["name"],
    )._replace(inner=DYNAMIC),
    "import_state": Target(
        fuzzing.states(),
        lambda arguments: lossscale.import_state(**arguments),
        DYNAMIC,
    ),
    **{f"LossScaleOptimizer-{each.name}": optimizer_of(each) for each in families()},
    "save_run": Target(
        st.fixed_dictionaries(
            {"path": PATHS, "is_finite": mixed(FLAGS)},
            optional={"loss_scale": mixed(st.none())},
        ),
        lambda arguments: lossscale.save_run(**arguments),
    ),
    "simulate": Target(
        st.fixed_dictionaries(
            {"loss_scale": mixed(st.just(lossscale.FixedLossScale(8)))},
            optional={"is_finite": FLAGS | fuzzing.no_paths, "limit": mixed(LIMITS)},
        ),
        lambda arguments: lossscale.simulate(**arguments),
        ("is_finite", "limit"),
    ),
}


def attempt(target, arguments):
    """Returns what comes back, or None if the arguments are refused as promised."""
    made = []

    def creator(create, **given):
        made.append(given.get("name"))
        return create(**given)

    try:
        with tf.variable_creator_scope(creator):
            return target.call(arguments) or "nothing, as it should"
    except (TypeError, ValueError) as error:
        message = str(error)
    assert not made, f"{made} existed before: {message}"
    assert any(f"`{name}" in message for name in (*arguments, *target.inner)), message
    return None


def flags(seed):
    """Returns which steps are finite: most, half, few, none or all of them."""
    share = (0.95, 0.5, 0.1, 0.0, 1.0)[seed % 5]
    return np.random.default_rng(seed).random(STEPS) < share


def drive(loss_scale, seed):
    """Returns the scale before and after each step."""
    seen = [loss_scale.numpy()]
    for flag in flags(seed):
        loss_scale.adjust(flag)
        seen.append(loss_scale.numpy())
    return seen


def hold(found, seed):
    """Asserts that the scale of what came back stays finite and positive."""
    found = found.loss_scale if isinstance(found, LossScaleOptimizer) else found
    if isinstance(found, lossscale.LossScaleManager):
        found = found.as_loss_scale()
    if isinstance(found, LossScale):
        seen = np.asarray(drive(found, seed))
        assert len(seen) == STEPS + 1
        assert (np.isfinite(seen) & (seen > 0)).all(), found


def fuzz(target, examples):
    """Tries that many inputs, and returns how many were accepted and refused."""
    tried = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # the first example that fails is small enough
        suppress_health_check=list(HealthCheck),
    )
    @given(arguments=target.drawn, seed=st.integers(0, 2**31))
    def each(arguments, seed):
        found = attempt(target, arguments)
        tried["refused" if found is None else "accepted"] += 1
        hold(found, seed)

    each()
    return tried


@pytest.mark.slow_on_the_newest
@pytest.mark.parametrize("name", TARGETS)
def test_an_object_that_stays_finite_or_an_error_that_names(
    name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    examples = 30 if name == "simulate" else EXAMPLES
    tried = fuzz(TARGETS[name], examples)
    assert min(tried["accepted"], tried["refused"]) >= max(examples // 20, 1)
    assert sum(tried.values()) >= examples
