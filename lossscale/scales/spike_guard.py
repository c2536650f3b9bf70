"""SpikeGuard: skips steps whose gradients are far larger than those before."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Dict, Tuple

import tensorflow as tf

from lossscale import arguments
from lossscale.runtime import registry
from lossscale.runtime.aliases import Flag, Scalar, Tensor
from lossscale.scales.guard import Guard

#: The largest `window`. The rule reads all of it at every step.
_WIDEST = 2**16
#: exp of this is above float32's largest number.
_LOG_ABOVE = 89.0


_ARGUMENTS = arguments.Declared(
    threshold=partial(arguments.factor, above=0.0),
    window=partial(arguments.count, least=2, most=_WIDEST),
    max_in_a_row=partial(arguments.count, most=arguments.MOST_STEPS),
    min_ratio=partial(arguments.factor, above=1.0),
)


@registry.serializable
class SpikeGuard(Guard):
    """Leaves out steps whose gradients are far larger than those before.

    Use it if bad batches may make finite gradients that are a thousand times too large.
    In bfloat16 and float32 use it with `loss_scale=1`.

    >>> import lossscale
    >>> run = lossscale.simulate(
    ...     1,
    ...     guard=SpikeGuard(window=4),
    ...     largest=[1.0, 1.25, 0.75, 1.0, 1000.0, 1.0],
    ... )
    >>> run.applied.tolist()
    [True, True, True, True, False, True]

    `judge` is the rule;
    https://github.com/lossscale/lossscale/blob/main/docs/choosing.md explains it.

    Args:
      threshold: A positive number: spikes are so many standard deviations above the
        mean of the last steps.
      window: An integer of 2 or more, the number of steps to compare with.
      max_in_a_row: An integer, how many spikes in a row are skipped.
      min_ratio: A number above 1. A gradient of at most this many times the usual size
        is no spike.

    Attributes:
      recent: `float32` variable of shape `[window]`, the largest gradients of the last
        applied steps, newest last.
      limit: `float32` variable of shape `[]`. A larger gradient is a spike.
      spikes: `int64` variable of shape `[]`, how many steps the guard has skipped.
      above_in_a_row: `int64` variable of shape `[]`, the last finite steps above the
        limit, skipped or not.

    Raises:
      TypeError: An argument has the wrong type.
      ValueError: An argument is out of its range.

    Source: OLMo-core, levanter and llm.c:
      https://github.com/lossscale/lossscale/blob/main/docs/origins.md.
    """

    left_out_as = "spike"

    def __init__(
        self,
        loss_scale: None = None,
        *,
        threshold: float = 6.0,
        window: int = 128,
        max_in_a_row: int = 3,
        min_ratio: float = 2.0,
    ) -> None:
        if loss_scale is not None:  # as in 3.1, where it held one
            raise TypeError(
                "SpikeGuard holds no loss scale and takes its arguments by name, got "
                f"{arguments.shown(loss_scale)}. Write LossScaleOptimizer("
                'inner_optimizer, "dynamic", guard=SpikeGuard(...)).'
            )
        _ARGUMENTS.keep(self, locals())
        super().__init__()
        self.recent = self._add_weight("recent", [0.0] * self.window, tf.float32)
        self.limit = self._add_weight("limit", arguments.FLOAT32_MAX, tf.float32)
        self.spikes = self._add_weight("spikes", 0, tf.int64)
        self.above_in_a_row = self._add_weight("above_in_a_row", 0, tf.int64)

    def judge(self, state: Any, largest: Scalar) -> Tuple[Flag, Dict[str, Tensor]]:
        """Leaves a spike out, by this rule.

        ```
        state   limit = M, spikes = 0, above_in_a_row = 0    # M is float32's largest
                recent = []
        judge(state, largest):
          above_in_a_row = above_in_a_row + 1 if largest > limit else 0
          is_spike = 0 < above_in_a_row <= max_in_a_row
          if is_spike: spikes += 1
          else:
            if largest >= 2.0**-126:  # zero has no logarithm
              recent = (recent + [largest])[-window:]
            if len(recent) == window:       # in float64, and limit rounded to float32
              logs = [log(each) for each in recent]
              mean = sum(logs) / window
              deviation = sqrt(sum((x - mean)**2 for x in logs) / window)
              distance = max(threshold * deviation, log(min_ratio))
              limit = min(exp(mean + distance), M)
          should_apply = not is_spike
        ```

        After `max_in_a_row` spikes in a row all steps are applied until one is below
        the limit again.
        """
        above = tf.where(largest > state.limit, state.above_in_a_row + 1, 0)
        is_usual = tf.logical_or(above < 1, above > self.max_in_a_row)
        moved = tf.concat([state.recent[1:], tf.reshape(largest, [1])], 0)
        enters = tf.logical_and(is_usual, largest >= arguments.FLOAT32_MIN)
        recent = tf.where(enters, moved, state.recent)
        limit = tf.where(is_usual, self._limit(recent), state.limit)
        spikes = state.spikes + tf.cast(tf.logical_not(is_usual), tf.int64)
        values = {"above_in_a_row": above, "spikes": spikes}
        return is_usual, {**values, "recent": recent, "limit": limit}

    def _limit(self, recent: Tensor) -> Scalar:
        # From float64 every mode rounds the limit to the same float32.
        present = tf.maximum(recent, arguments.FLOAT32_MIN)
        logs = tf.math.log(tf.cast(present, tf.float64))
        mean = tf.reduce_mean(logs)
        distances = logs - mean
        deviation = tf.sqrt(tf.reduce_mean(distances * distances))
        distance = tf.maximum(self.threshold * deviation, math.log(self.min_ratio))
        limit = tf.exp(tf.minimum(mean + distance, _LOG_ABOVE))  # is finite
        limit = tf.cast(tf.minimum(limit, arguments.FLOAT32_MAX), tf.float32)
        return tf.where(recent[0] > 0.0, limit, arguments.FLOAT32_MAX)

    def get_config(self) -> Dict[str, Any]:
        return _ARGUMENTS.config(self)
