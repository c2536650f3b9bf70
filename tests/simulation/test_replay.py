"""simulate: the object's own rule, on a copy, over a run."""

import sys

import numpy as np
import pytest
import tensorflow as tf
from driving import state
from every_loss_scale import CASES
from models import variable_of

import lossscale
from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LossScale,
    simulate,
)


class Drifting(LossScale):
    """A rule of a user's own, with a value of its own and state of every dtype."""

    def __init__(self):
        super().__init__()
        self.value = self._add_weight("value", 64.0, tf.float32)
        self.total = self._add_weight("total", 0.0, tf.float64)

    def __call__(self):
        return tf.convert_to_tensor(self.value)

    def next_state(self, state, is_finite):
        value = tf.where(is_finite, state.value * 1.5, state.value * 0.25)
        return {"value": value, "total": state.total + tf.cast(value, tf.float64)}

    def get_config(self):
        return {}


class Uncompilable(Drifting):
    """A rule that XLA cannot compile."""

    def next_state(self, state, is_finite):
        value = tf.numpy_function(
            lambda value, finite: np.float32(value + finite),
            [state.value, tf.cast(is_finite, tf.float32)],
            tf.float32,
        )
        return {"value": value}  # of a shape that only the run shows


class OwnManager(lossscale.LossScaleManager):
    """A user's own manager, whose state is not an attribute of the loss scale."""

    def __init__(self):
        super().__init__()
        self.state = {"value": tf.Variable(8.0)}

    def get_loss_scale(self):
        return tf.convert_to_tensor(self.state["value"])

    def update_loss_scale(self, finite_grads):
        change = tf.where(finite_grads, 1.0, -2.0)
        return self.state["value"].assign_add(change, read_value=False)


EVERY = {
    **CASES,
    "preset": lambda: DynamicLossScale.from_preset("megatron", increment_period=3),
    "own": Drifting,
    "uncompilable": Uncompilable,
    "own-manager": lambda: lossscale.get(OwnManager()),
}
QUICK = ("dynamic", "headroom")


def flags(seed, steps=60):
    return np.random.default_rng(seed).random(steps) < 0.7


#: What loss scales are told that look at the gradients.
LARGEST = 2.0 ** np.random.default_rng(8).uniform(-12, -2, 60).astype(np.float32)


def by_hand(loss_scale, trace, largest=LARGEST, bad=(), untold=False):
    """Returns what `simulate` should, from stepping the object itself.

    `bad` are steps with a loss that was not finite, of which it may be `untold`.
    """
    scales, finite, applied = [], [], []
    for step, (entry, seen) in enumerate(zip(trace, largest)):
        scales.append(float(loss_scale))
        finite.append(entry if isinstance(entry, np.bool_) else scales[-1] <= entry)
        known = [seen] if loss_scale.needs_largest else []
        if step in bad:
            finite[-1] = False
            if untold and loss_scale.checks_gradients:
                applied.append(False)
                continue
        applied.append(bool(loss_scale.adjust(bool(finite[-1]), *known)[1]))
    return scales, finite, applied, float(loss_scale)


def results(simulation):
    arrays = (simulation.loss_scale, simulation.is_finite, simulation.applied)
    return (*(array.tolist() for array in arrays), simulation.final_loss_scale)


@pytest.mark.parametrize("bad_losses", [None, "backoff", "skip"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow])
        for each in EVERY
    ],
)
def test_it_is_the_objects_own_run_from_its_present_state_and_changes_nothing(
    name, bad_losses
):
    loss_scale, bad, given = EVERY[name](), [], {}
    by_hand(loss_scale, flags(3, steps=20))
    before = state(loss_scale)
    limit = 2.0 ** np.random.default_rng(2).uniform(2, 10, 30)
    if bad_losses:
        bad = [4, 5, 6, 20]
        given["bad_losses"] = np.isin(np.arange(30), bad)
        given["nonfinite_loss"] = bad_losses
    found = results(simulate(loss_scale, limit=limit, **given))
    assert state(loss_scale) == before
    largest = 65504 / limit.astype(np.float32)
    is_untold = bad_losses == "skip"
    assert found == by_hand(loss_scale, limit, largest, bad, untold=is_untold)


