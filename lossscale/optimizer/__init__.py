"""LossScaleOptimizer, for the Keras that the inner optimizer belongs to.

This package knows loss scales, gradients and replicas, but not how a loss scale moves.
In the order of its imports:

* `warnings`, `bundle`, `kinds`, `pending`: one replica's gradients, and what divides
  them;
* `reduction`, `record`, `step`: one step on all replicas, and why it was skipped;
* `wrappers`, `arguments`, `base`: what the wrappers of all Kerases have in common;
* `keras2`, `keras3`: the wrappers. Saved files name these two modules, so neither may
  be renamed.

Begin with `base`, then `pending` and `step`.
"""

from lossscale.optimizer.base import LossScaleOptimizer
from lossscale.runtime import kerases
from lossscale.runtime.warning import LossScaleWarning

# Importing a wrapper registers it, here and with its Keras.
if kerases.keras3() is not None:
    from lossscale.optimizer import keras3  # noqa: F401
from lossscale.optimizer import keras2  # noqa: F401

__all__ = ["LossScaleOptimizer", "LossScaleWarning"]
