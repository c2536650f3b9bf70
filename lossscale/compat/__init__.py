"""Programs of TensorFlow 1, which change only their imports.

This package knows loss scales, and the step and the pending division of `optimizer`,
but no arithmetic of a rule, and no Keras:

* `managers`: the LossScaleManager family, by contrib's names;
* `v1`: LossScaleOptimizer, and what else such programs import.
"""

from lossscale.compat import v1

__all__ = ["v1"]
