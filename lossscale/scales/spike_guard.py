"""SpikeGuard: skips steps whose gradients are far larger than those before."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Dict, Optional

import tensorflow as tf

from lossscale import arguments
from lossscale.runtime import registry
from lossscale.runtime.aliases import Flag, Scalar, Tensor
from lossscale.scales import serialization
from lossscale.scales.adjustment import Verdict
from lossscale.scales.base import LossScale

#: The largest `window`. The rule reads all of it at every step.
_WIDEST = 2**16
#: exp of this is above float32's largest number.
_LOG_ABOVE = 89.0


def _to_guard(name: str, identifier: Any) -> LossScale:
    del name  # `get` and the errors below have the same
    held = serialization.get(identifier)
    if held is None:
        raise TypeError(
            "`loss_scale` must be a loss scale to guard, got None. For bfloat16 and "
            "float32, which need no loss scale, write SpikeGuard(1)."
        )
    if isinstance(held, SpikeGuard):
        raise ValueError(
            "`loss_scale` must not be a SpikeGuard itself, got one. Guard the loss "
            "scale that it holds: SpikeGuard(guard.loss_scale)."
        )
    return held


_ARGUMENTS = arguments.Declared(
    threshold=partial(arguments.factor, above=0.0),
    window=partial(arguments.count, least=2, most=_WIDEST),
    max_in_a_row=partial(arguments.count, most=arguments.MOST_STEPS),
    min_ratio=partial(arguments.factor, above=1.0),
    loss_scale=_to_guard,  # comes last, since it may create variables
)


@registry.serializable
class SpikeGuard(LossScale):
    """A loss scale that holds another one, and skips steps with huge gradients.

    Use it instead of the loss scale that it holds, whose value it has, if bad batches
    may make finite gradients that are a thousand times too large; for bfloat16 and
    float32, write `SpikeGuard(1)`:

    >>> guard = SpikeGuard(1, window=4)
    >>> steps = [1.0, 1.25, 0.75, 1.0, 1000.0, 1.0]
    >>> [bool(guard.adjust(True, largest)[1]) for largest in steps]
    [True, True, True, True, False, True]
    >>> int(guard.spikes)
    1

    `judge` and `next_state` are the rule; docs/choosing.md explains it. To `loss_scale`
    and to the counters of skipped steps a spike is no step.

    Args:
      loss_scale: Whatever `lossscale.get` accepts, except None and a SpikeGuard: the
        loss scale to guard. A step is applied if both apply it.
      threshold: A positive number: spikes are so many standard deviations above the
        mean of the last steps.
      window: An integer of 2 or more, the number of steps to compare with.
      max_in_a_row: An integer, how many spikes in a row are skipped.
      min_ratio: A number above 1. A gradient of at most this many times the usual size
        is no spike.

    Attributes:
      loss_scale: The `LossScale` that this guard holds.
      recent: `float32` variable of shape `[window]`, the largest gradients of the last
        applied steps, newest last.
      limit: `float32` variable of shape `[]`. A larger gradient is a spike.
      spikes: `int64` variable of shape `[]`, how many steps the guard has skipped.
      above_in_a_row: `int64` variable of shape `[]`, the last finite steps above the
        limit, skipped or not.

    Raises:
      TypeError: An argument has the wrong type, or `loss_scale` overrides `update`.
      ValueError: An argument is out of its range, or `loss_scale` is a SpikeGuard.

    Source: OLMo-core, levanter and llm.c: docs/origins.md.
    """

    needs_largest = True
    skips_spikes = True
    left_out_as = "spike"
    # File format: Keras's files have these names of its variables.
    _prefix = "guard_"

    def __init__(
        self,
        loss_scale: Any = "dynamic",
        threshold: float = 6.0,
        window: int = 128,
        max_in_a_row: int = 3,
        *,
        min_ratio: float = 2.0,
    ) -> None:
        _ARGUMENTS.keep(
            self,
            threshold=threshold,
            window=window,
            max_in_a_row=max_in_a_row,
            min_ratio=min_ratio,
            loss_scale=loss_scale,
        )
        super().__init__()
        self.recent = self._add_weight("recent", [0.0] * self.window, tf.float32)
        self.limit = self._add_weight("limit", arguments.FLOAT32_MAX, tf.float32)
        self.spikes = self._add_weight("spikes", 0, tf.int64)
        self.above_in_a_row = self._add_weight("above_in_a_row", 0, tf.int64)

    def judge(self, state: Any, is_finite: Flag, largest: Optional[Scalar]) -> Verdict:
        """Leaves a spike out, by this rule.

        ```
        state   limit = M, spikes = 0, above_in_a_row = 0    # M is float32's largest
        judge(state, is_finite, largest):
          if is_finite:
            above_in_a_row = above_in_a_row + 1 if largest > limit else 0
          is_spike = is_finite and 0 < above_in_a_row <= max_in_a_row
          if is_spike: spikes += 1
          should_apply_gradients = is_finite and not is_spike
        ```

        After `max_in_a_row` spikes in a row all steps are applied until one is below
        the limit again.
        """
        above = tf.where(largest > state.limit, state.above_in_a_row + 1, 0)
        above = tf.where(is_finite, above, state.above_in_a_row)
        gives_way = tf.logical_or(above < 1, above > self.max_in_a_row)
        is_spike = tf.logical_and(is_finite, tf.logical_not(gives_way))
        is_usual = tf.logical_not(is_spike)
        return Verdict(
            should_apply=is_usual,
            is_told=is_usual,
            kept={
                "above_in_a_row": above,
                "spikes": state.spikes + tf.cast(is_spike, tf.int64),
            },
        )

    def next_state(
        self, state: Any, is_finite: Flag, largest: Scalar = None
    ) -> Dict[str, Tensor]:
        """Returns the new limit. It is not called at a spike, nor is `loss_scale`'s.

        ```
        state   recent = []
        next_state(state, is_finite, largest):
          if is_finite and largest >= 2**-126:  # zero has no logarithm
            recent = (recent + [largest])[-window:]
          if len(recent) == window:         # in float64, and limit rounded to float32
            logs = [log(each) for each in recent]
            mean = sum(logs) / window
            deviation = sqrt(sum((x - mean)**2 for x in logs) / window)
            distance = max(threshold * deviation, log(min_ratio))
            limit = min(exp(mean + distance), M)
        ```
        """
        moved = tf.concat([state.recent[1:], tf.reshape(largest, [1])], 0)
        enters = tf.logical_and(is_finite, largest >= arguments.FLOAT32_MIN)
        recent = tf.where(enters, moved, state.recent)
        # From float64 every mode rounds the limit to the same float32.
        present = tf.maximum(recent, arguments.FLOAT32_MIN)
        logs = tf.math.log(tf.cast(present, tf.float64))
        mean = tf.reduce_mean(logs)
        distances = logs - mean
        deviation = tf.sqrt(tf.reduce_mean(distances * distances))
        distance = tf.maximum(self.threshold * deviation, math.log(self.min_ratio))
        limit = tf.exp(tf.minimum(mean + distance, _LOG_ABOVE))  # is finite
        limit = tf.cast(tf.minimum(limit, arguments.FLOAT32_MAX), tf.float32)
        limit = tf.where(recent[0] > 0.0, limit, arguments.FLOAT32_MAX)
        return {"recent": recent, "limit": limit}

    def get_config(self) -> Dict[str, Any]:
        within = serialization.serialize(self.loss_scale)
        return {**_ARGUMENTS.config(self), "loss_scale": within}
