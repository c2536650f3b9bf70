"""LossScaleOptimizer, for the Keras that the inner optimizer belongs to.

This package knows loss scales, gradients and replicas, but not how a loss scale moves.
In the order of its imports:

* `warning_texts`: the texts of the wrappers' warnings;
* `bundle`: one replica's gradients on their way through a step;
* `checking`: their checks, when they are unscaled and when they are applied;
* `spike_record`: which step was skipped for its size, and in which variable;
* `fault_record`: which gradients were at fault in the last skipped step;
* `provenance`: a package: are these gradients still scaled, and by what?
* `overwriting`: new values that float8 layers pass in the place of gradients;
* `step`: a package: unscale, check, reduce, adjust, apply or skip;
* `keras_arguments`: translates the arguments of Keras's own wrappers into ours;
* `keras_state`: converts the loss scale of Keras's own wrapper, with its state;
* `wrappers`: picks the wrapper for an optimizer, and refuses some optimizers;
* `config`: turns a wrapper into a config, and configs into a wrapper;
* `forwarding`: attributes that the inner optimizer or the loss scale has;
* `inner_sum`: keeps an inner optimizer from summing what the wrapper has summed;
* `communicating`: in which dtype the replicas exchange gradients;
* `reports`: reports on the last skipped step, for users;
* `base`: what the wrappers of all Kerases have in common;
* `keras2_base`: what both generations of Keras 2's optimizers have in common;
* `keras2`, `keras3`: the wrappers. Saved files name these two modules, so neither may
  be renamed.

Begin with `base`, then `step`.
"""

from lossscale.optimizer.base import LossScaleOptimizer
from lossscale.optimizer.warning_texts import LossScaleWarning
from lossscale.runtime import kerases

# Importing a wrapper registers it, here and with its Keras.
if kerases.keras3() is not None:
    from lossscale.optimizer import keras3  # noqa: F401
from lossscale.optimizer import keras2  # noqa: F401

__all__ = ["LossScaleOptimizer", "LossScaleWarning"]
