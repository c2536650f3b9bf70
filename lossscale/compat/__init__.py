"""LossScaleOptimizer for programs of TensorFlow 1, which change only their imports.

This room knows loss scales, and the step and the pending division of `optimizer`, but
no arithmetic of a rule, and no Keras. It is one file:

* `v1`: what such programs import.
"""

from lossscale.compat import v1

__all__ = ["v1"]
