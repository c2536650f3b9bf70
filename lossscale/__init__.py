"""Loss scaling for float16 in TensorFlow 2 and Keras, correct on every replica."""

from lossscale import compat, presets
from lossscale.blocks import ScaledBlock
from lossscale.gradients.check import all_finite
from lossscale.monitor.callback import LossScaleMonitor
from lossscale.optimizer import (
    LossScaleEngine,
    LossScaleOptimizer,
    LossScaleWarning,
)
from lossscale.ranges.forward import ForwardRanges, forward_ranges
from lossscale.ranges.gradient_report import GradientRanges, gradient_ranges
from lossscale.ranges.nonfinite import NonfiniteReport, find_nonfinite
from lossscale.scales.base import LossScale, Verdict
from lossscale.scales.dynamic import DynamicLossScale
from lossscale.scales.fixed import FixedLossScale
from lossscale.scales.headroom import HeadroomLossScale
from lossscale.scales.interchange import export_state, import_state
from lossscale.scales.log_normal import LogNormalLossScale
from lossscale.scales.managers import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
)
from lossscale.scales.serialization import deserialize, get, serialize
from lossscale.scales.spike_guard import SpikeGuard
from lossscale.simulation.replay import Simulation, simulate
from lossscale.simulation.run_file import Run, load_run, save_run

__version__ = "2.1.0"

__all__ = [
    "DynamicLossScale",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "FixedLossScaleManager",
    "ForwardRanges",
    "GradientRanges",
    "HeadroomLossScale",
    "LogNormalLossScale",
    "LossScale",
    "LossScaleEngine",
    "LossScaleManager",
    "LossScaleMonitor",
    "LossScaleOptimizer",
    "LossScaleWarning",
    "NonfiniteReport",
    "Run",
    "ScaledBlock",
    "Simulation",
    "SpikeGuard",
    "Verdict",
    "all_finite",
    "compat",
    "deserialize",
    "export_state",
    "find_nonfinite",
    "forward_ranges",
    "get",
    "gradient_ranges",
    "import_state",
    "load_run",
    "presets",
    "save_run",
    "serialize",
    "simulate",
]
