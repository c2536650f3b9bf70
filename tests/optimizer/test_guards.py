"""An optimizer with a guard: what files, copies and configs hold of it."""

from __future__ import annotations

import copy
import gc
import json
from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf
from guards import GUARDS, Judges, large
from limits import skip_without
from models import built, compiled, regression, scale_state
from routes import ROUTES, there
from strategies import scope_of

import lossscale
from lossscale import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScaleEngine,
    LossScaleOptimizer,
    SpikeGuard,
)
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
        if variable.dtype == tf.bool:
            variable.assign(number % 2 == 0)
        else:
            value = np.full(variable.shape, number) + np.arange(
                variable.shape.num_elements()
            ).reshape(variable.shape)
            variable.assign(value.astype(variable.dtype.as_numpy_dtype))


def assert_whole(family, route, folder):
    model, fresh = model_of(family), model_of(family)
    fill(model.optimizer)
    used = there(family, route)
    used.write(model, folder / "model")
    loaded = used.read(family, folder / "model", fresh)
    if getattr(loaded.optimizer, "built", None) is False:
        loaded.optimizer.build(loaded.trainable_variables)
    assert scale_state(loaded.optimizer) == scale_state(model.optimizer)
    assert isinstance(loaded.optimizer.guard, SpikeGuard)
    assert loaded.optimizer.guard.window == 4


