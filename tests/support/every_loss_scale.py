"""Every loss scale, each with arguments that are not the defaults.

What it must keep is in test_conformance.py: a new loss scale adds one entry here.
"""

from __future__ import annotations

import lossscale
from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LogNormalLossScale,
    SpikeGuard,
)

CASES = {
    "fixed": lambda: FixedLossScale(64),
    "fixed-skip": lambda: FixedLossScale(64, skip_nonfinite=True),
    "dynamic": lambda: DynamicLossScale(
        64, 2, 4.0, backoff_factor=0.5, min_loss_scale=2.0, max_loss_scale=512.0
    ),
    "dynamic-hysteresis": lambda: DynamicLossScale(
        64, 3, hysteresis=2, hysteresis_reset=("good", "backoff")
    ),
    "headroom": lambda: HeadroomLossScale(
        64, 3, 5.0, increment_period=3, min_loss_scale=2.0, max_loss_scale=2.0**40
    ),
    "log-normal": lambda: LogNormalLossScale(
        64, 15.0, 0.875, 0.75, 2.0, min_loss_scale=2.0, max_loss_scale=2.0**40
    ),
    "dynamic-search": lambda: DynamicLossScale(64, 3, hysteresis=2, search_period=1),
    "dynamic-cooldown": lambda: DynamicLossScale(64, 3, backoff_cooldown=2),
    "spike-guard": lambda: SpikeGuard(
        DynamicLossScale(64, 2, max_loss_scale=512.0), 0.5, 3, 1, min_ratio=1.25
    ),
    "spike-guard-headroom": lambda: SpikeGuard(
        HeadroomLossScale(64, 3, 5.0, increment_period=3), 2.0, 4, 2
    ),
    "dynamic-tolerance": lambda: DynamicLossScale(
        64, 3, hysteresis=2, overflow_tolerance=0.5
    ),
    "manager": lambda: lossscale.get(
        lossscale.ExponentialUpdateLossScaleManager(64, 2, 3, 4.0, 0.5)
    ),
}
