"""Keras 3's float8 layers: new values of their variables in the place of gradients."""

import numpy as np
import pytest
import tensorflow as tf
from exact import warned
from models import assert_same

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.runtime import keras_versions

keras = keras_versions.keras3()
if not hasattr(getattr(keras, "dtype_policies", None), "QuantizedFloat8DTypePolicy"):
    pytest.skip("no Keras 3, or one without float8", allow_module_level=True)

S = 2.0**10
INF = float("inf")
FLOAT8 = "float8_from_mixed_float16"


def fitted(optimizer):
    """Returns a model of float8 layers of each kind that was trained."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu", dtype=FLOAT8),
            layers.EinsumDense("ab,bc->ac", 4, bias_axes="c", dtype=FLOAT8),
            layers.Dense(4, dtype="mixed_float16"),
            layers.Dense(1, use_bias=False, dtype="float32"),
        ]
    )
    model.layers[2].quantize("float8")
    x = np.random.default_rng(3).normal(size=(32, 6)).astype(np.float32)
    model.compile(optimizer, "mse", jit_compile=False)  # XLA takes four times as long
    model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.trainable_variables


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, keras.__version__.split(".")[:2])) < (3, 15),
    reason="Keras's own wrapper divides the new values (3.3 and 3.6; 3.15 does not)",
)
def test_fit_does_what_it_does_with_keras_own_wrapper_and_does_not_warn():
    sgd, scale = keras.optimizers.SGD, DynamicLossScale(S, increment_period=2)
    with warned(0):
        ours = fitted(LossScaleOptimizer(sgd(2.0**-6, momentum=0.5), scale))
    assert (float(scale), int(scale.skipped_steps.numpy())) == (S * 2**4, 0)
    wrapper = keras.optimizers.LossScaleOptimizer(
        sgd(2.0**-6, momentum=0.5), S, dynamic_growth_steps=2
    )
    theirs = fitted(wrapper)
    assert_same([v.numpy() for v in ours], [v.numpy() for v in theirs])
    assert all(np.isfinite(variable.numpy()).all() for variable in ours)
    moved = [v for v in ours if v.overwrite_with_gradient]
    assert len(moved) == 18
    assert all(np.any(v.numpy() != (v.name[-1] == "e")) for v in moved)


@pytest.fixture
def pair():
    """An optimizer of a weight, and of a variable that its "gradient" overwrites."""
    weight, held = keras.Variable([1.0]), keras.Variable([0.0])
    held.overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), DynamicLossScale(S))
    optimizer.build([weight, held])
    return optimizer, [weight, held]


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("value", [INF, float("nan")])
def test_a_new_value_that_is_not_finite_is_not_assigned(pair, value, unscales):
    """A loop may unscale all that the tape returned, new values among it."""
    optimizer, variables = pair

    @tf.function
    def step(factor, new):
        grads = [optimizer.scale_loss(factor), new]
        if unscales:
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply(grads, variables)

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


def test_a_variable_may_be_marked_after_the_build(pair):
    optimizer, variables = pair
    variables[1].overwrite_with_gradient = False
    optimizer.build(variables)
    variables[1].overwrite_with_gradient = True
    grads = [optimizer.scale_loss(tf.constant([0.25])), tf.constant([5.0])]
    optimizer.apply(grads, variables)
    assert [variable.numpy().item() for variable in variables] == [0.75, 5.0]
