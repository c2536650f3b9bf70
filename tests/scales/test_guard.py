"""A step that a guard judges: what it can do, and malformed verdicts."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from guards import Guarded, Judges, large, tiny
from models import built, compiled

import lossscale
from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LossScale,
    SpikeGuard,
)

INF, NAN = float("inf"), float("nan")
MODES = ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow)]
#: Verdicts that say "apply" of an overflow, each as somebody may write it.
APPLY = {
    "not zero": lambda largest: (largest > 0.0, {}),
    "always": lambda _: (True, {}),
    "numpy": lambda _: (np.bool_(True), {}),
    "one element": lambda _: (tf.constant([True]), {}),
}


@pytest.mark.smoke
@pytest.mark.parametrize("verdict", APPLY.values(), ids=APPLY)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_is_not_finite_is_never_applied(family, verdict, mode, shared):
    scale, guard = DynamicLossScale(8.0), Judges(verdict)
    optimizer, variable = built(family, scale, guard=guard)
    if shared:
        _other = built(family, scale)

    def step(grad):
        scaled = optimizer.scale_loss(tf.constant(1.0))
        optimizer.apply_gradients([(grad * scaled, variable)])

    step = compiled(step, mode)
    for value in (1.0, INF, NAN):
        step(tf.constant([value, 0.0]))
    np.testing.assert_array_equal(np.array(variable), [0.0, 2.0])
    assert int(scale.skipped_steps.numpy()) == 2
    assert int(guard.asked.numpy()) == 1  # it is asked of finite steps only


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [DynamicLossScale, HeadroomLossScale])
@pytest.mark.parametrize("verdict", [tiny, large])
def test_to_the_loss_scale_a_step_that_is_left_out_is_none(scale, verdict, mode):
    """It moves as it does alone on the other steps."""
    alone, guard = scale(64.0), Judges(verdict)
    guarded = Guarded(scale(64.0), guard, mode)
    for largest in (1.0, 0.25, INF, 0.25, 16.0, 0.0, NAN, 1.0):
        is_finite, is_usual = bool(np.isfinite(largest)), bool(verdict(largest)[0])
        assert guarded(largest) == (is_finite and is_usual)
        if not is_finite or is_usual:
            alone.adjust(is_finite, largest)
        left, right = alone.variables, guarded.engine.loss_scale.variables
        for one, other in zip(left, right):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert int(guard.asked.numpy()) == 6


def test_simulate_replays_it():
    found = lossscale.simulate(
        DynamicLossScale(8.0),
        guard=Judges(tiny),
        is_finite=[True, False, True, True],
        largest=[1.0, 0.25, 0.25, 1.0],
    )
    assert found.applied.tolist() == [True, False, False, True]
    assert found.spikes.tolist() == [False, False, True, False]
    with pytest.raises(ValueError, match="skip_nonfinite=True"):
        lossscale.simulate(FixedLossScale(8.0), guard=SpikeGuard(), limit=[1.0])


def test_a_loss_scale_with_its_own_update_may_leave_out_more():
    class Updates(DynamicLossScale):
        def update(self, grads):
            op, should_apply = super().update(grads)
            return op, should_apply & (tf.reduce_min(grads[0]) > -8.0)

    guarded = Guarded(Updates(8.0), Judges(tiny))
    assert [guarded(each) for each in (1.0, 16.0, 0.25, INF)] == [True, *[False] * 3]
    assert int(guarded.engine.loss_scale.skipped_steps) == 1


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (None, r"\(should_apply, values\), got None\. Write return"),
        (True, r"\(should_apply, values\), got True"),
        ((True, True, {}), r"\(should_apply, values\), got \(True, True"),
        ((None, {"asked": 0}), "whose `should_apply` is a bool.*, got None"),
        ((1.0, {"asked": 0}), "whose `should_apply` is a bool.*, got 1.0. Write a com"),
        ((tf.constant([True, False]), {}), "whose `should_apply` is"),
        ((np.ones([2], bool), {}), "whose `should_apply` is"),
        ((tf.constant(1.0), {}), "whose `should_apply` is a bool"),
        ((True, None), "whose `values` are a dictionary of .*, got None"),
        ((True, {1: 1}), "whose `values` are a dictionary .* the key 1"),
        ((True, {"asked": 0.5}), "int64 of shape .* got 0.5"),
        ((True, {"asked": [1]}), "int64 of shape .* got .*1"),
    ],
    ids=str,
)
@pytest.mark.every
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_malformed_verdict_is_refused_and_changes_nothing(verdict, words, mode):
    guarded = Guarded(DynamicLossScale(8.0, 1), Judges(lambda _: verdict), mode)
    before = guarded.state()
    with pytest.raises(TypeError, match=f"`judge` of Judges must .*{words}"):
        guarded(1.0)
    assert guarded.state() == before
    with pytest.raises(TypeError, match="`judge` of Judges must"):
        lossscale.simulate(
            DynamicLossScale(8.0),
            guard=guarded.engine.guard,
            largest=[1.0],
        )


def test_a_shape_that_only_the_run_shows_changes_nothing():
    guard = Judges()
    guarded = Guarded(DynamicLossScale(8.0, 1), guard)
    before = guarded.state()

    @tf.function(input_signature=[tf.TensorSpec(None, tf.bool)])
    def step(flag):
        guard.verdict = lambda _: (flag, {})
        guarded.step(tf.constant(1.0))

    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.constant([True, False]))
    assert guarded.state() == before
    step(tf.constant([True]))
    assert int(guard.asked) == 1


def test_an_error_in_the_rule_changes_nothing_of_the_guard():
    class Bad(DynamicLossScale):
        def next_state(self, state, is_finite):
            del state, is_finite
            return {"good_steps": 0.5}

    guarded = Guarded(Bad(8.0), Judges())
    before = guarded.state()
    with pytest.raises(TypeError, match="`next_state` of Bad must return int64"):
        guarded(1.0)
    assert guarded.state() == before


class TestWhatIsNoGuard:
    """What 3.1 took is refused by an error that says what to write."""

    @pytest.mark.parametrize("held", ["dynamic", 1, DynamicLossScale()], ids=str)
    def test_a_guard_holds_no_loss_scale(self, held):
        with pytest.raises(TypeError, match=r"holds no loss scale.*guard=SpikeGuard\("):
            SpikeGuard(held)

    def test_a_guard_is_no_loss_scale(self):
        with pytest.raises(TypeError, match=r'"dynamic", guard=SpikeGuard\(\.\.\.\)'):
            lossscale.LossScaleEngine(SpikeGuard())
        config = {
            "threshold": 6.0,
            "loss_scale": lossscale.serialize(FixedLossScale(1)),
        }
        config = {"class_name": "SpikeGuard", "config": config}  # of 3.1
        with pytest.raises(TypeError, match=r"guard=SpikeGuard\("):
            lossscale.get(config)

    def test_a_loss_scale_judges_nothing_and_holds_none(self):
        with pytest.raises(TypeError, match=r"lossscale\.Guard.*guard=Mine"):
            type("Mine", (LossScale,), {"judge": lambda *_: None})
        with pytest.raises(TypeError, match="`next_state"):
            type("Mine", (DynamicLossScale,), {"adjust": lambda *_: None})
        with pytest.raises(TypeError, match=r"must not hold another one.*Guard"):
            DynamicLossScale().loss_scale = DynamicLossScale()

    def test_a_class_says_what_it_leaves_out(self):
        with pytest.raises(TypeError, match="`left_out_as` must say"):
            type("Mine", (lossscale.Guard,), {"judge": lambda *_: None})

    def test_it_needs_a_loss_scale_that_checks_gradients(self, family):
        with pytest.raises(ValueError, match=r"skip_nonfinite=True"):
            built(family, 1, guard=SpikeGuard())
        built(family, FixedLossScale(1, skip_nonfinite=True), guard=SpikeGuard())
