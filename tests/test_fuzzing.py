"""Any argument at all: a loss scale that stays finite, or an error that names it.

fuzzing.py draws what is right, mixed with what is not. Either an object comes back
whose scale stays finite and positive for 100 random steps, or a ValueError or TypeError
that names an argument, before any variable exists.
"""

from __future__ import annotations

import functools
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

import lossscale
from lossscale import DynamicLossScale, LossScale, LossScaleOptimizer, presets
from lossscale.runtime.mode import COMPILED_BY_XLA

STEPS = 100
QUICK = 16
#: Inputs of each target in the slow test.
MANY = 150


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
    inner = ("loss_scale_value", "config", *DYNAMIC)
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
    """Returns which of 100 steps are finite: most, half, few, none or all of them."""
    share = (0.95, 0.5, 0.1, 0.0, 1.0)[seed % 5]
    return np.random.default_rng(seed).random(STEPS) < share


def drive(loss_scale, seed):
    """Returns the scale before and after each of 100 steps."""
    seen = [loss_scale.numpy()]
    for flag in flags(seed):
        loss_scale.adjust(flag)
        seen.append(loss_scale.numpy())
    return seen


def drive_compiled(loss_scale, seed, **options):
    """Does the same many times as fast: the class's rule, as a function.

    An object of its own is given the settings and the state of each `loss_scale`.
    """
    if not isinstance(loss_scale, DynamicLossScale):
        return drive(loss_scale, seed)
    values = {
        name: tf.constant(value, tf.int64 if isinstance(value, int) else tf.float32)
        for name, value in loss_scale.get_config().items()
        if value is not None and name != "hysteresis_reset"
    }
    state = [tf.convert_to_tensor(variable) for variable in _state(loss_scale)]
    run = _compiled(loss_scale.hysteresis_reset, **options)
    return run(values, state, tf.constant(flags(seed))).numpy()


def _state(loss_scale):
    names = ("current_loss_scale", "good_steps", "bad_steps", "skipped_steps")
    return [getattr(loss_scale, name) for name in names]


@functools.lru_cache(maxsize=None)
def _compiled(hysteresis_reset, **options):
    class Shell(DynamicLossScale):
        """Its `hysteresis` is a tensor, so that no rule can be left out."""

        def _backs_off_at_once(self):
            return False

    shell = Shell(hysteresis_reset=hysteresis_reset)

    @functools.partial(tf.function, autograph=False, **options)
    def run(values, state, trace):
        for name in (
            "backoff_factor",
            "max_loss_scale",
            "search_period",
            "backoff_cooldown",
            "overflow_tolerance",
        ):
            setattr(shell, name, None)
        for name, value in values.items():
            setattr(shell, name, value)
        for variable, value in zip(_state(shell), state):
            variable.assign(value)
        seen = tf.TensorArray(tf.float32, STEPS + 1, element_shape=[])

        def step(i, seen):
            shell.adjust(trace[i])
            return i + 1, seen.write(i + 1, shell())

        first = [0, seen.write(0, shell())]
        return tf.while_loop(lambda i, _: i < STEPS, step, first)[1].stack()

    return run


def hold(found, drive, seed):
    """Asserts that the scale of what came back stays finite and positive."""
    found = found.loss_scale if isinstance(found, LossScaleOptimizer) else found
    if isinstance(found, lossscale.LossScaleManager):
        found = found.as_loss_scale()
    if isinstance(found, LossScale):
        seen = np.asarray(drive(found, seed))
        assert len(seen) == STEPS + 1
        assert (np.isfinite(seen) & (seen > 0)).all(), found


def fuzz(target, examples, drive):
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
        hold(found, drive, seed)

    each()
    return tried


@pytest.mark.slow_on_the_newest
@pytest.mark.parametrize("name", TARGETS)
def test_an_object_that_stays_finite_or_an_error_that_names(
    name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tried = fuzz(TARGETS[name], QUICK, drive_compiled)
    assert min(tried["accepted"], tried["refused"]) >= 1
    assert sum(tried.values()) >= QUICK


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_the_same_of_very_many(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = MANY // 10 if name == "simulate" else MANY
    drive = functools.partial(drive_compiled, **COMPILED_BY_XLA)
    tried = fuzz(TARGETS[name], examples, drive)
    assert min(tried["accepted"], tried["refused"]) >= examples // 20
    assert sum(tried.values()) >= examples


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"backoff_factor": 0.5, "hysteresis": 2, "hysteresis_reset": ["good"]},
        {"max_loss_scale": 2.0**16, "increment_period": 3, "multiplier": 4.0},
        {"search_period": 2, "increment_period": 5},
    ],
    ids=str,
)
def test_driven_by_a_function_it_is_the_same(arguments):
    eagerly = drive(DynamicLossScale(**arguments), 1)
    assert list(drive_compiled(DynamicLossScale(**arguments), 1)) == list(eagerly)
