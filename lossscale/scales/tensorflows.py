"""Converts TensorFlow's own loss scales to ours, with their state."""

from __future__ import annotations

from typing import Any, Optional

import tensorflow as tf

from lossscale.runtime import mode
from lossscale.scales.base import LossScale
from lossscale.scales.dynamic import DynamicLossScale
from lossscale.scales.fixed import FixedLossScale
from lossscale.scales.interchange import import_state


def as_ours(theirs: Any) -> Optional[LossScale]:
    """Returns a loss scale of ours with the rule and state of one of TensorFlow's.

    Args:
      theirs: Anything. The two loss scales that TensorFlow defines are converted.
        Subclasses of them are not, since they may have another rule.

    Returns:
      A new loss scale, in the state of `theirs`. In a graph, which cannot read that
      state, it is in its initial state. None if `theirs` is neither of the two.
    """
    # TensorFlow 2.4 also has it as `tf.mixed_precision.experimental`. Up to 2.21 this
    # is the only public name that all versions share.
    names = getattr(tf.compat.v1.mixed_precision, "experimental", None)
    if type(theirs) is getattr(names, "FixedLossScale", None):
        return FixedLossScale(**theirs.get_config())
    if type(theirs) is not getattr(names, "DynamicLossScale", None):
        return None
    config = theirs.get_config()
    if config["initial_loss_scale"] < 1:  # or ours would start below its floor of 1
        config["min_loss_scale"] = config["initial_loss_scale"]
    with tf.init_scope():
        if not mode.current().knows_values:
            return DynamicLossScale(**config)
        # The counter is not public (seen on 2.4 to 2.21).
        state = {"current_loss_scale": theirs(), "good_steps": theirs._num_good_steps}
        return import_state("tensorflow", state, **config)
