"""What cannot be done fails as impossible.py says, and without us just so."""

from __future__ import annotations

import numpy as np
import pytest
import strategies
import tensorflow as tf
from impossible import why_not
from installed import DEVICES
from models import variable_of

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.runtime.mode import COMPILED_BY_XLA


def fails_as_listed(strategy, family, entry):
    return pytest.raises(Exception, match=why_not(strategy, family.name, entry))


def bare(family):
    return strategies.momentum(family)


def ours(family):
    return LossScaleOptimizer(bare(family), DynamicLossScale(**strategies.SCALE))


def keras_own(family):
    return family.keras.mixed_precision.LossScaleOptimizer(bare(family))


def apply_once(strategy, family, make, arguments=None, **options):
    """Applies a gradient in `strategy.run` in a `tf.function`."""
    with strategies.scope_of(strategy):
        variable = variable_of(family, [1.0, 2.0])
        optimizer = make(family)
        if hasattr(optimizer, "build"):  # bare legacy optimizers build themselves
            optimizer.build([variable])

    def each():
        for scale in ("scale_loss", "get_scaled_loss"):
            getattr(optimizer, scale, tf.identity)(tf.constant(1.0))
        grads = [(tf.constant([1.0, 1.0]), variable)]
        optimizer.apply_gradients(grads, **(arguments or {}))

    tf.function(lambda: strategies.run_on(strategy, each), **options)()


def fit_once(strategy, family, make, **compile_arguments):
    with strategies.scope_of(strategy):
        model = strategies.linear(family, make(family), "float32", **compile_arguments)
    x, y = strategies.rows(strategies.RUN[:1])
    model.fit(x, y, batch_size=strategies.ROWS // 2, verbose=0, shuffle=False)


@pytest.mark.every
@pytest.mark.parametrize("make", [bare, ours])
def test_keras3_always_aggregates(family, make):
    if family.name != "keras3":
        pytest.skip("Keras 2 can leave it to the caller")
    arguments = {"experimental_aggregate_gradients": False}
    with fails_as_listed("none", family, "unaggregated"):
        apply_once(None, family, make, arguments)


@pytest.mark.slow
@pytest.mark.peer_defect(28)
@pytest.mark.parametrize("make", [bare, ours])
def test_xla_compiles_for_one_device(mirrored, family, make):
    with fails_as_listed("mirrored", family, "xla"):
        apply_once(mirrored, family, make, **COMPILED_BY_XLA)


@pytest.mark.slow
@pytest.mark.parametrize("make", [bare, ours])
def test_keras3_runs_one_step_per_execution(mirrored, family, make):
    if family.name != "keras3":
        pytest.skip("Keras 2 runs several")
    with fails_as_listed("mirrored", family, "steps_per_execution"):
        fit_once(mirrored, family, make, steps_per_execution=2)


@pytest.mark.parametrize("make", [keras_own, ours])
@pytest.mark.parametrize("attempt", [fit_once, apply_once])
def test_keras2_refuses_central_storage(family, make, attempt):
    if family.name == "keras3":
        pytest.skip("Keras 3 can")
    central = tf.distribute.experimental.CentralStorageStrategy(DEVICES, DEVICES[0])
    with fails_as_listed("central", family, "fit"):
        attempt(central, family, make)


class TPUStrategyWithoutTPU(tf.distribute.TPUStrategy):
    """What can be had of a TPUStrategy where there is no TPU: its class.

    It runs as OneDeviceStrategy does.
    """

    def __init__(self):
        one = tf.distribute.OneDeviceStrategy("CPU:0")
        extended = type(one.extended)(self, "CPU:0")
        tf.distribute.Strategy.__init__(self, extended)

    def run(self, fn, args=()):
        return tf.distribute.Strategy.run(self, fn, args)


def test_on_a_tpu_no_optimizer_is_made_and_no_gradient_applied(family):
    says = "must not be used with TPUStrategy: TPUs compute in bfloat16"
    optimizer, strategy = ours(family), TPUStrategyWithoutTPU()
    with strategy.scope():
        variable, inner = variable_of(family, [1.0]), bare(family)
        with pytest.raises(ValueError, match=says):
            LossScaleOptimizer(inner)

    def each():
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])

    with pytest.raises(ValueError, match=says):
        strategy.run(each)
    np.testing.assert_array_equal(variable.numpy(), [1.0])
