"""Loss scaling for float16 in TensorFlow 2 and Keras, correct on every replica."""

import os as _os
import sys as _sys
from typing import Any as _Any

# `python -m lossscale` is a report to paste. This comes before its own first line.
if getattr(_sys, "orig_argv", [])[1:3] == ["-m", "lossscale"]:
    _os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from lossscale import arguments, compat, presets
from lossscale.compat.managers import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
)
from lossscale.gradients.check import all_finite
from lossscale.monitor.callback import LossScaleMonitor
from lossscale.optimizer import LossScaleEngine, LossScaleOptimizer, LossScaleWarning
from lossscale.ranges.forward import ForwardRanges, forward_ranges
from lossscale.ranges.gradient_report import GradientRanges, gradient_ranges
from lossscale.ranges.nonfinite import NonfiniteReport, find_nonfinite
from lossscale.scales.base import LossScale
from lossscale.scales.dynamic import DynamicLossScale
from lossscale.scales.fixed import FixedLossScale
from lossscale.scales.guard import Guard
from lossscale.scales.headroom import HeadroomLossScale
from lossscale.scales.serialization import deserialize, get, serialize
from lossscale.scales.spike_guard import SpikeGuard
from lossscale.simulation import Simulation, simulate

__version__ = "4.0.0"

__all__ = [
    "DynamicLossScale",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "FixedLossScaleManager",
    "ForwardRanges",
    "GradientRanges",
    "Guard",
    "HeadroomLossScale",
    "LossScale",
    "LossScaleEngine",
    "LossScaleManager",
    "LossScaleMonitor",
    "LossScaleOptimizer",
    "LossScaleWarning",
    "NonfiniteReport",
    "Simulation",
    "SpikeGuard",
    "all_finite",
    "compat",
    "deserialize",
    "find_nonfinite",
    "forward_ranges",
    "get",
    "gradient_ranges",
    "presets",
    "serialize",
    "simulate",
]


def __getattr__(name: str) -> _Any:
    """Says of a wrong name which one is near."""
    near = arguments.did_you_mean(name, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{near}")
