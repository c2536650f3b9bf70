"""A step that several loss scales judge: the law of a chain, and malformed verdicts."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from driving import drive, state
from models import built, compiled

import lossscale
from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LossScale,
    LossScaleOptimizer,
    SpikeGuard,
    Verdict,
)

INF, NAN = float("inf"), float("nan")
EAGER_GRAPH_XLA = ["eager", "graph", "xla"]
XLA_LATER = ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow)]


class Holds(LossScale):
    """Holds another loss scale, and has nothing of its own."""

    def __init__(self, held):
        super().__init__()
        self.loss_scale = lossscale.get(held)

    def get_config(self):
        return {"held": lossscale.serialize(self.loss_scale)}


class Judges(Holds):
    """Its verdict is what a function returns."""

    left_out_as = "mine"

    def __init__(self, held, verdict, needs_largest=True):
        self.needs_largest = needs_largest
        super().__init__(held)
        self.verdict = verdict
        self.asked = self._add_weight("asked", 0, tf.int64)

    def judge(self, state, is_finite, largest):
        del state
        return self.verdict(is_finite, largest)


class Counts(Judges):
    """Counts its steps by a rule of its own."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.steps = self._add_weight("steps", 0, tf.int64)

    def next_state(self, state, is_finite, largest):
        del is_finite, largest
        return {"steps": state.steps + 1}


def tiny(_, largest):
    """Leaves small steps out, and keeps them from the rule."""
    return Verdict(largest >= 0.5, largest >= 0.5)


def large(_, largest):
    """Leaves large steps out, of which the rule learns."""
    return Verdict(largest < 8.0)


#: Verdicts that say "apply" of an overflow, each as somebody may write it.
APPLY = {
    "not zero": lambda _, largest: Verdict(largest > 0.0),
    "always": lambda *_: Verdict(True),
    "numpy": lambda *_: Verdict(np.bool_(True)),
    "or": lambda is_finite, largest: Verdict(is_finite | (largest > 0.0)),
    "tensor": lambda *_: Verdict(tf.constant(True)),
    "one element": lambda *_: Verdict(tf.constant([True])),
}


