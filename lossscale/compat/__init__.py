"""Programs of TensorFlow 1, by a changed import.

Knows loss scales, and the step and the provenance of `optimizer`; no arithmetic of a
rule, and no Keras. In the order of its imports:

* `optimizer`: LossScaleOptimizer for the optimizers of `tf.compat.v1.train`;
* `rewrite`: TensorFlow's rewrite of graphs to float16;
* `v1`: the names.

Begin with `optimizer`.
"""

from lossscale.compat import v1

__all__ = ["v1"]