@pytest.mark.every
@pytest.mark.parametrize("route", ROUTES)
def test_a_route_to_disk_keeps_a_guard_whole(family, route, tmp_path):
    assert_whole(family, route, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_and_on_two_replicas(family, route, mirrored, tmp_path):
    if route == "SavedModel" and family.name != "keras3":
        pytest.skip("Keras 2 loads weights into no model that was loaded in a scope")
    with scope_of(mirrored):
        assert_whole(family, route, tmp_path)


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


@pytest.mark.every
@pytest.mark.parametrize("name", GUARDS)
def test_copies_and_configs_carry_it(family, name):
    optimizer, _ = built(family, DynamicLossScale(64.0), guard=GUARDS[name]())
    fill(optimizer)
    cls = type(optimizer.guard)
    config = json.loads(json.dumps(optimizer.get_config()))
    again = LossScaleOptimizer.from_config(config, {cls.__name__: cls})
    assert again.get_config() == optimizer.get_config()
    assert type(again.guard) is cls
    fresh = GUARDS[name]().variables
    for variable, new in zip(again.guard.variables, fresh):
        np.testing.assert_array_equal(variable.numpy(), new.numpy())
    skip_without("copying", family)
    copied = copy.deepcopy(optimizer)
    assert copied.guard is not optimizer.guard
    assert scale_state(copied) == scale_state(optimizer)


def test_two_variables_of_one_name_are_refused(family):
    with pytest.raises(ValueError, match="two called 'guard_spikes'"):
        LossScaleOptimizer(family.optimizers.SGD(), Clashing(), guard=SpikeGuard())


# Each optimizer has its own


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
    with pytest.raises(ValueError, match="two called"):  # after it was handed on
        following.with_loss_scale(Clashing())
    with pytest.raises(ValueError, match=words):
        built(family, "dynamic", guard=guard)
    other = following.with_loss_scale("dynamic", guard=None)
    assert other.guard is None
    built(family, "dynamic", guard=guard)  # nobody else has it now


class Clashing(DynamicLossScale):
    """It has a variable of the name that one of a SpikeGuard has in files."""

    def __init__(self):
        super().__init__()
        self.other = self._add_weight("guard_spikes", 0, tf.int64)


def test_an_optimizer_that_is_gone_has_no_guard():
    guard = SpikeGuard()
    lossscale.LossScaleEngine(guard=guard)
    gc.collect()
    lossscale.LossScaleEngine(guard=guard)


@pytest.mark.parametrize("mode", ["eager", "graph", "session"])
@pytest.mark.parametrize("rule", [DynamicLossScale, HeadroomLossScale])
def test_a_shared_loss_scale_learns_only_of_what_is_not_left_out(mode, rule):
    """As one that is adjusted by hand. Two optimizers have a guard."""
    alone, v1 = rule(64.0), tf.compat.v1
    graph = tf.Graph() if mode == "session" else None
    with nullcontext() if graph is None else graph.as_default():
        scale, guards = rule(64.0), [Judges(large), Judges(large), None]
        engines = [LossScaleEngine(scale, guard=guard) for guard in guards]
        made = v1.Variable if mode == "session" else tf.Variable
        variables = [made(np.float32(0.0)) for _ in engines]

        def step(sizes):
            done = []
            for engine, variable, size in zip(engines, variables, tf.unstack(sizes)):
                scaled = engine.scale_loss(tf.constant(1.0)) * size
                done.append(engine.apply([scaled], [variable], added))
            return done

        if mode == "session":
            fed, session = v1.placeholder(tf.float32, [3]), v1.Session()
            ops = step(fed)
            session.run(v1.global_variables_initializer())
    if mode != "session":
        taken = compiled(lambda sizes: step(sizes) and None, mode)
    for sizes in RUN_OF_THREE:
        learned = [s for s in sizes[:2] if not 8.0 <= s < INF] + sizes[2:]
        is_finite = bool(np.isfinite(learned).all())
        alone.adjust(is_finite, max(learned))
        if mode == "session":
            session.run(ops, {fed: sizes})
            found = session.run([*scale.variables, scale.last_largest])
        else:
            taken(tf.constant(sizes))
            found = [v.numpy() for v in (*scale.variables, scale.last_largest)]
        assert found == [*(v.numpy() for v in alone.variables), max(learned)]


def added(grads, variables):
    return variables[0].assign_add(grads[0], read_value=False)


#: The sizes of the three optimizers' gradients. Guards leave out those of 8 and more.
RUN_OF_THREE = [
    [1.0, 0.5, 0.25],
    [9.0, 0.5, 0.25],
    [1.0, 99.0, 0.5],
    [99.0, 99.0, 0.125],
    [np.inf, 99.0, 0.5],
    [99.0, 1.0, np.inf],
    [0.5, 0.25, 2.0],
]


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


# Programs of TensorFlow 1


@pytest.mark.parametrize("wrapper", ["LossScaleOptimizer", "MixedPrecision"])
@pytest.mark.parametrize("mode", ["session", "eager"])
def test_one_of_tensorflow_1_takes_a_guard(wrapper, mode, tmp_path):
    cls = lossscale.compat.v1.LossScaleOptimizer
    if wrapper == "MixedPrecision":
        cls = lossscale.compat.v1.MixedPrecisionLossScaleOptimizer
    sgd = tf.compat.v1.train.GradientDescentOptimizer
    v1 = tf.compat.v1
    if mode == "eager":
        optimizer, variable = cls(sgd(1.0), 8.0, guard=Judges(large)), tf.Variable(0.0)
        for size in (1.0, 16.0, INF):
            optimizer.minimize(lambda size=size: variable * size, var_list=[variable])
        assert float(variable) == -1.0
        assert int(optimizer.loss_scale.skipped_steps) == 1
        made = tf.train.Checkpoint(optimizer=optimizer)
        path = made.write(str(tmp_path / "checkpoint"))
        assert any(
            "optimizer/guard/asked" in n for n, _ in tf.train.list_variables(path)
        )
        return
    with tf.Graph().as_default(), v1.Session() as session:
        optimizer = cls(sgd(1.0), 8.0, guard=Judges(large))
        variable = v1.get_variable("v", initializer=0.0, use_resource=True)
        size = v1.placeholder(tf.float32, [])
        op = optimizer.minimize(variable * size, var_list=[variable])
        session.run(v1.global_variables_initializer())
        for value in (1.0, 16.0, INF):
            session.run(op, {size: value})
        asked = optimizer.variables()[-1]
        found = session.run([variable, asked, optimizer.loss_scale.skipped_steps])
        assert found == [-1.0, 2, 1]