class TestAVerdictCanOnlyLeaveAStepOut:
    """Whatever it says, a step that is not finite is not applied."""

    @pytest.mark.smoke
    @pytest.mark.parametrize("verdict", APPLY.values(), ids=APPLY)
    @pytest.mark.parametrize("mode", [*EAGER_GRAPH_XLA, "v1", "replica-graph"])
    def test_update(self, verdict, mode, mirrored):
        def make():
            return Judges(DynamicLossScale(8.0), verdict)

        scales, applied = drive(make, [True, False, True], mode, mirrored)
        assert applied == [True, False, True]
        assert scales == [8.0, 4.0, 4.0]

    @pytest.mark.parametrize("verdict", APPLY.values(), ids=APPLY)
    @pytest.mark.parametrize("mode", EAGER_GRAPH_XLA)
    def test_adjust(self, verdict, mode):
        loss_scale = Judges(DynamicLossScale(8.0), verdict)
        step = compiled(lambda flag: loss_scale.adjust(flag, 1.0)[1], mode)
        found = [bool(step(tf.constant(flag))) for flag in (True, False, True)]
        assert found == [True, False, True]
        assert int(loss_scale.skipped_steps) == 1

    @pytest.mark.parametrize("verdict", APPLY.values(), ids=APPLY)
    def test_simulate(self, verdict):
        loss_scale = Judges(DynamicLossScale(8.0), verdict)
        found = lossscale.simulate(
            loss_scale, is_finite=[True, False], largest=[1.0, 2.0]
        )
        assert found.applied.tolist() == [True, False]

    @pytest.mark.parametrize("verdict", APPLY.values(), ids=APPLY)
    @pytest.mark.parametrize("mode", EAGER_GRAPH_XLA)
    @pytest.mark.parametrize("shared", [False, True])
    def test_an_optimizer(self, family, verdict, mode, shared):
        loss_scale = Judges(DynamicLossScale(8.0), verdict)
        optimizer, variable = built(family, loss_scale)
        if shared:
            _other = built(family, loss_scale)

        def step(grad):
            scale = optimizer.scale_loss(tf.constant(1.0))
            optimizer.apply_gradients([(grad * scale, variable)])

        step = compiled(step, mode)
        for value in (1.0, INF, NAN):
            step(tf.constant([value, 0.0]))
        np.testing.assert_array_equal(np.array(variable), [0.0, 2.0])
        assert int(loss_scale.skipped_steps.numpy()) == 2

    def test_one_that_overrides_update_or_adjust(self, family):
        class Updates(LossScale):
            def __call__(self):
                return tf.constant(8.0)

            def update(self, grads):
                del grads
                return None, True

            def get_config(self):
                return {}

        class Adjusts(DynamicLossScale):
            def adjust(self, is_finite, largest=None):
                return super().adjust(is_finite, largest)[0], True

        for loss_scale in (Updates(), Adjusts(8.0)):
            optimizer, variable = built(family, loss_scale)
            for value in (INF, 1.0):
                scale = optimizer.scale_loss(tf.constant(1.0))
                grad = tf.constant([value, 0.0]) * scale
                optimizer.apply_gradients([(grad, variable)])
            np.testing.assert_array_equal(np.array(variable), [0.0, 2.0])

    def test_one_that_looks_at_no_gradients_applies_all(self):
        """That is what a `FixedLossScale` documents."""
        assert FixedLossScale(8).update([tf.constant(NAN)])[1] is True
        held = Judges(FixedLossScale(8), lambda *_: Verdict(True))
        assert not bool(held.update([tf.constant(NAN)])[1])
        held.checks_gradients = False
        assert held.update([tf.constant(NAN)])[1] is True


class NotAVerdict:
    """Anything else."""

    def __repr__(self):
        return "mine"


