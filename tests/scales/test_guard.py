"""What a guard can do to a step, and every mistake that somebody can make in one."""

import copy
import inspect
import json
from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf
from guards import GUARDS, Judges, tiny
from models import assert_same, built, compiled

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
#: The largest gradients of a run: each guard of `GUARDS` leaves some of it out.
RUN = [1.0, 1.0, 1.5, 64.0, 0.0, INF, 1.0, 0.5, 9.0, 9.0, NAN, 0.0, 1.0, 1.0]
SCALES = {
    "dynamic": lambda: DynamicLossScale(64.0, 2, max_loss_scale=2.0**10),
    "headroom": lambda: HeadroomLossScale(64.0, 3, 5.0, increment_period=3),
}
#: A guard is in every mode, and on replicas, in test_loops_in_every_mode.py.
in_graphs = pytest.mark.parametrize("mode", ["graph", "session"])


class Guarded:
    """An engine of one variable, and its steps."""

    def __init__(self, make_scale, make_guard, mode="eager"):
        self.session, graph = None, nullcontext()
        if mode == "session":
            self.session = tf.compat.v1.Session(graph=tf.Graph())
            graph = self.session.graph.as_default()
        with graph:
            self.engine = LossScaleEngine(make_scale(), guard=make_guard())
            self.guard, self.scale = self.engine.guard, self.engine.loss_scale
            self.variable = tf.Variable([0.0, 0.0])
            if self.session is None:
                self.engine.build([self.variable])  # or a function is traced twice
                self.step = compiled(lambda size: self._step(size) and None, mode)
            else:
                self.fed = tf.compat.v1.placeholder(tf.float32, [])
                self.op = self._step(self.fed)
                self.session.run(tf.compat.v1.global_variables_initializer())

    def _step(self, largest):
        scaled = self.engine.scale_loss(tf.constant(1.0))
        grad = tf.stack([scaled, -largest * scaled])
        grad = tf.where([True, False], 0.0, grad)  # no inf times 0
        add = lambda grads, v: v[0].assign_add(grads[0], read_value=False)  # noqa: E731
        return self.engine.apply([grad], [self.variable], add)

    def value(self, variable):
        return np.array(self.session.run(variable) if self.session else variable)

    def __call__(self, largest):
        """Takes a step. Returns whether it was applied."""
        before = int(self.value(self.engine.applied_steps))
        if self.session is not None:
            self.session.run(self.op, {self.fed: largest})
        else:
            self.step(tf.constant(largest, tf.float32))
        return int(self.value(self.engine.applied_steps)) > before

    def state(self):
        last = [] if self.scale.last_largest is None else [self.scale.last_largest]
        every = [*self.engine._state_variables(), *last, self.variable]
        return [self.value(variable).tolist() for variable in every]

    def run(self, steps):
        """Returns, of each step, whether it was applied and the state after it."""
        return [(self(largest), self.state()) for largest in steps]


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
@pytest.mark.parametrize("mode", ["eager", "graph"])
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


@pytest.fixture(params=GUARDS.values(), ids=GUARDS)
def make(request):
    return request.param


@in_graphs
@pytest.mark.parametrize("scale", SCALES)
def test_a_graph_gives_what_eager_mode_gives(make, scale, mode):
    expected = Guarded(SCALES[scale], make).run(RUN)
    left_out = [each for each, _ in expected].count(False)
    assert left_out > sum(not np.isfinite(each) for each in RUN)
    guarded = Guarded(SCALES[scale], make, mode)
    for number, pair in enumerate(zip(guarded.run(RUN), expected)):
        assert pair[0] == pair[1], number
    assert mode == "session" or guarded.step.experimental_get_tracing_count() == 1


def test_config_and_checkpoint(make, tmp_path):
    used = Guarded(SCALES["dynamic"], make)
    used.run(RUN)
    guard, fresh = used.guard, make()
    config = json.loads(json.dumps(lossscale.serialize(guard)))
    loaded = lossscale.deserialize(config, {type(guard).__name__: type(guard)})
    assert type(loaded) is type(guard)
    assert loaded.get_config() == guard.get_config() == fresh.get_config()
    assert_same(loaded.variables, fresh.variables)  # never the state
    path = tf.train.Checkpoint(guard=guard).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(guard=fresh).read(path).assert_consumed()
    assert_same(fresh.variables, guard.variables)
    LossScaleEngine("dynamic", guard=copy.deepcopy(guard))  # it belongs to nobody
    made = LossScaleEngine("dynamic", guard=lossscale.serialize(SpikeGuard(window=4)))
    assert made.guard.window == 4
    variable = guard.variables[0]
    name = next(n for n, v in vars(guard).items() if v is variable)
    with pytest.raises(AttributeError, match=rf"Write guard\.{name}\.assign\("):
        setattr(guard, name, variable.numpy())


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


