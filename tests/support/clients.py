"""What tests of clients of Keras 2 have in common."""

import pytest

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.runtime import keras_versions

#: So large that the first steps overflow in float16, whatever the model.
TOO_LARGE = 2.0**40


def keras2():
    """Returns the Keras 2 that clients of it train with, or skips the test."""
    keras_versions.imported("tf_keras")
    if not keras_versions.keras2():
        pytest.skip("no Keras 2 is installed")
    return keras_versions.keras2()[-1]


def wrapped(inner):
    return LossScaleOptimizer(inner, DynamicLossScale(TOO_LARGE, 1000))