class TestAMalformedVerdict:
    """It is a TypeError that says what to return, and nothing has changed."""

    @pytest.mark.smoke
    @pytest.mark.parametrize(
        ("verdict", "words"),
        [
            (None, r"a Verdict, got None\. Write lossscale\.Verdict\("),
            (True, "a Verdict, got True"),
            ((True, True, {}), r"a Verdict, got \(True, True"),
            (NotAVerdict(), "a Verdict, got mine"),
            (Verdict(None), "whose `should_apply` is a bool.*, got None"),
            (Verdict(1.0), "whose `should_apply` is a bool.*, got 1.0. Write a comp"),
            (Verdict("yes"), "whose `should_apply` is a bool.*, got 'yes'"),
            (Verdict(NotAVerdict()), "whose `should_apply` is a bool.*, got mine"),
            (Verdict(tf.constant([True, False])), "whose `should_apply` is"),
            (Verdict(np.ones([2], bool)), "whose `should_apply` is"),
            (Verdict(tf.zeros([0], tf.bool)), "whose `should_apply` is"),
            (Verdict(tf.constant(1.0)), "whose `should_apply` is a bool"),
            (Verdict(True, None), "whose `is_told` is a bool.*, got None"),
            (Verdict(True, 1), "whose `is_told` is a bool.*, got 1"),
            (Verdict(True, tf.constant([True, True])), "whose `is_told` is"),
            (Verdict(True, True, None), "whose `kept` is a dictionary of .*, got None"),
            (Verdict(True, True, [1]), r"whose `kept` is a dictionary of .*, got \[1"),
            (Verdict(True, True, {1: 1}), "whose `kept` is a dictionary .* the key 1"),
            (Verdict(True, True, {"asked": 0.5}), "int64 of shape .* got 0.5"),
            (Verdict(True, True, {"asked": None}), "int64 of shape .* got None"),
            (Verdict(True, True, {"asked": [1]}), "int64 of shape .* got .*1"),
        ],
        ids=str,
    )
    @pytest.mark.every
    @pytest.mark.parametrize(("mode", "depth"), [("eager", 1), ("graph", 0)])
    def test_it_is_refused(self, verdict, words, mode, depth):
        loss_scale = Judges(DynamicLossScale(8.0, 1), lambda *_: verdict)
        for _ in range(depth):
            loss_scale = SpikeGuard(loss_scale)
        before = state(loss_scale)
        step = compiled(lambda flag: loss_scale.adjust(flag, 1.0)[1], mode)
        for flag in (True, False):
            with pytest.raises(TypeError, match=f"`judge` of Judges must .*{words}"):
                step(tf.constant(flag))
            assert state(loss_scale) == before

    def test_a_session_refuses_it(self):
        with tf.Graph().as_default():
            loss_scale = Judges(DynamicLossScale(8.0), lambda *_: None)
            with pytest.raises(TypeError, match="`judge` of Judges must return a Ver"):
                loss_scale.adjust(tf.constant(True), 1.0)

    @pytest.mark.parametrize("method", ["update", "simulate", "apply"])
    def test_every_way_refuses_it(self, family, method):
        loss_scale = Judges(DynamicLossScale(8.0), lambda *_: Verdict(0.5))
        optimizer, variable = built(family, loss_scale)
        before = state(loss_scale)
        grad = optimizer.scale_loss(tf.constant(1.0)) * tf.ones([2])
        call = {
            "update": lambda: loss_scale.update([tf.ones([2])]),
            "simulate": lambda: lossscale.simulate(
                loss_scale, is_finite=[True], largest=[1.0]
            ),
            "apply": lambda: optimizer.apply_gradients([(grad, variable)]),
        }[method]
        with pytest.raises(TypeError, match="`judge` of Judges must return a Verdict"):
            call()
        assert state(loss_scale) == before
        np.testing.assert_array_equal(np.array(variable), [1.0, 2.0])

    @pytest.mark.parametrize("field", ["should_apply", "is_told"])
    def test_a_shape_that_only_the_run_shows_changes_nothing(self, field):
        flags = {"should_apply": tf.constant(True), "is_told": tf.constant(True)}

        @tf.function(input_signature=[tf.TensorSpec(None, tf.bool)])
        def step(flag):
            loss_scale.verdict = lambda *_: Verdict(**{**flags, field: flag})
            return loss_scale.adjust(tf.constant(True), 1.0)[1]

        loss_scale = Judges(DynamicLossScale(8.0, 1), None)
        before = state(loss_scale)
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(tf.constant([True, False]))
        assert state(loss_scale) == before
        assert bool(step(tf.constant([True])))

    def test_an_error_in_the_rule_of_the_held_one_changes_nothing(self):
        class Bad(DynamicLossScale):
            def next_state(self, state, is_finite):
                del state, is_finite
                return {"good_steps": 0.5}

        loss_scale = Counts(Bad(8.0), lambda *_: Verdict(True))
        before = state(loss_scale)
        with pytest.raises(TypeError, match="`next_state` of Bad must return int64"):
            loss_scale.adjust(True, 1.0)
        assert state(loss_scale) == before


def follow(loss_scale, largest, mode):
    """Returns which of the steps are applied."""
    step = compiled(lambda size: loss_scale.adjust(size < INF, size)[1], mode)
    return [bool(step(tf.constant(size))) for size in largest]


