"""HeadroomLossScale against its rule in plain Python, bit for bit."""

import math

import numpy as np
import pytest
import tensorflow as tf
from driving import drive

from lossscale import HeadroomLossScale


def reference(run, config):
    """Returns the scale after each step of `(is_finite, largest)`, in float32."""
    highest, floor = config["max_loss_scale"] or 2.0**127, config["min_loss_scale"]
    scale, peak, ceiling = config["initial_loss_scale"], np.float32(0), highest
    good, fades = 0, np.float32(2.0 ** (-1 / config["half_life"]))
    scales = []
    for is_finite, largest in run:
        if is_finite:
            peak = max(np.float32(largest), peak * fades)
            good += 1
            if good >= config["increment_period"]:
                good, ceiling = 0, min(2 * ceiling, highest)
        else:
            good, ceiling = 0, max(min(ceiling, scale) / 2, floor)
        wanted = scale
        if peak > 0:
            borne = float(np.float32(65504) / peak)
            wanted = 2.0 ** (math.frexp(borne)[1] - 1 - config["headroom"])
        scale = max(min(wanted, ceiling), floor)
        scales.append(scale)
    return scales


def random_run(rng, steps):
    """Returns a run of gradients that wander over 60 doublings, with bad steps."""
    log2 = np.cumsum(rng.normal(size=steps)) - rng.integers(0, 60)
    largest = (2.0 ** np.clip(log2, -90, 60)).astype(np.float32)
    largest[rng.random(steps) < 0.05] = 0
    is_finite = rng.random(steps) > 0.1
    return list(zip(is_finite.tolist(), largest.tolist()))


NAMES = ["initial_loss_scale", "headroom", "half_life", "increment_period"]
NAMES += ["min_loss_scale", "max_loss_scale"]


@pytest.mark.parametrize(
    "config",
    [(2.0**10, 0, 0.5, 1, 2.0**-8, None), (2.0**15, 4, 3.0, 5, 1.0, 2.0**20)],
)
def test_every_step_is_the_references(rng, config):
    config, run = dict(zip(NAMES, config)), random_run(rng, 150)
    seen, _ = drive(lambda: HeadroomLossScale(**config), run, "graph")
    assert seen == reference(run, config)


def test_from_the_second_step_on():
    for log2 in range(-80, 14):
        loss_scale = HeadroomLossScale()
        loss_scale.update([tf.constant([2.0**log2 * 1.5, 0.0])])
        scaled = float(loss_scale) * 2.0**log2 * 1.5
        if float(loss_scale) > 1:
            assert 65504 / 2**5 < scaled <= 65504 / 2**4
    assert float(HeadroomLossScale()) == 2.0**15


@pytest.mark.smoke
def test_a_ceiling_holds_what_gradients_do_not_announce():
    loss_scale = HeadroomLossScale(increment_period=5)
    seen = []
    for _ in range(60):  # the gradients would bear 2**21, the activations 2**10
        fits = float(loss_scale) <= 2.0**10
        seen.append(fits)
        loss_scale.adjust(fits, 2.0**-10)
    assert seen.index(True) == 5  # 2**15 halves until it fits
    assert sum(seen[5:]) >= 40  # then one step of six tries more, as a dynamic one
    assert float(loss_scale) <= 2.0**11


@pytest.mark.parametrize("highest", [None, 2.0**9])
def test_no_ceiling_is_above_the_highest(highest):
    loss_scale = HeadroomLossScale(8.0, increment_period=1, max_loss_scale=highest)
    for _ in range(3):
        loss_scale.adjust(True, 2.0**-126)
    assert float(loss_scale.ceiling) == float(loss_scale) == (highest or 2.0**127)


@pytest.mark.smoke
def test_zero_gradients_move_nothing():
    loss_scale = HeadroomLossScale(2.0**7)
    for _ in range(3):
        loss_scale.adjust(True, 0.0)
    assert float(loss_scale) == 2.0**7
    loss_scale.adjust(False, 0.0)
    assert float(loss_scale) == 2.0**6
