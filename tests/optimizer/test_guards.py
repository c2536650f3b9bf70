"""An optimizer with a guard: what files, copies and configs hold of it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import tensorflow as tf
from models import regression, scale_state
from routes import ROUTES, there
from strategies import scope_of

import lossscale
from lossscale import DynamicLossScale, LossScaleOptimizer, SpikeGuard


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
    tf.train.Checkpoint(engine=other).read(path).assert_consumed()
    assert int(other.guard.spikes) == 7


def test_copies_and_configs_carry_it(family):
    optimizer = model_of(family).optimizer
    fill(optimizer)
    copied = copy.deepcopy(optimizer)
    assert copied.guard is not optimizer.guard
    assert scale_state(copied) == scale_state(optimizer)
    again = LossScaleOptimizer.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    assert (again.guard.window, int(again.guard.spikes.numpy())) == (4, 0)


def test_two_variables_of_one_name_are_refused(family):
    class Twice(DynamicLossScale):
        def __init__(self):
            super().__init__()
            self.other = self._add_weight("guard_spikes", 0, tf.int64)

    with pytest.raises(ValueError, match="two called 'guard_spikes'"):
        LossScaleOptimizer(family.optimizers.SGD(), Twice(), guard=SpikeGuard())
