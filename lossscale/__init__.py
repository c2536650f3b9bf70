"""Loss scaling for TensorFlow 2 and Keras, in float16, right on every replica."""

from lossscale import presets
from lossscale.base import LossScale
from lossscale.callbacks import LossScaleMonitor
from lossscale.dynamic import DynamicLossScale
from lossscale.finite import all_finite
from lossscale.fixed import FixedLossScale
from lossscale.interchange import export_state, import_state
from lossscale.managers import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
)
from lossscale.optimizer import LossScaleOptimizer, LossScaleWarning
from lossscale.range_report import GradientRanges
from lossscale.ranges import gradient_ranges
from lossscale.record import Run, load_run, save_run
from lossscale.serialization import deserialize, get, serialize
from lossscale.simulate import simulate
from lossscale.simulation import Simulation

__version__ = "1.0.0"

__all__ = [
    "DynamicLossScale",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "FixedLossScaleManager",
    "GradientRanges",
    "LossScale",
    "LossScaleManager",
    "LossScaleMonitor",
    "LossScaleOptimizer",
    "LossScaleWarning",
    "Run",
    "Simulation",
    "all_finite",
    "deserialize",
    "export_state",
    "get",
    "gradient_ranges",
    "import_state",
    "load_run",
    "presets",
    "save_run",
    "serialize",
    "simulate",
]
