"""LogNormalLossScale against its rule in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from lossscale import LogNormalLossScale


def reference(run):
    """Returns the scale after each step of `(is_finite, largest)`, by the defaults.

    On good steps this is OpenSeq2Seq's `LogMaxScaler`.
    """
    beta1, beta2 = 0.99, 0.999
    scale, t, mean, slow, square = 1.0, 0, 0.0, 0.0, 0.0
    scales = []
    for is_finite, largest in run:
        if not (is_finite and largest == 0):
            x = np.log2(largest) if is_finite else 16 - np.log2(scale) + 1
            t += 1
            mean = beta1 * mean + (1 - beta1) * x
            slow = beta2 * slow + (1 - beta2) * x
            square = beta2 * square + (1 - beta2) * x * x
            m, s = mean / (1 - beta1**t), slow / (1 - beta2**t)
            sigma = np.sqrt(max(square / (1 - beta2**t) - s * s, 0.0))
            scale = np.clip(2.0 ** (16 - (m + 3.09 * sigma)), 1.0, 2.0**24)
        scales.append(float(scale))
    return scales


def random_run(rng, steps):
    log2 = rng.normal(-8, 3, size=steps) + np.sin(np.arange(steps) / 300) * 5
    largest = (2.0**log2).astype(np.float32)
    largest[rng.random(steps) < 0.01] = 0
    return (rng.random(steps) > 0.02), largest


def test_5000_random_steps_are_the_references(rng):
    steps = 5000
    flags, largest = random_run(rng, steps)
    loss_scale = LogNormalLossScale()

    @tf.function
    def replay(flags, largest):
        scales = tf.TensorArray(tf.float32, steps)
        for i in tf.range(steps):
            loss_scale.adjust(flags[i], largest[i])
            scales = scales.write(i, loss_scale())
        return scales.stack()

    seen = replay(tf.constant(flags), tf.constant(largest)).numpy()
    expected = reference(list(zip(flags.tolist(), largest.astype(np.float64).tolist())))
    np.testing.assert_allclose(seen, expected, rtol=2e-6)
    assert 1.0 < np.median(seen) < 2.0**24  # neither bound does it all


def test_beyond_float32_it_is_bounded():
    widest = {"min_loss_scale": 2.0**-126, "max_loss_scale": 2.0**127}
    for bounds, largest, expected in (
        (widest, 2.0**-120, 2.0**127),
        (widest, 3e38, 2.0**-112),
        ({}, 2.0**-120, 2.0**24),
        ({}, 3e38, 1.0),
    ):
        loss_scale = LogNormalLossScale(**bounds)
        loss_scale.adjust(True, np.float64(largest))
        assert float(loss_scale) == pytest.approx(expected, rel=0.01)
