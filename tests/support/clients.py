"""What the tests of clients have in common: a loss scale that must find its way."""

from __future__ import annotations

import numpy as np
import pytest

from lossscale import DynamicLossScale, LossScaleOptimizer
from lossscale.runtime import kerases

#: So large that the first steps overflow in float16, whatever the model.
TOO_LARGE = 2.0**40


def keras2():
    """Returns the Keras 2 that clients of it train with, or skips the test."""
    if not kerases.keras2():
        pytest.skip("no Keras 2 is installed")
    return kerases.keras2()[-1]


def keras3():
    """Returns Keras 3, or skips the test."""
    if kerases.keras3() is None:
        pytest.skip("Keras 3 with TensorFlow is not installed")
    return kerases.keras3()


def wrapped(inner):
    return LossScaleOptimizer(inner, DynamicLossScale(TOO_LARGE, 1000))


def assert_trained(optimizer, before, after, steps):
    """Asserts that some steps were skipped, and the others changed finite weights."""
    skipped = int(optimizer.loss_scale.skipped_steps.numpy())
    assert 0 < skipped < steps
    assert int(optimizer.iterations.numpy()) == steps - skipped
    assert float(optimizer.loss_scale.numpy()) == TOO_LARGE / 2**skipped
    assert all(np.isfinite(weight).all() for weight in after)
    assert any((one != other).any() for one, other in zip(before, after))
