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
    """Returns the loss scale that `identifier` stands for, if a guard can hold it."""
    del name  # `get` and the errors below have the same
    held = serialization.get(identifier)
    if held is None:
        raise TypeError(
            "`loss_scale` must be a loss scale to guard, got None. For bfloat16 and "
            "float32, which need no loss scale, write SpikeGuard(1)."
        )
    if isinstance(held, SpikeGuard):
        raise ValueError(
            f"`loss_scale` must not be a SpikeGuard itself, got {held!r}. Guard the "
            "loss scale that it holds: SpikeGuard(guard.loss_scale)."
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

    A bad batch, a wrong label or a damaged file can make finite gradients that are a
    thousand times larger than usual. Applied once, they can cost a run all that it has
    learned. Use the guard instead of the loss scale that it holds, whose value it has;
    for a bfloat16 or float32 run, write `SpikeGuard(1)`:

    >>> guard = SpikeGuard(1, window=4)
    >>> steps = [1.0, 1.25, 0.75, 1.0, 1000.0, 1.0]
    >>> [bool(guard.adjust(True, largest)[1]) for largest in steps]
    [True, True, True, True, False, True]
    >>> int(guard.spikes)
    1

    ```
    state   recent = [], limit = M, spikes = 0, above_in_a_row = 0
                                        # M is float32's largest number
    judge(state, is_finite, largest):
      if is_finite:
        above_in_a_row = above_in_a_row + 1 if largest > limit else 0
      is_spike = is_finite and 0 < above_in_a_row <= max_in_a_row
      if is_spike: spikes += 1
      should_apply_gradients = is_finite and not is_spike
    next_state(state, is_finite, largest):  # not at a spike; loss_scale's runs, too
      if is_finite and largest >= 2**-126:  # zero has no logarithm
        recent = (recent + [largest])[-window:]
      if len(recent) == window:             # in float64, and limit rounded to float32
        logs = [log(each) for each in recent]
        mean = sum(logs) / window
        deviation = sqrt(sum((x - mean)**2 for x in logs) / window)
        room = max(threshold * deviation, log(min_ratio))
        limit = min(exp(mean + room), M)
    ```

    To `loss_scale` and to the counters of skipped steps a spike is no step. After
    `max_in_a_row` spikes in a row the guard applies all steps until one is below the
    limit again, so that it learns a new level of gradients.

    Args:
      loss_scale: The loss scale to guard: whatever `lossscale.get` accepts, except None
        and a SpikeGuard. It may leave steps out, too: a step is applied if both apply
        it, and the rules of both learn of it if both would have them learn.
      threshold: A positive number of standard deviations. A step further above the mean
        of the last ones is a spike.
      window: An integer of 2 or more, the number of steps to compare with.
      max_in_a_row: An integer, how many spikes in a row are skipped.
      min_ratio: A number above 1. A step is no spike if its largest gradient is at most
        this many times the geometric mean of `recent`.

    Attributes:
      loss_scale: The `LossScale` that this guard holds.
      recent: `float32` variable of shape `[window]`, the largest gradients of the last
        applied steps, the newest last, with zeros in the place of those to come.
      limit: `float32` variable of shape `[]`. A larger gradient is a spike.
      spikes: `int64` variable of shape `[]`, the number of steps that this guard has
        skipped.
      above_in_a_row: `int64` variable of shape `[]`, how many of the last finite steps
        in a row were above the limit, skipped or not.

    Raises:
      TypeError: An argument has the wrong type, or `loss_scale` overrides `update`.
      ValueError: An argument is out of its range, or `loss_scale` is a SpikeGuard.

    Source: OLMo-core, levanter and llm.c; see the page *Origins*.
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
        moved = tf.concat([state.recent[1:], tf.reshape(largest, [1])], 0)
        enters = tf.logical_and(is_finite, largest >= arguments.FLOAT32_MIN)
        recent = tf.where(enters, moved, state.recent)
        # From float64 every mode rounds the limit to the same float32.
        present = tf.maximum(recent, arguments.FLOAT32_MIN)
        logs = tf.math.log(tf.cast(present, tf.float64))
        mean = tf.reduce_mean(logs)
        distances = logs - mean
        deviation = tf.sqrt(tf.reduce_mean(distances * distances))
        room = tf.maximum(self.threshold * deviation, math.log(self.min_ratio))
        limit = tf.exp(tf.minimum(mean + room, _LOG_ABOVE))  # is finite
        limit = tf.cast(tf.minimum(limit, arguments.FLOAT32_MAX), tf.float32)
        limit = tf.where(recent[0] > 0.0, limit, arguments.FLOAT32_MAX)
        return {"recent": recent, "limit": limit}

    def get_config(self) -> Dict[str, Any]:
        within = serialization.serialize(self.loss_scale)
        return {**_ARGUMENTS.config(self), "loss_scale": within}