@pytest.mark.parametrize("mode", XLA_LATER)
class TestAChain:
    """Every loss scale of a chain can leave a step out, and keep it from all rules."""

    def test_a_judge_around_a_guard(self, mode):
        inner = DynamicLossScale(8.0)
        guard = SpikeGuard(inner, window=2)
        outer = Judges(guard, lambda is_finite, _: Verdict(is_finite))
        found = follow(outer, [1.0, 1.0, 1.0, 1000.0, 1.0], mode)
        assert found == [True, True, True, False, True]
        assert (int(guard.spikes), int(inner.good_steps)) == (1, 4)

    @pytest.mark.smoke
    def test_a_guard_around_a_judge(self, mode):
        inner = DynamicLossScale(8.0)
        judge = Judges(inner, tiny)
        guard = SpikeGuard(judge, window=2)
        found = follow(guard, [1.0, 1.0, 0.1, 1000.0, 1.0, INF], mode)
        assert found == [True, True, False, False, True, False]
        assert (int(guard.spikes), int(inner.good_steps), float(inner)) == (1, 0, 4.0)
        # What is kept from the rules is kept from that of the guard, too.
        np.testing.assert_array_equal(guard.recent, [1.0, 1.0])

    def test_all_rules_learn_of_a_step_or_none(self, mode):
        innermost = DynamicLossScale(8.0)
        inner = Counts(innermost, tiny)
        middle = Holds(inner)
        outer = Counts(middle, large)
        # Applied; left out, and told; kept from the rules.
        found = follow(outer, [1.0, 9.0, 0.25], mode)
        assert found == [True, False, False]
        assert [int(each.steps) for each in (outer, inner)] == [2, 2]
        assert int(innermost.good_steps) == 2

    def test_the_held_one_is_not_asked_to_keep_what_is_kept_from_it(self, mode):
        guard = SpikeGuard(1, window=2)
        outer = Judges(guard, lambda _, largest: Verdict(True, largest < 8.0))
        found = follow(outer, [1.0, 1.0, 1.0, 5.0, 1000.0], mode)
        # The guard leaves both out, and counts the one that reaches it.
        assert found == [True, True, True, False, False]
        assert (int(guard.spikes), int(guard.above_in_a_row)) == (1, 1)

    def test_each_counts_what_reaches_it(self, mode):
        inner = DynamicLossScale(8.0)
        middle = Judges(inner, lambda is_finite, _: Verdict(is_finite, is_finite))
        outer = Holds(middle)
        follow(outer, [1.0, INF, INF, 1.0], mode)
        counts = [int(each.skipped_steps) for each in (outer, middle, inner)]
        assert counts == [2, 2, 0]
        assert (float(inner), int(inner.good_steps)) == (8.0, 2)

    def test_any_depth_has_the_innermost_value(self, mode):
        loss_scale = inner = DynamicLossScale(8.0, 1)
        for _ in range(4):
            loss_scale = Holds(loss_scale)
        assert follow(loss_scale, [1.0, INF, 1.0], mode) == [True, False, True]
        assert float(loss_scale) == float(inner) == 16.0
        assert int(inner.skipped_steps) == int(loss_scale.skipped_steps) == 1

    def test_the_chain_ends_at_one_that_looks_at_no_gradients(self, mode):
        loss_scale = SpikeGuard(Holds(FixedLossScale(8)), window=2)
        assert follow(loss_scale, [1.0, INF], mode) == [True, False]
        assert int(loss_scale.loss_scale.loss_scale.skipped_steps) == 0

    def test_one_of_2_x_that_passes_the_step_on_itself(self, mode):
        class OfTwo(Holds):
            needs_largest = True

            def _adjust(self, is_finite, largest):
                return self.loss_scale.adjust(is_finite, largest)[0]

        inner = DynamicLossScale(8.0)
        guard = SpikeGuard(inner, window=2)
        outer = Holds(OfTwo(guard))
        found = follow(outer, [1.0, 1.0, 1.0, 1000.0, INF], mode)
        assert found == [True, True, True, False, False]
        assert (int(guard.spikes), int(guard.skipped_steps), float(inner)) == (1, 1, 4)

    def test_one_that_overrides_adjust(self, mode):
        class Adjusts(DynamicLossScale):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                self.calls = self._add_weight("calls", 0, tf.int64)

            def adjust(self, is_finite, largest=None):
                with tf.control_dependencies([self.calls.assign_add(1)]):
                    return super().adjust(is_finite, largest)

        inner = Adjusts(8.0)
        assert follow(Judges(inner, tiny), [1.0, 0.25, INF], mode) == [True, False, 0]
        assert (int(inner.calls), float(inner)) == (2, 4.0)


