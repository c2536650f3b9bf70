"""The largest gradient and its headroom, in logs and in advice."""

import math

import numpy as np
import pytest
from faulty import told_of
from models import data, regression

from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LossScaleMonitor,
    LossScaleOptimizer,
)
from lossscale.monitor.reading import Reading
from lossscale.monitor.watched import Watched

#: The weight of the loss, which makes gradients small.
TINY = 2.0**-40


def fit_tiny(family, rng, loss_scale, monitor, epochs=4, rate=0.0):
    """Returns the history of a model whose gradients are tiny, and the warnings."""
    x, y = data(rng)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(rate), loss_scale)
    model = regression(family, optimizer, "mixed_float16", loss_weights=TINY)
    messages, history = told_of(model, x, y, monitor, 16, epochs=epochs)
    return history, messages


@pytest.mark.parametrize(
    ("readings", "epochs"),
    [
        ([(15, -20)] * 5, 5),
        ([(15, -15)] * 5, 0),  # not far enough
        ([(15, -20), (15, -20), (30, -20), (15, -20), (15, -20)], 2),
        ([(15, -20), *[(15, -20, 1)] * 3], 2),  # the second epoch skipped a step
        ([(15, -20), (15, None), (15, -20)], 2),
        ([(15, -20), (15, -np.inf), (15, -20)], 3),  # all gradients are zero
        ([(15, -20), (0, math.log2(65504)), (15, -20)], 1),  # no room
    ],
)
def test_how_many_epochs_had_room(readings, epochs):
    watched = Watched(None, 3)
    watched.begin(Reading(1.0, 0, 100))
    for epoch, (log2_scale, log2_largest, *skipped) in enumerate(readings, 1):
        largest = None if log2_largest is None else 2.0**log2_largest
        read_now = 2.0**log2_scale, *(skipped or [0]), 100 + epoch
        watched.see(Reading(*read_now, largest=largest))
        watched.end_epoch()
        watched.begin_epoch()
    assert watched.roomy_epochs == epochs


@pytest.mark.slow
def test_the_number_that_it_advises_was_tried(family, rng):
    """With it no step is skipped, and it leaves what HeadroomLossScale leaves."""
    monitor = LossScaleMonitor(patience=3, check_underflow=True, verbose=0)
    scale = DynamicLossScale()
    history, (message,) = fit_tiny(family, rng, scale, monitor)
    rooms = history["headroom"]
    largest = float(scale.last_largest.numpy())
    assert history["largest_gradient"][-1] == pytest.approx(largest)
    assert rooms[-1] == pytest.approx(np.log2(65504 / largest) - 15)
    advised = 2.0 ** int(message.split("could be 2**")[1].split(".")[0])
    for room in rooms[:3]:
        assert room + 15 - math.log2(advised) >= 4
    followed = FixedLossScale(advised, skip_nonfinite=True)
    history, said = fit_tiny(
        family, rng, followed, LossScaleMonitor(verbose=0), epochs=16, rate=1e-3
    )
    assert (history["skipped_steps"][-1], said) == (0, [])  # of 64 steps


def test_logs_have_the_last_gradient_that_was_finite():
    watched, logged = Watched(None, 10), []
    watched.name = "mine"
    watched.begin(Reading(8.0, 0, 0))
    for largest in (np.inf, 0.25, np.inf, 3.0, 0.0):
        logs = {}
        watched.see(Reading(8.0, 0, 0, largest=largest))
        watched.add_to(logs)
        logged += [logs["mine_largest_gradient"], logs["mine_headroom"]]
    far, near = math.log2(65504 / 2), math.log2(65504 / 24)
    expected = [np.nan, np.nan, 0.25, far, 0.25, far, 3.0, near, 0.0, near]
    np.testing.assert_allclose(logged, expected)


@pytest.mark.slow
def test_a_loss_scale_that_looks_is_told_of_unasked(family, rng, capsys):
    low = HeadroomLossScale(2.0**10, max_loss_scale=2.0**10)
    _, messages = fit_tiny(family, rng, low, LossScaleMonitor(patience=2))
    assert len(messages) == 1
    assert "Headroom: " in capsys.readouterr().out
    right = HeadroomLossScale()
    monitor = LossScaleMonitor(patience=2)
    history, messages = fit_tiny(family, rng, right, monitor)
    assert messages == []
    assert all(3.9 < room < 8 for room in history["headroom"])
    assert "doublings." in capsys.readouterr().out


@pytest.mark.slow
def test_what_was_traced_before_is_traced_anew(family, rng):
    x, y = data(rng)
    scale = DynamicLossScale()
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.0), scale)
    model = regression(family, optimizer, "mixed_float16", loss_weights=TINY)
    model.fit(x, y, verbose=0)
    monitor = LossScaleMonitor(check_underflow=True, verbose=0)
    found = model.fit(x, y, verbose=0, callbacks=[monitor])
    assert np.isfinite(found.history["headroom"]).all()
    again = model.fit(x, y, verbose=0, callbacks=[monitor])
    assert np.isfinite(again.history["headroom"]).all()
