"""The names that programs of TensorFlow 1 use: import them from here.

`LossScaleOptimizer` is that of `tf.contrib.mixed_precision`, the other two are those of
`tf.train.experimental` and `tf.compat.v1.mixed_precision`.
"""

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