class TestWhatAHolderHas:
    """What the held one needs, its holder has."""

    @pytest.mark.smoke
    @pytest.mark.parametrize("order", ["after", "before"])
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize(
        "make",
        [
            lambda: HeadroomLossScale(8.0),
            lambda: SpikeGuard(DynamicLossScale(8.0), window=2),
            lambda: Counts(DynamicLossScale(8.0), large),
        ],
    )
    def test_the_largest_gradient(self, make, depth, order):
        class Before(Holds):
            def __init__(self, held):
                self.loss_scale = held
                LossScale.__init__(self)

        loss_scale = bare = make()
        for _ in range(depth):
            loss_scale = (Before if order == "before" else Holds)(loss_scale)
        same = make()
        for grad in ([1.0], [2.0], [NAN], [1000.0]):
            found = loss_scale.update([tf.constant(grad)])[1]
            assert bool(found) == bool(same.update([tf.constant(grad)])[1])
        assert state(bare) == state(same)
        assert loss_scale.needs_largest
        assert lossscale.simulate(loss_scale, limit=[1e9, 1e9]).applied.all()

    def test_a_rule_of_its_own_need_not_take_the_largest(self):
        class Own(Holds):
            def next_state(self, state, is_finite):
                del state, is_finite
                return {}

        loss_scale = Own(HeadroomLossScale(8.0))
        assert bool(loss_scale.update([tf.ones([2])])[1])

    def test_an_optimizer_takes_it(self, family):
        held = HeadroomLossScale(8.0)
        optimizer, variable = built(family, Holds(held))
        scale = optimizer.scale_loss(tf.constant(1.0))
        optimizer.apply_gradients([(tf.ones([2]) * scale, variable)])
        np.testing.assert_array_equal(np.array(variable), [0.0, 1.0])
        assert held.peak.numpy() == 1.0

    @pytest.mark.parametrize("holder", [Holds, SpikeGuard])
    @pytest.mark.parametrize("depth", [0, 1])
    def test_one_that_overrides_update_cannot_be_held(self, holder, depth):
        class OfGradients(Holds):
            def update(self, grads):
                return self.loss_scale.update(grads)

        held = OfGradients(8.0)  # which passes the gradients on itself
        held = OfGradients(held) if depth else held
        assert bool(held.update([tf.ones([2])])[1])
        with pytest.raises(
            TypeError, match="`loss_scale` must work with `adjust`, got"
        ):
            holder(held)

    def test_why_steps_are_left_out(self, family):
        guard = SpikeGuard(Judges(1, tiny), window=2)
        loss_scale = Holds(guard)
        assert loss_scale.left_out_as == guard.left_out_as == "spike or mine"
        optimizer, variable = built(family, loss_scale)
        for size in (1.0, 1.0, 0.25, 64.0, 0.125):
            scale = optimizer.scale_loss(tf.constant(1.0))
            grad = tf.constant([size, 0.0]) * scale
            optimizer.apply_gradients([(grad, variable)])
        _, last = optimizer.engine.record.skipped()
        assert [why for _, why in last] == ["left out"] * 3
        assert optimizer.last_spike().largest == 64.0  # not 0.125
        assert isinstance(optimizer, LossScaleOptimizer)
        np.testing.assert_array_equal(np.array(variable), [-1.0, 2.0])

    def test_whether_it_can_change(self, family):
        for held, expected in ((FixedLossScale(8, True), False), (8.0, False)):
            optimizer, _ = built(family, Holds(Holds(held)))
            assert optimizer.dynamic is expected
        optimizer, _ = built(family, Holds(Holds(DynamicLossScale())))
        assert optimizer.dynamic is True
        assert optimizer.initial_scale == 2.0**15
