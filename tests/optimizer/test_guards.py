"""An optimizer with a guard: whose it is, and what a loss scale learns of its steps.

That files, copies and configs hold it is in test_routes.py.
"""

import gc

import numpy as np
import pytest
import tensorflow as tf
from exact import changes_nothing, clip
from guards import Judges, large
from models import built
from version_1 import running

import lossscale
from lossscale import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScaleEngine,
    SpikeGuard,
)
from lossscale.compat import v1
from lossscale.runtime import keras_versions

INF = float("inf")


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


#: The sizes of three optimizers' gradients. Guards leave out those of 8 and more: those
#: of the first optimizer of a step, of the last one, or of both.
RUN_OF_THREE = [
    [1.0, 0.25, 0.5],
    [9.0, 0.25, 0.5],
    [1.0, 0.5, 99.0],
    [99.0, 0.125, 99.0],
    [np.inf, 0.5, 99.0],
    [99.0, np.inf, 1.0],
    [0.5, 2.0, 0.25],
]


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@pytest.mark.parametrize("rule", [DynamicLossScale, HeadroomLossScale])
@pytest.mark.parametrize("are_guarded", [[True], [True, False, True]], ids=len)
def test_a_loss_scale_learns_only_of_what_is_not_left_out(mode, rule, are_guarded):
    """As one that is adjusted by hand. Several optimizers share it."""
    alone, expected = rule(64.0), []
    alone.keep_largest()
    for sizes in RUN_OF_THREE:
        pairs = zip(sizes, are_guarded)
        left_out = [has_guard and 8.0 <= size < INF for size, has_guard in pairs]
        learned = [size for size, is_out in zip(sizes, left_out) if not is_out]
        if learned:
            alone.adjust(bool(np.isfinite(learned).all()), max(learned))
        if left_out[-1]:  # only this one moves
            alone.last_largest.assign(sizes[len(left_out) - 1])
        expected.append([v.numpy() for v in (*alone.variables, alone.last_largest)])
    with running(mode) as run:
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
            return tf.group(*done)

        take = run.step(step)
        for number, values in enumerate(expected):
            take(number)
            found = [run.value(v) for v in (*scale.variables, scale.last_largest)]
            assert found == values
        assert run.value(guards[0].asked) == 6  # not of what overflowed


# What a step uses


@pytest.mark.every
@pytest.mark.parametrize("how", ["guard", "headroom", "shared", "unscaled"])
def test_a_step_can_be_exported(family, how, tmp_path):
    scale = HeadroomLossScale(64.0) if how == "headroom" else DynamicLossScale(64.0)
    guard = Judges(large) if how in ("guard", "shared") else None
    pairs = [built(family, scale, [0.0], guard=guard)]
    if how == "shared":
        pairs.append(built(family, scale, [0.0]))
    module = tf.Module()
    module.optimizers = [optimizer for optimizer, _ in pairs]
    module.weights = [keras_versions.tensor_of(variable) for _, variable in pairs]

    @tf.function(input_signature=[tf.TensorSpec([])])
    def train(size):
        for optimizer, variable in pairs:
            grads = [optimizer.scale_loss(tf.constant([1.0])) * size]
            if how == "unscaled":  # of which the state of the step tells
                grads = clip(optimizer.get_unscaled_gradients(grads))
                grads = changes_nothing(grads)
            optimizer.apply_gradients([(grads[0], variable)])
        return tf.identity(module.weights[0])

    module.train = train
    train(tf.constant(1.0))
    tf.saved_model.save(module, str(tmp_path / "saved"))
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    assert loaded.train(tf.constant(1.0)).numpy() == [-2.0]
    left = {"headroom": -18.0, "unscaled": -3.0}.get(how, -2.0)
    for size in (16.0, INF):
        assert loaded.train(tf.constant(size)).numpy() == [left]


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
