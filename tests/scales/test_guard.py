"""What a guard can do to a step, and every mistake that somebody can make in one."""

from __future__ import annotations

import copy
import inspect
import json

import numpy as np
import pytest
import tensorflow as tf
from guards import GUARDS, MODES, PAGE, Guarded, Judges, large, tiny
from models import built, compiled

import lossscale
from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    Guard,
    HeadroomLossScale,
    LossScale,
    LossScaleEngine,
    SpikeGuard,
)

INF, NAN = float("inf"), float("nan")
THREE = ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow)]
#: The largest gradients of a run: each guard of `GUARDS` leaves some of it out.
RUN = [1.0, 1.0, 1.5, 64.0, 0.0, INF, 1.0, 0.5, 9.0, 9.0, NAN, 0.0, 1.0, 1.0]
SCALES = {
    "dynamic": lambda: DynamicLossScale(64.0, 2, max_loss_scale=2.0**10),
    "headroom": lambda: HeadroomLossScale(64.0, 3, 5.0, increment_period=3),
}
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
@pytest.mark.parametrize("mode", THREE)
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
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("verdict", [tiny, large])
def test_to_the_loss_scale_a_step_that_is_left_out_is_none(
    scale, verdict, mode, mirrored
):
    """It moves as it does alone on the other steps. Only `last_largest` moves."""
    alone = SCALES[scale]()
    alone.keep_largest()
    guarded = Guarded(SCALES[scale], lambda: Judges(verdict), mode, mirrored)
    for largest in (1.0, 0.25, INF, 0.25, 16.0, 0.0, NAN, 1.0):
        is_finite, is_usual = bool(np.isfinite(largest)), bool(verdict(largest)[0])
        assert guarded(largest) == (is_finite and is_usual)
        if not is_finite or is_usual:
            alone.adjust(is_finite, largest)
        else:
            alone.last_largest.assign(max(largest, 2.0**-60 * ("replica" in mode)))
        expected = [v.numpy() for v in (*alone.variables, alone.last_largest)]
        variables = (*guarded.scale.variables, guarded.scale.last_largest)
        for one, other in zip(expected, map(guarded.value, variables)):
            np.testing.assert_array_equal(one, other)
    assert int(guarded.value(guarded.guard.asked)) == 6


# Every guard, in every mode and through every config


@pytest.fixture(params=GUARDS.values(), ids=GUARDS)
def make(request):
    return request.param


@pytest.mark.parametrize(
    "mode",
    [*MODES[1:4], *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[4:])],
)
@pytest.mark.parametrize("scale", SCALES)
def test_every_mode_gives_what_eager_gives(make, scale, mode, mirrored):
    steps = [max(each, 2.0**-60 * ("replica" in mode)) for each in RUN]
    expected = Guarded(SCALES[scale], make).run(steps)
    assert {True, False} == {was_applied for was_applied, _ in expected}
    found = Guarded(SCALES[scale], make, mode, mirrored).run(steps)
    for number, pair in enumerate(zip(found, expected)):
        assert pair[0] == pair[1], number


def test_a_guard_leaves_a_step_of_the_run_out(make):
    steps = [0.0] if make is PAGE.SkipsZeros else RUN
    found = [each for each, _ in Guarded(SCALES["dynamic"], make).run(steps)]
    assert found.count(False) > sum(not np.isfinite(each) for each in steps)


def test_config_copy_and_checkpoint(make, tmp_path):
    used = Guarded(SCALES["dynamic"], make)
    used.run(RUN)
    guard, fresh = used.guard, make()
    config = json.loads(json.dumps(lossscale.serialize(guard)))
    custom = {type(guard).__name__: type(guard)}
    loaded = lossscale.deserialize(config, custom)
    assert type(loaded) is type(guard)
    assert loaded.get_config() == guard.get_config() == fresh.get_config()
    path = tf.train.Checkpoint(guard=guard).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(guard=fresh).read(path).assert_consumed()
    copied = copy.deepcopy(guard)
    for other in (fresh, copied, lossscale.deserialize(config, custom)):
        is_new = other not in (fresh, copied)
        for mine, its, new in zip(guard.variables, other.variables, loaded.variables):
            np.testing.assert_array_equal(
                its.numpy(), (new if is_new else mine).numpy()
            )
    LossScaleEngine("dynamic", guard=copied)  # it belongs to nobody
    made = LossScaleEngine("dynamic", guard=lossscale.serialize(SpikeGuard(window=4)))
    assert made.guard.window == 4
    variable = guard.variables[0]
    name = next(n for n, v in vars(guard).items() if v is variable)
    with pytest.raises(AttributeError, match=rf"Write guard\.{name}\.assign\("):
        setattr(guard, name, variable.numpy())


