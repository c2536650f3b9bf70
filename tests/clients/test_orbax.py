"""Orbax: a model's state goes to disk and back, by its checkpointer and Keras's."""

from __future__ import annotations

import numpy as np
import pytest
from models import assert_same, data

from lossscale import DynamicLossScale, LossScaleOptimizer

pytestmark = pytest.mark.slow


def model_after_skips(keras, rng, *callbacks):
    """Returns a model after four steps, of which some were skipped."""
    layers = [keras.layers.Dense(1, kernel_initializer="zeros")]
    x, y = data(rng)
    model = keras.Sequential([keras.Input(x.shape[1:]), *layers])
    scale = DynamicLossScale(2.0**127, 3, hysteresis=2)
    model.compile(LossScaleOptimizer(keras.optimizers.Adam(0.25), scale), loss="mse")
    model.fit(x, y, batch_size=16, verbose=0, callbacks=callbacks)
    return model


def state_of_model(model):
    return [np.array(v.numpy()) for v in (*model.weights, *model.optimizer.variables)]


def test_orbax_takes_the_tree_of_a_model(tmp_path, rng):
    keras, orbax = map(pytest.importorskip, ("keras", "orbax.checkpoint"))
    model = model_after_skips(keras, rng)
    assert model.optimizer.loss_scale.skipped_steps.numpy() > 0
    saved, checkpointer = state_of_model(model), orbax.StandardCheckpointer()
    tree = model.get_state_tree(value_format="numpy_array")
    checkpointer.save(tmp_path / "state", tree)
    checkpointer.wait_until_finished()
    model.fit(*data(rng), verbose=0)
    model.set_state_tree(checkpointer.restore(tmp_path / "state"))
    assert_same(state_of_model(model), saved)


def test_keras_saves_and_loads_a_model_with_orbax(tmp_path, rng):
    keras, _ = map(pytest.importorskip, ("keras", "orbax.checkpoint"))
    made = getattr(keras.callbacks, "OrbaxCheckpoint", None)
    if made is None:
        pytest.skip("this Keras has no such callback")
    callback = made(str(tmp_path / "model"), save_on_background=False)
    model = model_after_skips(keras, rng, callback)
    loaded = keras.saving.load_model(str(tmp_path / "model"))
    # Keras 3.15 loses a Sequential model's weights so, with a bare optimizer, too.
    scales = [each.optimizer.loss_scale for each in (loaded, model)]
    assert_same(*[[v.numpy() for v in scale.variables] for scale in scales])
