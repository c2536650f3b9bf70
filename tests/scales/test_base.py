"""What every loss scale has from LossScale itself."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from lossscale import DynamicLossScale, FixedLossScale

KINDS = {"fixed": FixedLossScale, "dynamic": DynamicLossScale}


class TestReadsAsATensor:
    """Code written for Keras 2 reads `optimizer.loss_scale` as a tensor."""

    @pytest.mark.parametrize("kind", ["fixed", "dynamic"])
    def test_wherever_tensorflow_takes_one(self, kind):
        loss_scale = KINDS[kind](8.0)
        assert float(tf.constant(2.0) * loss_scale) == 16
        assert float(loss_scale * tf.constant(2.0)) == 16
        assert float(1.0 / tf.convert_to_tensor(loss_scale)) == 0.125
        assert tf.cast(loss_scale, tf.float16).dtype == tf.float16
        assert float(loss_scale) == 8.0
        assert loss_scale.numpy() == np.float32(8)

    def test_in_a_function(self):
        loss_scale = DynamicLossScale(8, increment_period=1)
        double = tf.function(lambda: 2.0 * tf.convert_to_tensor(loss_scale))
        assert float(double()) == 16
        loss_scale.adjust(True)
        assert float(double()) == 32

    def test_not_as_another_dtype(self):
        with pytest.raises((TypeError, ValueError)):
            tf.convert_to_tensor(FixedLossScale(8), tf.int32)
