"""What cannot be done on a TPU is refused: impossible.py has what Keras refuses."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import built

from lossscale import DynamicLossScale, LossScaleOptimizer


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
    optimizer, variable = built(family, DynamicLossScale(8.0))
    strategy, grad = TPUStrategyWithoutTPU(), tf.constant([1.0, 1.0])
    with strategy.scope(), pytest.raises(ValueError, match=says):
        LossScaleOptimizer(family.optimizers.SGD(1.0))
    with pytest.raises(ValueError, match=says):
        strategy.run(lambda: optimizer.apply_gradients([(grad, variable)]))
    np.testing.assert_array_equal(variable.numpy(), [1.0, 2.0])
