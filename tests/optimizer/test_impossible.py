"""What cannot be done fails as impossible.py says, and without us just so."""

from __future__ import annotations

import numpy as np
import pytest
import strategies
import tensorflow as tf
from models import variable_of

from lossscale import DynamicLossScale, LossScaleOptimizer


def bare(family):
    return strategies.momentum(family)


def ours(family):
    return LossScaleOptimizer(bare(family), DynamicLossScale(**strategies.SCALE))


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
