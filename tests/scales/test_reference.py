"""The rule once more in plain Python, against the real one over random runs."""

from itertools import combinations

import numpy as np
import pytest
from driving import drive, run
from hypothesis import given, settings
from hypothesis import strategies as st

from lossscale import DynamicLossScale


def reference(config, flags):
    """Returns the scale after each step, from the rule as it is written down."""
    scale, good, bad, seen = config["initial_loss_scale"], 0, 0, []
    search, period = config.get("search_period"), config["increment_period"]
    multiplier = float(np.float32(config["multiplier"]))
    cooldown, cooled = config.get("backoff_cooldown") or 0, 0  # the first step that may
    tolerance, steps, overflows = config.get("overflow_tolerance") or 0.0, 0, 0
    for done, is_finite in enumerate(flags):
        if search is not None:
            searches = all(flags[:done])
            period = search if searches else config["increment_period"]
        steps += 1
        if is_finite:
            good += 1
            bad = 0 if "good" in config["hysteresis_reset"] else bad
            if good >= period:
                good = steps = 0
                bad = 0 if "growth" in config["hysteresis_reset"] else bad
                grown = scale * multiplier  # in float64, and rounded once
                if config["max_loss_scale"] is not None:
                    scale = float(np.float32(min(grown, config["max_loss_scale"])))
                elif grown < 2.0**128 - 2.0**103:  # it is rounded down
                    scale = float(np.float32(grown))
        else:
            good = 0
            bad += 1
            overflows += 1
            is_tolerated = overflows / steps < tolerance
            if bad >= config["hysteresis"] and done >= cooled and not is_tolerated:
                steps = overflows = 0
                cooled = done + 1 + cooldown
                factor = config["backoff_factor"]
                fallen = scale * factor if factor else scale / multiplier
                scale = max(float(np.float32(fallen)), config["min_loss_scale"])
                bad = 0 if "backoff" in config["hysteresis_reset"] else bad
        seen.append(scale)
    return seen


MAX, TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
RESETS = ["good", "growth", "backoff"]
RATES = [0.2, 0.5, 0.8, 0.95]
SUBSETS = [list(chosen) for n in range(4) for chosen in combinations(RESETS, n)]


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
        "hysteresis_reset": draw(st.sampled_from(SUBSETS)),
        "min_loss_scale": 2.0**floor,
        "max_loss_scale": None if ceiling is None else 2.0**ceiling,
        "search_period": draw(st.one_of(st.none(), st.integers(1, 5))),
        "backoff_cooldown": draw(st.one_of(st.none(), st.integers(1, 6))),
        "overflow_tolerance": draw(st.sampled_from([None, 0.0, 0.05, 0.3, 0.5, 1])),
    }


@st.composite
def runs(draw):
    """Returns a run of flags: lists of drawn booleans are too short and too even."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    is_finite = rng.random(draw(st.integers(0, 60))) < draw(st.sampled_from(RATES))
    return is_finite.tolist()


#: Each argument by itself, and all of them.
ARGUMENTS = {
    "increment_period": 3,
    "multiplier": 4.0,
    "backoff_factor": 0.25,
    "hysteresis": 2,
    "hysteresis_reset": ["good"],
    "min_loss_scale": 64.0,
    "max_loss_scale": 2.0**9,
    "search_period": 1,
    "backoff_cooldown": 2,
    "overflow_tolerance": 0.3,
}
FLAGS = [letter == "T" for letter in "TTTFFFTFTTFTTTTTTTFTFFFFFFFFFFFTTTT"]


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["none", *ARGUMENTS, "all"])
def test_each_argument_as_the_reference(name):
    given = {n: v for n, v in ARGUMENTS.items() if name in (n, "all")}
    config = {**DynamicLossScale(2.0**8, 2).get_config(), **given}
    assert run(DynamicLossScale(**config), FLAGS) == reference(config, FLAGS)


@pytest.mark.parametrize("ceiling", [None, 123456.789, MAX])
@pytest.mark.parametrize("multiplier", [2.0**127, 3.0, 1.5, 2.0**0.001])
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_all_modes_round_as_the_reference(mode, multiplier, ceiling):
    bounds = {"min_loss_scale": TINY, "max_loss_scale": ceiling}
    scale = DynamicLossScale(np.float32(1.1), 1, multiplier, **bounds)
    flags = [letter == "T" for letter in "T" * 90 + "F" * 170 + "T" * 20]
    found, _ = drive(lambda: scale, flags, mode)
    assert found == reference(scale.get_config(), flags)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(config=configs(), flags=runs())
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