def test_it_is_traced_once(make):
    guarded = Guarded(SCALES["dynamic"], make, "graph")
    guarded.run(RUN)
    assert guarded.step.experimental_get_tracing_count() == 1


class Lags(LossScale):
    """`lag` becomes what `previous` was."""

    needs_largest = True

    def __init__(self):
        super().__init__(8.0)
        self.previous = self._add_weight("previous", 0.0, tf.float32)
        self.lag = self._add_weight("lag", 0.0, tf.float32)

    def next_state(self, state, is_finite, largest):
        del is_finite
        return {"previous": largest, "lag": state.previous + 0.0}

    def get_config(self):
        return {}


@pytest.mark.parametrize("mode", ["session", "graph"])
def test_all_values_are_read_before_any_is_assigned(mode):
    guarded = Guarded(Lags, lambda: GUARDS["follows"]().__class__(1e9), mode)
    steps = np.arange(1.0, 100.0)
    for before, largest in zip([0.0, *steps], steps):
        assert guarded(largest)
        assert guarded.value(guarded.scale.lag) == before
        assert guarded.value(guarded.guard.older)[0] == before


# Who leaves a step out


def test_simulate_replays_it():
    found = lossscale.simulate(
        DynamicLossScale(8.0),
        guard=Judges(tiny),
        is_finite=[True, False, True, True],
        largest=[1.0, 0.25, 0.25, 1.0],
    )
    assert found.applied.tolist() == [True, False, False, True]
    assert found.spikes.tolist() == [False, False, True, False]


class Updates(DynamicLossScale):
    """Its own `update` leaves more out."""

    def update(self, grads):
        op, should_apply = super().update(grads)
        return op, should_apply & (tf.reduce_min(grads[0]) > -8.0)


@pytest.mark.parametrize("mode", THREE)
@pytest.mark.parametrize("judge", [lambda: Judges(tiny), lambda: None])
def test_what_an_own_update_leaves_out_is_not_the_guards(mode, judge):
    guarded = Guarded(lambda: Updates(8.0), judge, mode)
    steps = (1.0, 16.0, 0.25, INF)
    is_guarded = guarded.guard is not None
    assert [guarded(each) for each in steps] == [True, False, not is_guarded, False]
    assert int(guarded.scale.skipped_steps) == 1
    counts, last = guarded.engine.record.skipped()
    assert counts == [1, 0, 0, int(is_guarded), 1]
    reasons = ["update", "left out", "gradients"]
    assert [why for _, why in last] == reasons[:: 1 if is_guarded else 2]


def test_a_subclass_names_its_steps():
    class Shocks(SpikeGuard):
        left_out_as = "shock"

    guarded = Guarded(lambda: 1, lambda: Shocks(window=2))
    assert [guarded(each) for each in (1.0, 1.0, 99.0)] == [True, True, False]
    assert guarded.engine.last_spike() is None


# Mistakes


def returns(verdict):
    return lambda: Judges(lambda _: verdict)


class Reads(Judges):
    """It reads a variable that it does not have."""

    def judge(self, state, largest):
        return largest < state.highest, {}


class Forgets(Guard):
    """Its constructor does not call that of its base."""

    left_out_as = "mine"

    def __init__(self):
        self.limit = tf.Variable(1.0)

    def judge(self, state, largest):
        return largest < state.limit, {}

    def get_config(self):
        return {}


