"""LossScaleMonitor tells of the steps that a SpikeGuard skipped."""

from __future__ import annotations

import pytest
from faulty import told_of
from models import data, regression

import lossscale
from lossscale import DynamicLossScale, LossScaleMonitor, LossScaleOptimizer, SpikeGuard


def fit_with_spikes(family, rng, monitor, loss_scale=None, epochs=2, rate=2.0**-8):
    """Returns the optimizer, the history and the warnings of a fit."""
    x, y = data(rng, 256)
    y[-32:-16] += 1e4  # the last but one of sixteen batches has wrong targets
    loss_scale = loss_scale or SpikeGuard(DynamicLossScale(1.0), window=12)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(rate), loss_scale)
    model = regression(family, optimizer)
    messages, history = told_of(model, x, y, monitor, 16, epochs=epochs)
    return optimizer, history, messages


def test_the_first_is_told_and_the_last_is_named(family, rng, capsys):
    optimizer, history, messages = fit_with_spikes(family, rng, LossScaleMonitor())
    assert history["spikes"] == [1, 2]
    assert history["skipped_steps"] == [0, 0]
    (message,) = messages  # once, although each epoch has one
    spike = optimizer.last_spike()
    assert spike.largest > 1000
    assert spike.limit < 100
    assert spike.name in message
    assert message.startswith("A step was skipped as a spike, with a gradient of")
    line = capsys.readouterr().out
    assert "30 steps applied, 0 skipped; it is 1," in line
    last = f"Spikes skipped: 2, the last with a gradient of {spike.largest:.3g} in "
    assert f"{last}{spike.name}, " in line
    assert f" times the limit of {spike.limit:.3g}." in line


@pytest.mark.slow
def test_without_spikes_and_without_a_guard_nothing_is_said(family, rng, capsys):
    guard = SpikeGuard(1, threshold=1e6)
    _, history, messages = fit_with_spikes(
        family, rng, LossScaleMonitor(), guard, rate=0.0
    )
    assert (history["spikes"], messages) == ([0, 0], [])
    assert "Spikes" not in capsys.readouterr().out
    plain = DynamicLossScale(1.0)
    _, history, messages = fit_with_spikes(
        family, rng, LossScaleMonitor(), plain, 1, 0.0
    )
    assert "spikes" not in history
    assert messages == []


def test_the_floor_of_the_one_within_is_known(family, rng):
    inner = DynamicLossScale(2.0, increment_period=1000, min_loss_scale=2.0)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.0), SpikeGuard(inner))
    model = regression(family, optimizer, "mixed_float16")
    x, y = data(rng)
    y[:] = 1e8  # in float16 the gradient is infinite; the loss is not
    monitor = LossScaleMonitor(patience=2, verbose=0)
    with pytest.warns(lossscale.LossScaleWarning, match="at that floor, 2"):
        model.fit(x, y, batch_size=16, verbose=0, callbacks=[monitor])