@in_graphs
def test_all_values_are_read_before_any_is_assigned(mode):
    guarded = Guarded(Lags, lambda: GUARDS["follows"]().__class__(1e9), mode)
    steps = np.arange(1.0, 100.0)
    for before, largest in zip([0.0, *steps], steps):
        assert guarded(largest)
        assert guarded.value(guarded.scale.lag) == before
        assert guarded.value(guarded.guard.older)[0] == before


# Who leaves a step out


class Updates(DynamicLossScale):
    """Its own `update` leaves more out."""

    def update(self, grads):
        op, should_apply = super().update(grads)
        return op, should_apply & (tf.reduce_min(grads[0]) > -8.0)


@pytest.mark.parametrize("judge", [lambda: Judges(tiny), lambda: None])
def test_what_an_own_update_leaves_out_is_not_the_guards(judge):
    guarded = Guarded(lambda: Updates(8.0), judge, "graph")
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
@in_graphs
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


def refused(words, call, *args, **kwargs):
    with pytest.raises(TypeError, match=words):
        call(*args, **kwargs)


def test_what_is_no_guard_is_refused_with_what_to_write():
    """Guards held loss scales in 3.1, and were loss scales."""
    for held in ("dynamic", 1, DynamicLossScale()):
        refused(r"holds no loss scale.*guard=SpikeGuard\(", SpikeGuard, held)
    refused(r'"dynamic", guard=SpikeGuard\(\.\.\.\)', LossScaleEngine, SpikeGuard())
    refused("`guard` must.*Pass an object, not its", LossScaleEngine, guard=SpikeGuard)
    config = {"threshold": 6.0, "loss_scale": lossscale.serialize(FixedLossScale(1))}
    config = {"class_name": "SpikeGuard", "config": config}
    refused(r"guard=SpikeGuard\(", lossscale.get, config)
    one, other = DynamicLossScale(), DynamicLossScale()
    refused("must not hold another one.*guard=", setattr, one, "loss_scale", other)


@pytest.mark.parametrize("name", ["judge", "_judge", "adjust", "_adjust"])
def test_a_loss_scale_has_one_hook(name):
    words = "next_state" if "adjust" in name else r"lossscale\.Guard.*guard="
    members = {name: lambda *_: None}
    mixin = type("Mixin", (), members)
    for base in (LossScale, DynamicLossScale):
        refused(f"`{name}`.*{words}", type, "Mine", (base,), members)
        refused(f"`{name}`, got one in Mine", type, "Mine", (mixin, base), {})


@pytest.mark.parametrize(
    ("judge", "left_out_as", "words"),
    [
        (Judges.judge, "", "`left_out_as` must be a string .*, got '' for Mine"),
        (Judges.judge, 3, "`left_out_as` must be a string .*, got 3 for Mine"),
        (tiny, "x", r"arguments \(self, state, largest\), got \(largest\) for M"),
        (lambda x, y, *, z: x + y + z, "x", r"must take .*, got \(x, y, \*, z"),
    ],
)
def test_a_guards_class_is_checked_where_it_is_made(judge, left_out_as, words):
    members = {"judge": judge, "left_out_as": left_out_as}
    refused(words, type, "Mine", (Guard,), members)
    assert inspect.isabstract(Guard)


def test_a_number_means_that_steps_are_checked(family):
    optimizer, _ = built(family, 1, guard=SpikeGuard())
    assert optimizer.loss_scale.get_config() == {
        "loss_scale_value": 1.0,
        "skip_nonfinite": True,
    }
    found = lossscale.simulate(1, guard=Judges(tiny), largest=[1.0, 0.25, INF])
    assert found.applied.tolist() == [True, False, False]
    assert found.spikes.tolist() == [False, True, False]
    assert lossscale.simulate(1, is_finite=[False]).applied.all()
    scale = FixedLossScale(1)  # an object says what it means
    with pytest.raises(ValueError, match="skip_nonfinite=True"):
        built(family, scale, guard=SpikeGuard())
    with pytest.raises(ValueError, match="skip_nonfinite=True"):
        lossscale.simulate(scale, guard=SpikeGuard(), limit=[1.0])