@pytest.mark.parametrize("name", QUICK)
def test_flags_with_the_largest_gradients(name):
    trace = np.arange(60) % 9 != 8  # so rarely that the largest gradients decide
    found = simulate(EVERY[name](), is_finite=trace, largest=LARGEST)
    assert results(found) == by_hand(EVERY[name](), trace)


@pytest.mark.parametrize("cls", [DynamicLossScale, HeadroomLossScale])
def test_of_ten_skipped_steps_in_a_row_the_rule_is_told_of_one(cls):
    # As in a step of an optimizer: tests/optimizer/test_blame.py.
    bad = np.arange(25) > 1
    given = {"is_finite": np.ones([25], bool), "largest": np.full([25], 2.0**-8)}
    given["bad_losses"] = bad
    found = simulate(cls(2.0**20), **given, nonfinite_loss="skip")
    changes = np.flatnonzero(np.diff([*found.loss_scale, found.final_loss_scale]) < 0)
    assert changes[changes > 1].tolist() == [11, 21]
    assert found.steps_lost == 23
    assert not found.spikes.any()  # their gradients were not finite
    # Of those that are as far apart as here it is never told.
    given = {"is_finite": np.ones([80], bool), "largest": np.full([80], 2.0**-8)}
    given["bad_losses"] = np.arange(80) % 5 == 4
    found = simulate(cls(2.0**3), **given, nonfinite_loss="skip")
    assert (np.diff([*found.loss_scale, found.final_loss_scale]) >= 0).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
def test_a_step_overflows_above_its_limit_and_not_at_it(dtype):
    limit = np.array([1024, 1023, 512, 511, 512], dtype)
    found = simulate(DynamicLossScale(1024), limit=limit)
    assert found.is_finite.tolist() == [True, False, True, False, True]
    assert found.loss_scale.dtype == np.float32
    assert found.is_finite.dtype == found.applied.dtype == np.bool_
    assert found.loss_scale.shape == found.applied.shape == (5,)


def test_limits_that_float32_does_not_hold():
    # In float32 both limits are 2**24, and neither step would overflow or both would.
    below, above = 2.0**24 - 2.0**-20, 2.0**24 + 2.0**-20
    scale = FixedLossScale(2.0**24, skip_nonfinite=True)
    found = simulate(scale, limit=[below, above])
    assert found.is_finite.tolist() == found.applied.tolist() == [False, True]
    limit = [np.inf, 1e300, -np.inf, 0.0, 1e-300]
    found = simulate(DynamicLossScale(2.0**127), limit=limit)
    assert found.is_finite.tolist() == [True, True, False, False, False]


SKIPPING = FixedLossScale(8, skip_nonfinite=True)


@pytest.mark.parametrize(
    ("scale", "given", "expected"),
    [
        (SKIPPING, {"is_finite": [False] * 2 + [True, False] * 2}, (6, 4, 0, 2, None)),
        (SKIPPING, {"is_finite": [True] * 4}, (4, 0, 0, 0, None)),
        (SKIPPING, {"is_finite": [False] * 4}, (4, 4, 0, 4, None)),
        (FixedLossScale(8), {"is_finite": [True, False, False]}, (3, 0, 2, 0, None)),
        # 1, 2 and 0 below; lost; no limit.
        (SKIPPING, {"limit": [16.0, 32.0, 8.0, 4.0, np.inf]}, (5, 1, 0, 1, 1.0)),
        (SKIPPING, {"limit": [4.0, np.inf]}, (2, 1, 0, 1, None)),
    ],
)
def test_the_summary(scale, given, expected):
    found = simulate(scale, **given)
    names = ("steps", "steps_lost", "overflows_applied", "longest_stall")
    assert found.summary == dict(zip((*names, "log2_below_limit"), expected))
    text = "Simulation(steps=2, steps_lost=1, longest_stall=1)"
    assert repr(simulate(SKIPPING, is_finite=[False, True])) == text


def test_loss_scales_in_use_are_as_they_were(family, mirrored):
    with mirrored.scope():
        loss_scale = DynamicLossScale(64, 2)
    found = simulate(loss_scale, is_finite=flags(6))
    kept = DynamicLossScale(64, 2)
    kept.keep_largest()  # which it does not need here
    assert results(found) == results(simulate(kept, is_finite=flags(6)))
    assert results(found) == by_hand(DynamicLossScale(64, 2), flags(6))
    assert float(loss_scale) == 64.0
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD(0.1), "torch")
    optimizer.get_scaled_loss(tf.constant(1.0))
    optimizer.apply_gradients([(tf.constant(np.inf), variable_of(family, 1.0))])
    found = simulate(optimizer.loss_scale, is_finite=[False, True])
    assert found.loss_scale.tolist() == [2.0**15, 2.0**14]
    assert float(optimizer.loss_scale) == 2.0**15


