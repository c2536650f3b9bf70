"""An optimizer with a guard: what files, copies and configs hold of it."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf
from exact import heard
from guards import PAGE, Judges, large
from limits import skip_without
from models import assert_same, built, compiled, data, regression
from routes import ROUTES, there
from strategies import scope_of
from version_1 import running

import lossscale
from lossscale import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScaleEngine,
    LossScaleOptimizer,
    SpikeGuard,
)
from lossscale.compat import v1
from lossscale.runtime import keras_versions

INF = float("inf")


def model_of(family):
    inner, scale = family.optimizers.Adam(0.05), DynamicLossScale(64.0)
    optimizer = LossScaleOptimizer(inner, scale, guard=SpikeGuard(window=4))
    model = regression(family, optimizer)
    optimizer.build(model.trainable_variables)
    optimizer.iterations  # noqa: B018 - Keras 2 makes it when it is asked for
    return model


def fill(optimizer):
    """Gives each variable a value that no other one has, if it can."""
    for number, variable in enumerate(optimizer.engine._state_variables(), 3):
        end = number + variable.shape.num_elements()
        value = np.arange(number, end) % (2 if variable.dtype == tf.bool else 99)
        variable.assign(tf.cast(tf.reshape(value, variable.shape), variable.dtype))


def state(optimizer):
    return [variable.numpy() for variable in optimizer.engine._state_variables()]


@pytest.mark.every
@pytest.mark.parametrize("on", ["one", pytest.param("two", marks=pytest.mark.slow)])
@pytest.mark.parametrize("route", ROUTES)
def test_a_route_to_disk_keeps_a_guard_whole(family, route, on, mirrored, tmp_path):
    if on == "two" and route == "SavedModel" and family.name != "keras3":
        pytest.skip("Keras 2 loads weights into no model that was loaded in a scope")
    with scope_of(mirrored if on == "two" else None):
        model, fresh = model_of(family), model_of(family)
        fill(model.optimizer)
        used = there(family, route)
        used.write(model, tmp_path / "model")
        loaded = used.read(family, tmp_path / "model", fresh)
        if getattr(loaded.optimizer, "built", None) is False:
            loaded.optimizer.build(loaded.trainable_variables)
        assert isinstance(loaded.optimizer.guard, SpikeGuard)
        assert loaded.optimizer.guard.window == 4
        assert_same(*map(state, (loaded.optimizer, model.optimizer)))


def test_an_engines_checkpoint_has_the_key_guard(tmp_path):
    def made():
        return lossscale.LossScaleEngine("dynamic", guard=SpikeGuard(window=4))

    engine, other = made(), made()
    engine.guard.spikes.assign(7)
    path = tf.train.Checkpoint(engine=engine).write(str(tmp_path / "checkpoint"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert "engine/guard/spikes/.ATTRIBUTES/VARIABLE_VALUE" in names
    assert not any("largest" in name or "greatest" in name for name in names)
    tf.train.Checkpoint(engine=other).read(path).assert_consumed()
    assert int(other.guard.spikes) == 7


# Each optimizer has its own


def test_a_copy_has_one_of_its_own_in_the_same_state(family):
    skip_without("copying", family)
    optimizer, _ = built(family, DynamicLossScale(64.0), guard=SpikeGuard(window=4))
    fill(optimizer)
    copied = copy.deepcopy(optimizer)
    assert copied.guard is not optimizer.guard
    assert_same(state(copied), state(optimizer))


def test_a_guard_belongs_to_one_optimizer(family):
    guard = SpikeGuard(window=4)
    optimizer, _ = built(family, "dynamic", guard=guard)
    words = r"`guard` must be a guard that no other optimizer has.*from_config\("
    for make in (
        lambda: built(family, "dynamic", guard=guard),
        lambda: lossscale.LossScaleEngine(guard=guard),
        lambda: built(family, 8.0)[0].with_loss_scale("dynamic", guard=guard),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    lossscale.simulate(1, guard=guard, largest=[1.0])  # which takes a copy
    following = optimizer.with_loss_scale("dynamic")
    assert following.guard is guard
    with pytest.raises(ValueError, match=words):
        built(family, "dynamic", guard=guard)
    with pytest.raises(TypeError, match="`loss_scale` must"):
        following.with_loss_scale(object)
    with pytest.raises(ValueError, match="two called 'guard_spikes'"):
        following.with_loss_scale(Clashing())
    with pytest.raises(ValueError, match=words):
        built(family, "dynamic", guard=guard)
    other = following.with_loss_scale("dynamic", guard=None)
    assert other.guard is None
    last, _ = built(family, "dynamic", guard=guard)  # nobody else has it now
    del last, _
    gc.collect()
    LossScaleEngine(guard=guard)


class Clashing(DynamicLossScale):
    """It has a variable of the name that one of a SpikeGuard has in files."""

    def __init__(self):
        super().__init__()
        self.other = self._add_weight("guard_spikes", 0, tf.int64)


def added(grads, variables):
    return variables[0].assign_add(grads[0], read_value=False)


#: The sizes of three optimizers' gradients. Guards leave out those of 8 and more.
RUN_OF_THREE = [
    [1.0, 0.5, 0.25],
    [9.0, 0.5, 0.25],
    [1.0, 99.0, 0.5],
    [99.0, 99.0, 0.125],
    [np.inf, 99.0, 0.5],
    [99.0, 1.0, np.inf],
    [0.5, 0.25, 2.0],
]


@pytest.mark.parametrize("mode", ["eager", "graph", "session"])
@pytest.mark.parametrize("rule", [DynamicLossScale, HeadroomLossScale])
@pytest.mark.parametrize("are_guarded", [[True], [True, True, False]], ids=len)
def test_a_loss_scale_learns_only_of_what_is_not_left_out(mode, rule, are_guarded):
    """As one that is adjusted by hand. Several optimizers share it."""
    alone, expected = rule(64.0), []
    alone.keep_largest()
    for sizes in RUN_OF_THREE:
        pairs = list(zip(sizes, are_guarded))
        learned = [s for s, has_guard in pairs if not (has_guard and 8.0 <= s < INF)]
        if learned:
            alone.adjust(bool(np.isfinite(learned).all()), max(learned))
        else:  # only this one moves
            alone.last_largest.assign(sizes[0])
        expected.append([v.numpy() for v in (*alone.variables, alone.last_largest)])
    with running("session" if mode == "session" else "eager") as run:
        scale = rule(64.0)
        guards = [Judges(large) if has_guard else None for has_guard in are_guarded]
        engines = [LossScaleEngine(scale, guard=guard) for guard in guards]
        variables = [tf.Variable(0.0) for _ in engines]

        def step(number):
            sizes = tf.unstack(tf.gather(RUN_OF_THREE, tf.cast(number, tf.int32)))
            done = []
            for engine, variable, size in zip(engines, variables, sizes):
                scaled = engine.scale_loss(tf.constant(1.0)) * size
                done.append(engine.apply([scaled], [variable], added))
            return tf.group(*done) if mode == "session" else None

        taken = run.step(step) if mode == "session" else compiled(step, mode)
        for number, values in enumerate(expected):
            taken(float(number) if mode == "session" else tf.constant(float(number)))
            found = [run.value(v) for v in (*scale.variables, scale.last_largest)]
            assert found == values
        assert run.value(guards[0].asked) == 6  # not of what overflowed


def test_the_last_apply_of_a_shared_step_may_be_left_out():
    scale = DynamicLossScale(64.0)
    engines = [
        LossScaleEngine(scale, guard=guard) for guard in (None, Judges(large), None)
    ]
    variable, seen = tf.Variable(0.0), []
    for engine, size in zip(engines, (0.5, 99.0, 0.25)):
        scaled = engine.scale_loss(tf.constant(1.0)) * size
        engine.apply([scaled], [variable], lambda g, v: v[0].assign_add(g[0]))
        seen.append(float(scale.last_largest))
    assert seen == [0.5, 99.0, 0.5]  # then again the greatest that the rule gets
    assert (float(variable), int(scale.good_steps)) == (0.75, 1)


# What a step uses


@pytest.mark.every
@pytest.mark.parametrize("how", ["guard", "headroom", "shared"])
def test_a_step_can_be_exported(family, how, tmp_path):
    scale = HeadroomLossScale(64.0) if how == "headroom" else DynamicLossScale(64.0)
    guard = None if how == "headroom" else Judges(large)
    pairs = [built(family, scale, [0.0], guard=guard)]
    if how == "shared":
        pairs.append(built(family, scale, [0.0]))
    module = tf.Module()
    module.optimizers = [optimizer for optimizer, _ in pairs]
    module.weights = [keras_versions.tensor_of(variable) for _, variable in pairs]

    @tf.function(input_signature=[tf.TensorSpec([])])
    def train(size):
        for optimizer, variable in pairs:
            grad = optimizer.scale_loss(tf.constant([1.0])) * size
            optimizer.apply_gradients([(grad, variable)])
        return tf.identity(module.weights[0])

    module.train = train
    train(tf.constant(1.0))
    tf.saved_model.save(module, str(tmp_path / "saved"))
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    assert loaded.train(tf.constant(1.0)).numpy() == [-2.0]
    assert loaded.train(tf.constant(16.0)).numpy() == [-18.0 if guard is None else -2.0]
    assert loaded.train(tf.constant(np.inf)).numpy() == [
        -18.0 if guard is None else -2.0
    ]


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_kept_is_mirrored(family, mirrored, inside):
    with mirrored.scope():
        optimizer, _ = built(family, DynamicLossScale(64.0))
    with mirrored.scope() if inside else nullcontext():
        optimizer.loss_scale.keep_largest()
    for variable in optimizer.loss_scale._kept().values():
        copies = mirrored.experimental_local_results(variable)
        assert len(copies) == mirrored.num_replicas_in_sync


def test_the_monitor_says_what_a_guard_calls_the_steps(family, capsys):
    inner, guard = family.optimizers.SGD(2.0**-8), PAGE.SkipsZeros()
    optimizer = LossScaleOptimizer(inner, DynamicLossScale(64.0), guard=guard)
    model = regression(family, optimizer)
    x, y = data(np.random.default_rng(7), 32)
    weights = np.ones([32])
    weights[8:12] = 0.0  # the third of eight batches weighs nothing
    quiet = {"shuffle": False, "verbose": 0}
    with heard() as messages:
        monitor = lossscale.LossScaleMonitor()
        model.fit(x, y, 4, sample_weight=weights, callbacks=[monitor], **quiet)
    message = "Epoch 1: Steps were skipped as all zero, at batch 2, counted from 0."
    assert messages == [message]
    assert "Steps left out as all zero: 1." in capsys.readouterr().out


# Programs of TensorFlow 1


@pytest.mark.parametrize(
    "wrapper", ["LossScaleOptimizer", "MixedPrecisionLossScaleOptimizer"]
)
@pytest.mark.parametrize("mode", ["session", "eager"])
def test_one_of_tensorflow_1_takes_a_guard(wrapper, mode, tmp_path):
    with running(mode) as run:
        inner = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        optimizer = getattr(v1, wrapper)(inner, 8.0, guard=Judges(large))
        variable = tf.Variable(0.0)

        def build(size):
            return optimizer.minimize(lambda: variable * size, var_list=[variable])

        step = run.step(build)
        for size in (1.0, 16.0, INF):
            step(size)
        guard, skipped = optimizer.variables()[-1], optimizer.loss_scale.skipped_steps
        assert [run.value(each) for each in (variable, guard, skipped)] == [-1.0, 2, 1]
    if mode == "eager":
        path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "file"))
        names = [name for name, _ in tf.train.list_variables(path)]
        assert any("optimizer/guard/asked" in name for name in names)