WANTED = r"`judge` of Judges must return \(should_apply, values\)"
#: What somebody may get wrong in `judge`: a guard, and what the error says.
MISTAKES = {
    "nothing returned": (returns(None), rf"{WANTED}, got None\. Write return"),
    "only the flag": (returns(True), rf"{WANTED}, got True"),
    "a tensor": (returns(tf.constant([True, True])), f"{WANTED}, got"),
    "three": (returns((True, True, {})), rf"{WANTED}, got \(True, True"),
    "no flag": (returns((None, {"asked": 0})), "`should_apply` is a bool.*, got None"),
    "a number": (returns((1.0, {"asked": 0})), "`should_apply` is .* Write a comparis"),
    "a float": (returns((tf.constant(1.0), {})), "`should_apply` is a bool"),
    "two flags": (returns((tf.constant([True, False]), {})), "whose `should_apply` is"),
    "an array": (returns((np.ones([2], bool), {})), "whose `should_apply` is"),
    "no dict": (returns((True, None)), "`values` are a dictionary of .*, got None"),
    "a list": (returns((True, [1])), r"`values` are a dictionary of .*, got \[1\]"),
    "no name": (returns((True, {1: 1})), "`values` are a dictionary .* the key 1"),
    "unknown": (returns((True, {"ask": 1})), "variables .* asked, got 'ask'"),
    "a setting": (returns((True, {"verdict": 1})), "variables .* got 'verdict'"),
    "another dtype": (returns((True, {"asked": 0.5})), "int64 of shape .* got 0.5"),
    "another shape": (returns((True, {"asked": [1]})), "int64 of shape .* got .*1"),
    "no value": (returns((True, {"asked": None})), "for 'asked', got None"),
    "an unknown state": (Reads, "Reads must have the variables .*, got 'highest'"),
    "no base": (Forgets, r"`__init__` of Forgets must call `super\(\).__init__\(\)`"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.every
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_mistake_is_an_error_that_changes_nothing(name, shared, mode):
    make, words = MISTAKES[name]
    scale = HeadroomLossScale(8.0)
    with pytest.raises((TypeError, AttributeError), match=words):
        lossscale.simulate(scale, guard=make(), largest=[1.0])
    if make is Forgets:
        with pytest.raises(AttributeError, match=words):
            LossScaleEngine(scale, guard=make())
        return
    before_it = Guarded(lambda: scale, lambda: None) if shared else None
    guarded = Guarded(lambda: scale, make, mode)
    if shared:
        before_it(0.5)
    before = guarded.state()
    for _ in range(2):
        with pytest.raises((TypeError, AttributeError), match=words):
            guarded(1.0)
        assert guarded.state() == before


@pytest.mark.every
@pytest.mark.parametrize("of", ["flag", "guard", "rule", "rule alone"])
@pytest.mark.parametrize("mode", ["graph", "session"])
def test_a_shape_that_only_the_run_shows_changes_nothing(of, mode):
    def unknown(value, largest, place):
        """Returns a value that is a scalar, of shape `[2]` if the step is large."""
        if place not in of:
            return value
        return tf.fill(tf.fill([tf.cast(largest > 4.0, tf.int32)], 2), value)

    class Wrong(HeadroomLossScale):
        def next_state(self, state, is_finite, largest):
            values = super().next_state(state, is_finite, largest)
            steps = unknown(values["good_steps"], largest, "rule")
            return {**values, "good_steps": steps}

    def judge(largest):
        flag = unknown(largest > 0.0, largest, "flag")
        return flag, {"asked": unknown(tf.constant(7, tf.int64), largest, "guard")}

    guard = (lambda: None) if of == "rule alone" else (lambda: Judges(judge))
    guarded = Guarded(lambda: Wrong(8.0), guard, mode)
    assert guarded(1.0)
    before = guarded.state()
    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError):
            guarded(8.0)
        assert guarded.state() == before


@pytest.mark.parametrize("guarded", [False, True])
def test_an_error_in_the_rule_changes_nothing(guarded):
    class Bad(DynamicLossScale):
        def next_state(self, state, is_finite):
            values = super().next_state(state, is_finite)
            return {**values, "good_steps": 0.5} if self.is_bad else values

    scale = Bad(8.0, 1)
    scale.is_bad = False
    first = Guarded(lambda: scale, lambda: None)
    second = Guarded(lambda: scale, lambda: Judges() if guarded else None)
    first(1.0)
    before, scale.is_bad = second.state(), True
    with pytest.raises(TypeError, match="`next_state` of Bad must return int64"):
        second(1.0)
    assert second.state() == before
    scale.is_bad = False
    second(1.0)  # in the same step as the first: one that raised is none
    assert float(scale) == 16.0


class TestWhatIsNoGuard:
    """What 3.1 took is refused by an error that says what to write."""

    @pytest.mark.parametrize("held", ["dynamic", 1, DynamicLossScale()], ids=str)
    def test_a_guard_holds_no_loss_scale(self, held):
        with pytest.raises(TypeError, match=r"holds no loss scale.*guard=SpikeGuard\("):
            SpikeGuard(held)

    def test_a_guard_is_no_loss_scale(self):
        with pytest.raises(TypeError, match=r'"dynamic", guard=SpikeGuard\(\.\.\.\)'):
            LossScaleEngine(SpikeGuard())
        with pytest.raises(
            TypeError, match=r"`guard` must be.*Pass an object, not its"
        ):
            LossScaleEngine(guard=SpikeGuard)
        config = {
            "threshold": 6.0,
            "loss_scale": lossscale.serialize(FixedLossScale(1)),
        }
        config = {"class_name": "SpikeGuard", "config": config}  # of 3.1
        with pytest.raises(TypeError, match=r"guard=SpikeGuard\("):
            lossscale.get(config)

    @pytest.mark.parametrize("name", ["judge", "_judge", "adjust", "_adjust"])
    def test_a_loss_scale_has_one_hook(self, name):
        words = "next_state" if "adjust" in name else r"lossscale\.Guard.*guard="
        mixin = type("Mixin", (), {name: lambda *_: None})
        for bases in ((LossScale,), (DynamicLossScale,)):
            with pytest.raises(
                TypeError, match=f"own `{name}`.*{words}|`{name}`.*{words}"
            ):
                type("Mine", bases, {name: lambda *_: None})
            with pytest.raises(TypeError, match=f"`{name}`, got one in Mine"):
                type("Mine", (mixin, *bases), {})
        with pytest.raises(TypeError, match=r"must not hold another one.*guard="):
            DynamicLossScale().loss_scale = DynamicLossScale()

    @pytest.mark.parametrize(
        ("judge", "left_out_as", "words"),
        [
            (Judges.judge, "", "`left_out_as` must be a string .*, got '' for Mine"),
            (Judges.judge, 3, "`left_out_as` must be a string .*, got 3 for Mine"),
            (tiny, "x", r"arguments \(self, state, largest\), got \(largest\) for M"),
            (np.histogram2d, "x", r"must take .*, got \(x, y, bins"),
        ],
    )
    def test_a_class_is_checked_where_it_is_made(self, judge, left_out_as, words):
        members = {"judge": judge, "left_out_as": left_out_as}
        if judge is np.histogram2d:
            members["judge"] = lambda x, y, bins, weights: (x, y, bins, weights)
        with pytest.raises(TypeError, match=words):
            type("Mine", (Guard,), members)

    def test_the_base_is_abstract(self):
        assert inspect.isabstract(Guard)


def test_a_number_means_that_steps_are_checked(family):
    optimizer, _ = built(family, 1, guard=SpikeGuard())
    assert optimizer.loss_scale.get_config() == {
        "loss_scale_value": 1.0,
        "skip_nonfinite": True,
    }
    found = lossscale.simulate(1, guard=Judges(tiny), largest=[1.0, 0.25, INF])
    assert found.applied.tolist() == [True, False, False]
    assert lossscale.simulate(1, is_finite=[False]).applied.all()
    scale = FixedLossScale(1)  # an object says what it means
    with pytest.raises(ValueError, match="skip_nonfinite=True"):
        built(family, scale, guard=SpikeGuard())
    with pytest.raises(ValueError, match="skip_nonfinite=True"):
        lossscale.simulate(scale, guard=SpikeGuard(), limit=[1.0])
