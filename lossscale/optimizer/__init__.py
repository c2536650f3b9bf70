"""LossScaleOptimizer, for the Keras that the inner optimizer belongs to.

This package knows loss scales, gradients and replicas, but not how a loss scale moves.
In the order of its imports:

* `uses`: what becomes of one loss scale, for all optimizers that share it;
* `pending`: is a division pending, and what divides each gradient?
* `record`: why the last steps were skipped: not finite, a bad loss, or a spike;
* `reduction`: one flag of one replica or several, and sums of gradients in float16;
* `sharing`: one step of several optimizers that share a loss scale;
* `step`: one step: prepare, check, reduce, adjust, apply or skip;
* `engine`: `LossScaleEngine`, the loss scaling of one optimizer, of whatever framework.
  Nothing up to here asks which Keras it is;
* `files`: what Keras's files and lists of weights hold of a wrapper;
* `dialect`: what one Keras's optimizers are called, hold and save;
* `wrappers`: which wrapper for which optimizer;
* `keras_arguments`: the arguments, configs and states of Keras's own wrappers;
* `base`: `LossScaleOptimizer`, what the wrappers for both Keras versions share: each
  holds an engine and a dialect;
* `keras2`, `keras3`: the wrappers, with their dialects. Saved files name these two
  modules, so neither may be renamed.

Begin with `engine`, then `step` and `pending`. Where gradients come from is found out
in the package `provenance`, which you need not read for that.
"""

from lossscale.optimizer.base import LossScaleOptimizer
from lossscale.optimizer.engine import LossScaleEngine
from lossscale.runtime import keras_versions
from lossscale.runtime.loss_scale_warning import LossScaleWarning

# Importing a wrapper registers it, here and with its Keras.
if keras_versions.keras3() is not None:
    from lossscale.optimizer import keras3  # noqa: F401
from lossscale.optimizer import keras2  # noqa: F401

__all__ = ["LossScaleEngine", "LossScaleOptimizer", "LossScaleWarning"]