ONE = {"is_finite": [True]}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, TypeError, "`is_finite` or `limit`.*neither"),
        ({"is_finite": [True], "limit": [1.0]}, TypeError, "got both"),
        ({"is_finite": []}, ValueError, "`is_finite` must hold at least one step"),
        ({"is_finite": True}, ValueError, "`is_finite` must have one entry per step"),
        ({"is_finite": [1, 0]}, TypeError, "`is_finite` must hold booleans.*int"),
        ({"is_finite": [1.0, np.nan]}, TypeError, "`is_finite` must hold booleans"),
        ({"limit": []}, ValueError, "`limit` must hold at least one step"),
        ({"limit": [[1.0]]}, ValueError, "`limit` must have one entry per step"),
        ({"limit": [1.0, np.nan]}, ValueError, "`limit` must hold no NaN, got 1"),
        ({"limit": ["high"]}, TypeError, "`limit` must hold numbers"),
        ({"limit": [True]}, TypeError, "`limit` must hold numbers, got dtype bool"),
        ({"limit": [1j]}, TypeError, "`limit` must hold numbers"),
        ({"limit": np.ones([2], "m8[s]")}, TypeError, "`limit` must hold numbers"),
        ({"limit": [[1.0], 2.0]}, TypeError, "`limit` must"),
        ({**ONE, "bad_losses": [True] * 2}, ValueError, r"`bad_losses` .* shape \[1\]"),
        ({**ONE, "bad_losses": [1]}, TypeError, "`bad_losses` must hold booleans"),
        ({**ONE, "nonfinite_loss": "no"}, ValueError, "one of 'backoff', 'skip', got"),
        ({**ONE, "largest": [1.0, 2.0]}, ValueError, r"shape \[1\], got shape \[2\]"),
        ({"limit": [1.0], "largest": [1.0, 2.0]}, ValueError, r"\[1\], got shape \[2"),
    ],
)
@pytest.mark.parametrize("cls", [DynamicLossScale, HeadroomLossScale])
def test_bad_arguments(cls, arguments, error, words):
    with pytest.raises(error, match=words):
        simulate(cls(), **arguments)


@pytest.mark.parametrize(
    "make", [lambda: "dynamic", lambda: None, OwnManager, lambda: DynamicLossScale]
)
def test_bad_loss_scales(make):
    words = r"`loss_scale` must be a LossScale or a number, got.*a name or a manager"
    with pytest.raises(TypeError, match=words):
        simulate(make(), is_finite=[True])


def test_a_graph_and_a_strategy_are_refused(mirrored):
    inside = tf.function(lambda: simulate(DynamicLossScale(), **ONE))
    with pytest.raises(RuntimeError, match="must be called eagerly"):
        inside()
    words = r"outside strategy\.scope"
    with mirrored.scope(), pytest.raises(RuntimeError, match=words):
        simulate(DynamicLossScale(), **ONE)


def test_the_picture_shows_the_run():
    pytest.importorskip("matplotlib").use("Agg")
    limit = np.repeat([2.0**14, 2.0**12], 50)
    found = simulate(DynamicLossScale(2.0**13, 20), limit=limit)
    ax = found.plot()
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert lines["limit"].get_ydata().tolist() == limit.tolist()
    marked = lines[f"{found.steps_lost} steps lost"].get_xdata().tolist()
    assert marked == np.flatnonzero(~found.applied).tolist()
    x, y = lines["loss scale"].get_data()
    # Read back as steps, the line is the array.
    drawn = y[np.searchsorted(x, np.arange(100), side="right") - 1]
    assert drawn.tolist() == found.loss_scale.tolist()


def test_without_matplotlib_only_the_plot_fails(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # an import of it fails
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    found = simulate(FixedLossScale(8), is_finite=[True])
    with pytest.raises(ImportError, match=r"needs matplotlib.*pip install matplotlib"):
        found.plot()
