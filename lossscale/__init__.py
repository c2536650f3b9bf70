"""Loss scaling for TensorFlow 2 and Keras, in float16, right on every replica."""

from lossscale.base import LossScale
from lossscale.dynamic import DynamicLossScale
from lossscale.finite import all_finite
from lossscale.fixed import FixedLossScale
from lossscale.managers import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
)
from lossscale.optimizer import LossScaleOptimizer, LossScaleWarning
from lossscale.serialization import deserialize, get, serialize

__version__ = "0.1.0"

__all__ = [
    "DynamicLossScale",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScale",
    "FixedLossScaleManager",
    "LossScale",
    "LossScaleManager",
    "LossScaleOptimizer",
    "LossScaleWarning",
    "all_finite",
    "deserialize",
    "get",
    "serialize",
]
