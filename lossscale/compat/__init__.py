"""LossScaleOptimizer for programs of TensorFlow 1, which change only their imports.

Users import `lossscale.compat.v1`. These files know loss scales, and the step and the
pending division of `optimizer`, but no arithmetic of a rule, and no Keras. In the order
of imports:

* `optimizer`: LossScaleOptimizer for the optimizers of `tf.compat.v1.train`;
* `rewrite`: TensorFlow's rewrite of graphs to float16;
* `v1`: the public names.

Begin with `optimizer`.
"""

from lossscale.compat import v1

__all__ = ["v1"]
