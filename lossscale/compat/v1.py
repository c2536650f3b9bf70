"""The names that programs of TensorFlow 1 use."""

from lossscale.compat.optimizer import LossScaleOptimizer
from lossscale.compat.rewrite import (
    MixedPrecisionLossScaleOptimizer,
    enable_mixed_precision_graph_rewrite,
)

__all__ = [
    "LossScaleOptimizer",
    "MixedPrecisionLossScaleOptimizer",
    "enable_mixed_precision_graph_rewrite",
]
