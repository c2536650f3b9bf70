"""LossScaleMonitor tells of the steps that a SpikeGuard skipped."""

from __future__ import annotations

from faulty import told_of
from models import data, regression

from lossscale import DynamicLossScale, LossScaleMonitor, LossScaleOptimizer, SpikeGuard


def test_the_first_is_told_and_the_last_is_named(family, rng, capsys):
    x, y = data(rng, 256)
    y[-32:-16] += 1e4  # the last but one of sixteen batches has wrong targets
    inner = family.optimizers.SGD(2.0**-8)
    optimizer = LossScaleOptimizer(
        inner, DynamicLossScale(1.0), guard=SpikeGuard(window=12)
    )
    model = regression(family, optimizer)
    messages, history = told_of(model, x, y, LossScaleMonitor(), 16, epochs=2)
    assert history["spikes"] == [1, 2]
    assert history["skipped_steps"] == [0, 0]
    (message,) = messages  # once, although each epoch has one
    spike = optimizer.last_spike()
    assert spike.largest > 1000
    assert spike.limit < 100
    assert spike.name in message
    assert message.startswith("A step was skipped as a spike, with a gradient of")
    line = capsys.readouterr().out
    assert "30 steps applied, 0 skipped in this fit; it is 1," in line
    last = f"Spikes skipped: 2, the last with a gradient of {spike.largest:.3g} in "
    assert f"{last}{spike.name}, " in line
    assert f" times the limit of {spike.limit:.3g}." in line
