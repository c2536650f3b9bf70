"""LossScaleOptimizer, for the Keras that the inner optimizer belongs to.

Knows loss scales, gradients and replicas; no arithmetic of a rule. In the order of its
imports:

* `warning_texts`: what the wrappers warn of;
* `bundle`: one replica's gradients on their way through a step;
* `checking`: their checks, as they are unscaled and as they are applied;
* `spike_record`: which step was skipped for its size, and where that was;
* `fault_record`: which gradients were at fault in the last skipped step;
* `provenance`: a room of its own: are these gradients still scaled, and by what?
* `overwriting`: new values that float8 layers hand over in the place of gradients;
* `step`: a room of its own: unscale, check, reduce, adjust, apply or skip;
* `keras_arguments`: what Keras's own wrappers are given, as what ours are;
* `keras_state`: the loss scale of a Keras's own wrapper, with its state;
* `wrappers`, `config`, `forwarding`: which wrapper for which optimizer; the wrapper as
  a config, and from others; attributes that the inner optimizer or the loss scale has;
* `reports`: what a user may ask of the last skipped step;
* `base`: what the wrappers of all Kerases have in common;
* `keras2_base`: what both generations of Keras 2's optimizers have in common;
* `inner_sum`: how Keras 3's optimizers are kept from adding gradients up;
* `keras2`, `keras3`: the wrappers. Files name these two modules: they stay.

Begin with `base`, then `step`.
"""

from lossscale.optimizer.base import LossScaleOptimizer
from lossscale.optimizer.warning_texts import LossScaleWarning
from lossscale.runtime import kerases

# Importing a wrapper makes it known, to us and to its Keras.
if kerases.keras3() is not None:
    from lossscale.optimizer import keras3  # noqa: F401
from lossscale.optimizer import keras2  # noqa: F401

__all__ = ["LossScaleOptimizer", "LossScaleWarning"]
