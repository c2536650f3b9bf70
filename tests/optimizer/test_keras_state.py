"""LossScaleOptimizer.from_keras: a run goes on where Keras's own wrapper is."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
from models import data, regression

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer

BATCHES = {"batch_size": 16, "verbose": 0, "shuffle": False}


def keras_own(family, **kwargs):
    """Returns Keras's own wrapper around an optimizer with slots."""
    return family.keras.mixed_precision.LossScaleOptimizer(
        family.optimizers.Adam(2.0**-4), **kwargs
    )


@pytest.mark.slow_on_the_newest
def test_it_goes_on_as_if_keras_own_had_gone_on(family, rng):
    x, y = data(rng)
    own = keras_own(family, initial_scale=64.0, dynamic_growth_steps=6)
    model = regression(family, own)
    model.fit(x, y, **BATCHES)  # four steps
    weights = model.get_weights()
    inner = own.inner_optimizer

    optimizer = LossScaleOptimizer.from_keras(own)
    assert optimizer.inner_optimizer is inner
    scale = optimizer.loss_scale
    assert (float(scale), int(scale.good_steps.numpy())) == (64.0, 4)
    assert (scale.initial_loss_scale, scale.increment_period) == (64.0, 6)
    assert int(optimizer.iterations.numpy()) == 4
    model.compile(optimizer, "mse")
    model.fit(x, y, **BATCHES)
    assert model.optimizer is optimizer
    assert (float(scale), int(scale.good_steps.numpy())) == (128.0, 2)
    assert int(optimizer.iterations.numpy()) == 8
    mine = model.get_weights()

    twin = regression(family, keras_own(family, initial_scale=64.0))
    twin.fit(x, y, **BATCHES)
    for one, other in zip(twin.get_weights(), weights):
        np.testing.assert_array_equal(one, other)
    twin.fit(x, y, **BATCHES)
    for one, other in zip(twin.get_weights(), mine):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_what_it_saves_is_read_by_one_of_our_own(family, rng, tmp_path):
    x, y = data(rng)
    model = regression(family, keras_own(family, initial_scale=64.0))
    model.fit(x, y, **BATCHES)
    optimizer = LossScaleOptimizer.from_keras(model.optimizer)
    model.compile(optimizer, "mse")
    model.fit(x, y, **BATCHES)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    path = checkpoint.write(str(tmp_path / "checkpoint"))

    fresh = LossScaleOptimizer(family.optimizers.Adam(2.0**-4), DynamicLossScale(2.0))
    other = regression(family, fresh)
    tf.train.Checkpoint(model=other, optimizer=fresh).read(path)
    assert (float(fresh.loss_scale), int(fresh.loss_scale.good_steps.numpy())) == (
        64.0,
        8,
    )
    for each in (model, other):
        each.fit(x, y, **BATCHES)
    for one, another in zip(model.get_weights(), other.get_weights()):
        np.testing.assert_array_equal(one, another)
    config = json.loads(json.dumps(optimizer.get_config()))
    assert sorted(config) == ["inner_optimizer", "loss_scale", "name"]


@pytest.mark.either_keras2
def test_before_it_is_built(family):
    own = keras_own(family, initial_scale=0.25, dynamic_growth_steps=7)
    optimizer = LossScaleOptimizer.from_keras(own)
    assert optimizer.inner_optimizer is own.inner_optimizer
    scale = optimizer.loss_scale
    assert float(scale) == scale.min_loss_scale == 0.25
    assert (scale.increment_period, int(scale.good_steps.numpy())) == (7, 0)


def test_its_checkpoint_has_the_names_of_any_other(family, tmp_path):
    """The inner optimizer tracks for it what it tracked for Keras's own wrapper."""

    def names(optimizer):
        path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "saved"))
        return sorted(name for name, _ in tf.train.list_variables(path))

    other = LossScaleOptimizer(family.optimizers.Adam(2.0**-4), DynamicLossScale())
    assert names(LossScaleOptimizer.from_keras(keras_own(family))) == names(other)


def test_a_fixed_scale_of_keras_2s(family):
    if family.name == "keras3":
        pytest.skip("Keras 3's own wrapper has no fixed loss scale")
    own = keras_own(family, dynamic=False, initial_scale=64.0)
    scale = LossScaleOptimizer.from_keras(own).loss_scale
    assert isinstance(scale, FixedLossScale)
    assert float(scale) == 64.0


def test_a_scale_below_the_floor_stays(family):
    if family.name != "keras3":
        pytest.skip("Keras 2's own wrapper has a floor")
    own = keras_own(family)
    own.build([family.keras.Variable([1.0])])
    own.dynamic_scale.assign(0.5)
    scale = LossScaleOptimizer.from_keras(own).loss_scale
    assert float(scale) == scale.min_loss_scale == 0.5
    own = keras_own(family)
    own.build([family.keras.Variable([1.0])])
    own.dynamic_scale.assign(0.0)
    with pytest.raises(ValueError, match=r"`dynamic_scale` must be positive.* got 0.0"):
        LossScaleOptimizer.from_keras(own)


@pytest.mark.either_keras2
def test_what_is_no_wrapper_of_keras_is_told(family):
    ours = LossScaleOptimizer(family.optimizers.SGD(0.25))
    with pytest.raises(TypeError, match=r"`optimizer` must be .*lossscale's as it is"):
        LossScaleOptimizer.from_keras(ours)
    for other in (family.optimizers.SGD(0.25), None, 8.0):
        with pytest.raises(TypeError, match=r"`optimizer` must be .* got .*Wrap an"):
            LossScaleOptimizer.from_keras(other)


def test_in_a_graph_it_is_told(family):
    if family.name != "keras2-legacy":
        pytest.skip("other optimizers are of no use in a graph")
    with tf.Graph().as_default():
        own = keras_own(family)
        with pytest.raises(RuntimeError, match=r"`from_keras` must be called eagerly"):
            LossScaleOptimizer.from_keras(own)
