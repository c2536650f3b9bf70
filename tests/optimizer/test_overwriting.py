"""Keras 3's float8 layers: new values of their variables in the place of gradients."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from exact import warned
from models import assert_same, compiled

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.runtime import keras_versions

keras = keras_versions.keras3()
if not hasattr(getattr(keras, "dtype_policies", None), "QuantizedFloat8DTypePolicy"):
    pytest.skip("no Keras 3, or one without float8", allow_module_level=True)

S = 2.0**10
INF = float("inf")
FLOAT8 = "float8_from_mixed_float16"
AS_KERAS_OWN = pytest.mark.skipif(
    tuple(map(int, keras.__version__.split(".")[:2])) < (3, 15),
    reason="Keras's own wrapper divides the new values (3.3 and 3.6; 3.15 does not)",
)


def network(use_bias=True):
    """Returns a model of float8 layers of each kind, with fixed weights."""
    layers = keras.layers
    einsum = {"bias_axes": "c"} if use_bias else {}
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu", use_bias=use_bias, dtype=FLOAT8),
            layers.EinsumDense("ab,bc->ac", 4, dtype=FLOAT8, **einsum),
            layers.Dense(4, use_bias=use_bias, dtype="mixed_float16"),
            layers.Dense(1, use_bias=False, dtype="float32"),
        ]
    )
    model.layers[2].quantize("float8")
    rng = np.random.default_rng(3)
    for variable in model.trainable_variables:
        if not variable.overwrite_with_gradient:
            variable.assign(rng.normal(size=variable.shape) / 2)
    return model


def state(model):
    """Returns the weights and float8 state of a model by their places."""
    return [variable.numpy() for variable in model.trainable_variables]


def sgd():
    return keras.optimizers.SGD(2.0**-6, momentum=0.5)


@pytest.fixture
def xy(rng):
    x = rng.normal(size=(32, 6)).astype(np.float32)
    return x, x[:, :1]


def fitted(optimizer, xy, use_bias=True):
    model = network(use_bias)
    model.compile(optimizer, "mse", jit_compile=False)  # XLA takes four times as long
    model.fit(*xy, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.mark.slow
@AS_KERAS_OWN
def test_fit_does_what_it_does_with_keras_own_wrapper_and_does_not_warn(xy):
    scale = DynamicLossScale(S, increment_period=2)
    with warned(0):
        ours = fitted(LossScaleOptimizer(sgd(), scale), xy)
    assert (float(scale), int(scale.skipped_steps.numpy())) == (S * 2**4, 0)
    wrapper = keras.optimizers.LossScaleOptimizer(sgd(), S, dynamic_growth_steps=2)
    theirs = fitted(wrapper, xy)
    assert float(wrapper.dynamic_scale.numpy()) == S * 2**4
    assert_same(state(ours), state(theirs))
    moved = [v for v in ours.trainable_variables if v.overwrite_with_gradient]
    assert len(moved) == 18
    assert all(np.any(v.numpy() != (v.name[-1] == "e")) for v in moved)
    assert all(np.isfinite(each).all() for each in state(ours))


@pytest.mark.slow
def test_an_infinity_that_only_a_history_shows_is_a_skipped_step(xy):
    # Too large for float16. What is bounded stays so, times inputs as small as these.
    bad = xy[0] * 1e-3, xy[1] * 1e30
    wrapper = keras.optimizers.LossScaleOptimizer(sgd(), S)
    theirs = fitted(wrapper, bad, use_bias=False)
    optimizer = LossScaleOptimizer(sgd(), DynamicLossScale(S))
    ours = fitted(optimizer, bad, use_bias=False)
    assert_same(state(ours), state(theirs))
    assert_same(state(ours), state(network(use_bias=False)))
    assert int(optimizer.loss_scale.skipped_steps.numpy()) == 8


def step_of(model, optimizer, xy, change=list):
    def step(factor):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(xy[0], training=True) - xy[1]) ** 2)
            loss = optimizer.scale_loss(loss * factor)
        held = [keras_versions.tensor_of(v) for v in model.trainable_variables]
        optimizer.apply(change(tape.gradient(loss, held)), model.trainable_variables)

    return step


@AS_KERAS_OWN
@pytest.mark.slow
@pytest.mark.parametrize("unscales", [False, True])
def test_a_loop_of_your_own(xy, unscales):
    """It may unscale all that the tape returned, new values among it.

    In a graph: eagerly Keras's float8 layers fail, bare too (seen on Keras 3.15).
    """
    model = network()
    optimizer = LossScaleOptimizer(sgd(), DynamicLossScale(S))
    change = optimizer.get_unscaled_gradients if unscales else list
    ours = tf.function(step_of(model, optimizer, xy, change))
    with warned(0):
        for _ in range(3):
            ours(tf.constant(1.0))
    theirs = network()
    wrapper = keras.optimizers.LossScaleOptimizer(sgd(), S)
    wrapper.build(theirs.trainable_variables)
    step = tf.function(step_of(theirs, wrapper, xy))
    for _ in range(3):
        step(tf.constant(1.0))
    assert_same(state(model), state(theirs))
    ours(tf.constant(INF))
    assert_same(state(model), state(theirs))
    assert int(optimizer.loss_scale.skipped_steps.numpy()) == 1


@pytest.fixture
def pair():
    """An optimizer of a weight, and of a variable that its "gradient" overwrites."""
    weight, held = keras.Variable([1.0]), keras.Variable([0.0])
    held.overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), DynamicLossScale(S))
    optimizer.build([weight, held])
    return optimizer, [weight, held]


@pytest.mark.parametrize(
    "mode",
    ["graph", *(pytest.param(m, marks=pytest.mark.slow) for m in ("eager", "xla"))],
)
@pytest.mark.parametrize(
    "value", [INF, pytest.param(float("nan"), marks=pytest.mark.slow)]
)
def test_a_new_value_that_is_not_finite_is_not_assigned(pair, mode, value):
    optimizer, variables = pair

    def step(factor, new):
        optimizer.apply([optimizer.scale_loss(factor), new], variables)

    step = compiled(step, mode)

    def after(factor, new):
        step(tf.constant([factor]), tf.constant([new]))
        return [variable.numpy().item() for variable in variables]

    assert after(0.25, 3.0) == [0.75, 3.0]
    assert after(0.25, value) == [0.75, 3.0]
    assert float(optimizer.loss_scale) == S / 2
    (fault,) = optimizer.nonfinite_gradients()
    assert fault.variable is variables[1]
    assert fault.kind == ("inf" if value == INF else "nan")
    assert after(0.25, 4.0) == [0.5, 4.0]
    # All are told of, not the new values alone.
    assert after(value, value) == [0.5, 4.0]
    assert len(optimizer.nonfinite_gradients()) == 2


def test_new_values_that_were_unscaled_eagerly_are_given_back(pair):
    optimizer, variables = pair
    scaled = [optimizer.scale_loss(tf.constant([0.25])), tf.constant([3.0])]
    optimizer.apply(optimizer.get_unscaled_gradients(scaled), variables)
    assert [variable.numpy().item() for variable in variables] == [0.75, 3.0]
