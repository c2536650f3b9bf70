"""LossScaleOptimizer, for the Keras that the inner optimizer belongs to."""

from lossscale import _keras
from lossscale.optimizer.base import LossScaleOptimizer, LossScaleWarning

# Importing a wrapper makes it known, to us and to its Keras.
if _keras.keras3() is not None:
    from lossscale.optimizer import keras3  # noqa: F401
from lossscale.optimizer import keras2  # noqa: F401

__all__ = ["LossScaleOptimizer", "LossScaleWarning"]
