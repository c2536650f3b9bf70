"""IgnoredLosses: how many bad losses in a row, or nearly, a loss scale may ignore.

With nonfinite_loss="skip" a loss that was not finite before it was scaled does not
lower the loss scale, since no loss scale helps. But a loss that is summed in float16
may be infinite although its gradients are finite at a lower loss scale. If all such
steps were ignored, the loss scale would never fall, and they would never be applied. So
each optimizer keeps a level:

```
level = 0
at each step of this optimizer:
  its loss was not finite:   level += 4
                             if level >= 40: the step counts as an overflow; level = 0
                             else: the loss scale ignores it
  it is applied:             level = max(level - 1, 0)
  anything else:             level stays
```

Of ten such steps in a row the tenth counts. If more than one in five is such a step,
some of them count. If fewer are, as one bad batch in ten, none ever does. A good step
computes nothing for this: at a bad one, the optimizer's own count of applied steps
tells how many were applied since the last one.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

import tensorflow as tf

from lossscale.runtime import keras_versions, replicas
from lossscale.runtime.aliases import Flag, Scalar, Variable
from lossscale.runtime.control import either, group_ops
from lossscale.scales.base import LossScale

#: What a step with a bad loss adds to the level. An applied step takes 1 away.
_ADDED = 4
#: The level at which such a step counts as an overflow.
_MOST = 40
#: Names of variables, which are file format. They exist only with
#: nonfinite_loss="skip". The first is the loss scale's, the others each optimizer's.
IGNORED_STEPS = "ignored_loss_steps"
LEVEL, LEVEL_AT = "ignored_loss_level", "ignored_loss_level_at"


def raised(level: Scalar, applied: Any) -> Tuple[Scalar, Flag]:
    """Returns the level after a step with a bad loss, and whether the step counts.

    `applied` is how many steps were applied since the last one.
    """
    higher = tf.maximum(level - applied, 0) + _ADDED
    counts = higher >= _MOST
    return tf.where(counts, tf.zeros_like(higher), higher), counts


def read_count(applied_steps: Callable[[], Any]) -> Scalar:
    """Returns an optimizer's count of applied steps, `int64` of shape `[]`."""
    with tf.init_scope():  # a legacy optimizer's is created when it is asked for
        variable = keras_versions.tensor_of(applied_steps())
    return tf.cast(tf.convert_to_tensor(replicas.local_result(variable)), tf.int64)


def count_ignored_steps(loss_scale: LossScale) -> None:
    """Has a loss scale count ignored bad steps."""
    if loss_scale.ignored_loss_steps is None:
        with loss_scale._scope():
            counted = replicas.new_variable(IGNORED_STEPS, 0, tf.int64)
        loss_scale._track_trackable(counted, IGNORED_STEPS)
        loss_scale.ignored_loss_steps = counted


class IgnoredLosses:
    """The level of one optimizer, in variables that each file with its state holds."""

    def __init__(self, applied_steps: Callable[[], Any]) -> None:
        """`applied_steps` returns the optimizer's count of applied steps."""
        self._applied_steps = applied_steps
        #: The level after the last step with a bad loss.
        self.level = replicas.new_variable(LEVEL, 0, tf.int64)
        #: How many steps had been applied then.
        self.at = replicas.new_variable(LEVEL_AT, 0, tf.int64)
        #: How many bad losses have counted, for a monitor. No file holds it.
        self.counted = replicas.new_variable("bad_losses_counted", 0, tf.int64)

    @property
    def saved(self) -> Dict[str, Variable]:
        return {LEVEL: self.level, LEVEL_AT: self.at}

    def rule_learns(self, is_finite: Flag, at_fault: Callable[[], Flag]) -> Flag:
        """Whether the rule learns of a step: not of a bad loss, unless there are many.

        `at_fault` tells whether a loss is at fault. It is asked of bad steps only.
        """
        return either(
            is_finite, lambda: tf.constant(True), lambda: self.counts(at_fault())
        )

    def counts(self, is_of_loss: Flag) -> Flag:
        """Whether a bad step counts. Moves the level if a loss was at fault."""
        applied = read_count(self._applied_steps)
        level, at = tf.convert_to_tensor(self.level), tf.convert_to_tensor(self.at)
        # The optimizer's count may have been set back.
        since = tf.maximum(applied - at, 0)
        higher, counts = raised(level, since)
        counts = tf.logical_and(is_of_loss, counts)
        written = [
            self.level.assign(tf.where(is_of_loss, higher, level), read_value=False),
            self.at.assign(tf.where(is_of_loss, applied, at), read_value=False),
            self.counted.assign_add(tf.cast(counts, tf.int64), read_value=False),
        ]
        # In a session an operation runs only if another one waits for it.
        with tf.control_dependencies([group_ops(written)]):
            return tf.logical_or(counts, tf.logical_not(is_of_loss))
