"""TensorFlow's own loss scales as ours, with their state."""

from __future__ import annotations

from typing import Any, Optional

import tensorflow as tf

from lossscale.runtime import mode
from lossscale.scales.base import LossScale
from lossscale.scales.dynamic import DynamicLossScale
from lossscale.scales.fixed import FixedLossScale
from lossscale.scales.interchange import import_state


def as_ours(theirs: Any) -> Optional[LossScale]:
    """Returns a loss scale of ours that goes on where one of TensorFlow's is.

    Args:
      theirs: Anything. Of TensorFlow's loss scales the two that it defines itself are
        known, and no subclass, which may have another rule.

    Returns:
      A new loss scale, in the state of `theirs`. In a graph no state can be read: it is
      in its initial state. None: `theirs` is none of the two.
    """
    # As `tf.mixed_precision.experimental` in TensorFlow 2.4, and under this name up to
    # 2.21: there is no other public one.
    names = getattr(tf.compat.v1.mixed_precision, "experimental", None)
    if type(theirs) is getattr(names, "FixedLossScale", None):
        return FixedLossScale(**theirs.get_config())
    if type(theirs) is not getattr(names, "DynamicLossScale", None):
        return None
    config = theirs.get_config()
    if config["initial_loss_scale"] < 1:  # ours must not start below its floor
        config["min_loss_scale"] = config["initial_loss_scale"]
    with tf.init_scope():
        if not mode.current().knows_values:
            return DynamicLossScale(**config)
        # The counter is not public (seen on 2.4 to 2.21).
        state = {"current_loss_scale": theirs(), "good_steps": theirs._num_good_steps}
        return import_state("tensorflow", state, **config)
