"""States of other systems: read, written, and gone on with.

The originals themselves are met in `test_originals.py`; here are the rules of those
that cannot be installed or run on a CPU, written again from their sources.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
from driving import run

from lossscale import DynamicLossScale, FixedLossScale, export_state, import_state
from lossscale.scales.interchange import STATE_FORMATS

STEPS = 16


class Megatron:
    """megatron-core 0.16.1, `optimizer/grad_scaler.py`, in plain Python."""

    def __init__(self, rng):
        self.period, self.hysteresis = (int(n) for n in rng.integers(1, 5, 2))
        self.floor = float(2.0 ** rng.integers(0, 9))
        self.state = {"scale": 1024.0, "growth_tracker": 0}
        self.state["hysteresis_tracker"] = self.hysteresis
        self.arguments = {
            "increment_period": self.period,
            "hysteresis": self.hysteresis,
            "min_loss_scale": self.floor,
        }

    def step(self, is_finite):
        state = self.state
        if is_finite:
            state["growth_tracker"] += 1
            if state["growth_tracker"] == self.period:
                state["growth_tracker"] = 0
                state["hysteresis_tracker"] = self.hysteresis
                state["scale"] *= 2.0
        else:
            state["growth_tracker"] = 0
            state["hysteresis_tracker"] -= 1
            if state["hysteresis_tracker"] <= 0:
                state["scale"] = max(state["scale"] * 0.5, self.floor)
        return state["scale"]


class Nemo:
    """NeMo 2.2.1, `lightning/_strategy_lib.py`, in plain Python."""

    def __init__(self, rng):
        period, self.hysteresis = (int(n) for n in rng.integers(1, 5, 2))
        self.state = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5}
        self.state.update(growth_interval=period, _growth_tracker=0)
        self.state["_hysteresis_tracker"] = self.hysteresis
        self.arguments = {"hysteresis": self.hysteresis}

    def step(self, is_finite):
        state = self.state
        if is_finite:
            state["_hysteresis_tracker"] = self.hysteresis
            state["_growth_tracker"] += 1
            if state["_growth_tracker"] == state["growth_interval"]:
                state["_growth_tracker"] = 0
                state["scale"] *= state["growth_factor"]
        else:
            state["_growth_tracker"] = 0
            state["_hysteresis_tracker"] -= 1
            if state["_hysteresis_tracker"] <= 0:
                state["scale"] *= state["backoff_factor"]
        return state["scale"]


class Apex:
    """apex at b82c6bd, `amp/scaler.py`, in plain Python."""

    def __init__(self, rng):
        # So near to the growth that some runs reach it.
        inner = {"loss_scale": 2.0**22, "unskipped": 1999 - int(rng.integers(STEPS))}
        self.state = {"loss_scaler0": inner}
        self.arguments = {}

    def step(self, is_finite):
        state = self.state["loss_scaler0"]
        if is_finite:
            state["unskipped"] += 1
        else:
            state["loss_scale"] = state["loss_scale"] / 2.0
            state["unskipped"] = 0
        if state["unskipped"] == 2000:
            state["loss_scale"] = min(2.0**24, state["loss_scale"] * 2.0)
            state["unskipped"] = 0
        return state["loss_scale"]


def flags_of(rng):
    return (rng.random(STEPS) < rng.uniform(0.2, 0.95)).tolist()


@pytest.mark.parametrize("original", [Megatron, Nemo, Apex])
def test_a_run_goes_on_here_and_goes_back(original):
    rng, system = np.random.default_rng(21), original.__name__.lower()
    for _ in range(100):
        theirs, flags = original(rng), flags_of(rng)
        cut, back = np.sort(rng.integers(0, STEPS + 1, 2))
        for flag in flags[:cut]:
            theirs.step(flag)
        saved = json.loads(json.dumps(theirs.state))
        ours = import_state(system, saved, **theirs.arguments)
        expected = [theirs.step(flag) for flag in flags[cut:back]]
        assert run(ours, flags[cut:back]) == expected
        assert export_state(system, ours) == theirs.state


#: What each system can do, in our arguments.
RUNS = {
    "tensorflow": {"increment_period": 2, "multiplier": 4.0},
    "tf_keras": {"increment_period": 3},
    "keras3": {"increment_period": 3},
    "torch": {"increment_period": 3, "multiplier": 4.0, "backoff_factor": 0.25},
    "megatron": {
        "increment_period": 2,
        "multiplier": 4.0,
        "hysteresis": 3,
        "hysteresis_reset": ("growth",),
        "min_loss_scale": 4.0,
    },
    "nemo": {
        "increment_period": 3,
        "multiplier": 4.0,
        "backoff_factor": 0.25,
        "hysteresis": 3,
        "hysteresis_reset": ("good",),
    },
    "apex": {"increment_period": 2000, "max_loss_scale": 2.0**12},
    "paddle": {
        "increment_period": 2,
        "hysteresis": 2,
        "hysteresis_reset": ("good", "backoff"),
        "backoff_factor": 0.25,
    },
}


#: What neither the state nor the preset has.
ASKED = {"nemo": {"hysteresis": 2}}


def as_preset(system):
    """Returns a loss scale that `system` can go on with."""
    preset, asked = STATE_FORMATS[system].preset, ASKED.get(system, {})
    return DynamicLossScale.from_preset(preset, **asked)


def begin(system):
    given = {"initial_loss_scale": 1024, **RUNS[system]}
    loss_scale = DynamicLossScale.from_preset(STATE_FORMATS[system].preset, **given)
    # apex grows after 2000 steps: begin near to them.
    loss_scale.good_steps.assign(1995 if system == "apex" else 0)
    return loss_scale


@pytest.mark.parametrize("system", STATE_FORMATS)
def test_a_run_cut_anywhere_is_the_uncut_run(system):
    rng = np.random.default_rng(22)
    for _ in range(5):
        flags, at = flags_of(rng), int(rng.integers(0, STEPS + 1))
        expected = run(begin(system), flags)
        cut = begin(system)
        seen = run(cut, flags[:at])
        state = export_state(system, cut)
        again = import_state(system, state, **RUNS[system])
        assert export_state(system, again) == state
        assert seen + run(again, flags[at:]) == expected, (flags, at)


@pytest.mark.parametrize("system", STATE_FORMATS)
def test_a_state_has_the_systems_keys_and_plain_values(system):
    state = export_state(system, begin(system))
    config = import_state(system, state, **RUNS[system]).get_config()
    for argument, value in RUNS[system].items():
        assert config[argument] == (list(value) if isinstance(value, tuple) else value)
    inner = state["loss_scaler0"] if system == "apex" else state
    assert set(inner) == {*STATE_FORMATS[system].keys, *STATE_FORMATS[system].constants}
    for key, value in inner.items():
        assert type(value) in (int, float, bool) or (system, key) == ("paddle", "scale")


TORCH = {
    "scale": 8.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 100,
    "_growth_tracker": 7,
}


def test_overrides_win():
    loss_scale = import_state(
        "torch", TORCH, increment_period=9, initial_loss_scale=64.0, hysteresis=2
    )
    assert float(loss_scale) == 8.0
    assert (loss_scale.multiplier, loss_scale.backoff_factor) == (4.0, 0.25)
    assert loss_scale.increment_period == 9
    assert loss_scale.initial_loss_scale == 64.0
    assert loss_scale.hysteresis == 2
    assert loss_scale.good_steps.numpy() == 7


def test_nemos_hysteresis_is_asked_for():
    state = export_state("nemo", as_preset("nemo"))
    with pytest.raises(TypeError, match=r"`hysteresis` must be given") as raised:
        import_state("nemo", state)
    assert "Write import_state('nemo', state, hysteresis=...)." in str(raised.value)


def test_a_search_that_is_over_can_go_on_elsewhere():
    loss_scale = DynamicLossScale.from_preset("torch", search_period=1)
    message = "must have search_period=None to continue in 'torch'"
    with pytest.raises(ValueError, match=message):
        export_state("torch", loss_scale)
    run(loss_scale, [True, False, True])
    state = export_state("torch", loss_scale)
    assert (state["scale"], state["_growth_tracker"]) == (2.0**16, 1)


class Tensorlike:
    """One entry, as a torch tensor on any device gives it."""

    def __init__(self, value):
        self.value = value

    def item(self):
        return self.value


@pytest.mark.parametrize(
    "wrap",
    [
        np.float32,
        lambda value: np.array([value]),
        np.array,
        tf.constant,
        lambda value: tf.constant([value]),
        tf.Variable,
        Tensorlike,
    ],
    ids=["numpy", "array1", "array0", "tensor", "tensor1", "variable", "torch"],
)
def test_numbers_of_any_make(wrap):
    state = {"scale": 8.0, "growth_tracker": 7, "hysteresis_tracker": 1}
    found = import_state("megatron", {key: wrap(n) for key, n in state.items()})
    assert export_state("megatron", found) == state


def test_a_mirrored_state(mirrored):
    with mirrored.scope():
        loss_scale = import_state("torch", TORCH)
    assert export_state("torch", loss_scale) == TORCH


#: Inner states of apex: one is not whole, the other is above its ceiling.
LOW, HIGH = {"loss_scale": 8.0}, {"loss_scale": 2.0**25, "unskipped": 0}


@pytest.mark.parametrize(
    ("system", "change", "error", "words"),
    [
        ("torch", {"scale": None}, TypeError, "`state['scale']` must be a number"),
        ("torch", {"scale": [8.0]}, TypeError, "`state['scale']` must be a number"),
        ("torch", {"scale": np.ones(2)}, TypeError, "`state['scale']` must be one n"),
        ("torch", {"scale": 0.0}, ValueError, "`state['scale']` must be positive"),
        ("torch", {"growth_factor": 1.0}, ValueError, "`state['growth_factor']` must"),
        ("torch", {"backoff_factor": 2}, ValueError, "`state['backoff_factor']` must"),
        ("torch", {"growth_interval": 0}, ValueError, "`state['growth_interval']` mus"),
        ("torch", {"_growth_tracker": -1}, ValueError, "at least 0, got -1"),
        ("torch", {"_growth_tracker": 0.5}, ValueError, "`state['_growth_tracker']` m"),
        ("torch", {"extra": 1}, ValueError, "unknown ['extra']"),
        ("megatron", {"hysteresis_tracker": 3}, ValueError, "the hysteresis, 2, got 3"),
        ("megatron", {"scale": 0.5}, ValueError, "`state['scale']` must be at least"),
        ("apex", {"loss_scaler1": {}}, ValueError, "unknown ['loss_scaler1']"),
        ("apex", {"loss_scaler0": 8.0}, TypeError, "`state['loss_scaler0']` must be a"),
        ("apex", {"loss_scaler0": LOW}, ValueError, "missing are ['unskipped']"),
        ("apex", {"loss_scaler0": HIGH}, ValueError, "`max_loss_scale` must be at l"),
        ("paddle", {"decr_count": -1}, ValueError, "`state['decr_count']` must be"),
        ("keras3", {"step_counter": "3"}, TypeError, "`state['step_counter']` must"),
    ],
)
def test_bad_states_are_refused_by_the_keys_name(system, change, error, words):
    state = {**export_state(system, as_preset(system)), **change}
    with pytest.raises(error) as raised:
        import_state(system, state, **ASKED.get(system, {}))
    assert words in str(raised.value)


def test_what_is_no_system_no_state_and_no_loss_scale():
    for name in ("mxnet", None, ["torch"], {}, np.zeros([2])):
        for call in (import_state, export_state):
            with pytest.raises(ValueError, match=r"`system` must be one of.*'torch'"):
                call(name, DynamicLossScale())
    for state in (None, 8.0, [("scale", 8.0)], b"pickle"):
        with pytest.raises(TypeError, match="`state` must be a dict with the keys"):
            import_state("torch", state)
    for value in (FixedLossScale(8), 8, None):
        with pytest.raises(TypeError, match="`loss_scale` must be a DynamicLossScale"):
            export_state("torch", value)


@pytest.mark.parametrize("hysteresis", [2**63 - 1, 1])
def test_counters_at_the_end_of_what_int64_holds(hysteresis):
    state = {"scale": 8.0, "growth_tracker": 2**62, "hysteresis_tracker": -(2**62)}
    found = import_state("megatron", state, hysteresis=hysteresis, increment_period=9)
    assert run(found, [True]) == [16.0]  # no counter has wrapped around
    for key in ("growth_tracker", "hysteresis_tracker"):
        with pytest.raises(ValueError, match=f"`state..{key}..` must be"):
            import_state("megatron", {**state, key: state[key] * 4})


@pytest.mark.parametrize("system", STATE_FORMATS)
def test_every_key_is_needed(system):
    state = export_state(system, as_preset(system))
    asked = ASKED.get(system, {})
    for key in state:
        short = {other: value for other, value in state.items() if other != key}
        with pytest.raises(ValueError, match=rf"missing are \['{key}'\]"):
            import_state(system, short, **asked)
    with pytest.raises(ValueError, match="missing are"):
        import_state(system, {}, **asked)  # what a scaler that is turned off saves


TIMES_4 = {"multiplier": 4.0}
CONSECUTIVE = {"hysteresis": 2, "hysteresis_reset": ("good",)}


@pytest.mark.parametrize(
    ("system", "arguments", "words"),
    [
        ("torch", {"hysteresis": 2}, "hysteresis=1"),
        ("torch", {"max_loss_scale": 2.0**20}, "max_loss_scale=None"),
        ("keras3", TIMES_4, "multiplier=2.0"),
        ("keras3", {"backoff_factor": 0.25}, "backoff_factor=0.5"),
        ("tf_keras", {"hysteresis": 3}, "hysteresis=1"),
        ("tensorflow", {"backoff_factor": 0.25}, "backoff_factor=0.5"),
        ("tensorflow", {**TIMES_4, "backoff_factor": 0.5}, "backoff_factor=0.25"),
        ("apex", {"increment_period": 100}, "increment_period=2000"),
        ("megatron", CONSECUTIVE, "hysteresis_reset=('growth',)"),
        ("paddle", {"hysteresis": 2}, "hysteresis_reset=('good', 'backoff')"),
    ],
)
def test_what_a_system_cannot_do_is_refused(system, arguments, words):
    with pytest.raises(ValueError, match="`loss_scale` must have") as raised:
        export_state(system, DynamicLossScale(**arguments))
    assert f"must have {words} to continue in '{system}'" in str(raised.value)


def test_paddles_scale_is_an_array_and_its_flag_may_be_numpys():
    state = export_state("paddle", as_preset("paddle"))
    assert (state["scale"].shape, state["scale"].dtype) == ((1,), np.float32)
    key = "use_dynamic_loss_scaling"
    assert import_state("paddle", {**state, key: np.True_}) == 2.0**16
    for wrong in (np.False_, False, 1, "True"):
        with pytest.raises(ValueError, match=rf"`state\['{key}'\]` must be True, got"):
            import_state("paddle", {**state, key: wrong})
