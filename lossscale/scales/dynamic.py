"""DynamicLossScale: the rule, and nothing else."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Dict, Optional, Sequence

import numpy as np
import tensorflow as tf

from lossscale import arguments, presets
from lossscale.arguments import or_none
from lossscale.gradients import arithmetic
from lossscale.runtime import registry
from lossscale.runtime.aliases import Flag, Scalar, Tensor
from lossscale.runtime.control import select
from lossscale.scales.base import LossScale

HYSTERESIS_RESETS = ("good", "growth", "backoff")
#: The smallest number that float32 rounds to infinity.
_INFINITE = 2.0**128 - 2.0**103
_ARGUMENTS = arguments.Declared(
    "search_period",
    "backoff_cooldown",
    "overflow_tolerance",
    initial_loss_scale=arguments.loss_scale,
    increment_period=arguments.count,
    multiplier=partial(arguments.factor, above=1.0),
    backoff_factor=or_none(arguments.factor, above=0.0, below=1.0),
    hysteresis=arguments.count,
    hysteresis_reset=partial(arguments.names, allowed=HYSTERESIS_RESETS),
    min_loss_scale=arguments.loss_scale,
    max_loss_scale=or_none(arguments.loss_scale),
    search_period=or_none(arguments.count),
    backoff_cooldown=or_none(arguments.count),
    overflow_tolerance=or_none(arguments.share),
)


@registry.serializable
class DynamicLossScale(LossScale):
    """A loss scale that grows while gradients are finite and falls when they are not.

    Use it unless you know the right scale. `next_state` is the rule. When to change it:
    https://github.com/lossscale/lossscale/blob/main/docs/choosing.md.

    >>> loss_scale = DynamicLossScale(initial_loss_scale=4.0, increment_period=2)
    >>> for is_finite in [True, True, False]:
    ...     _ = loss_scale.adjust(is_finite)
    ...     print(float(loss_scale))
    4.0
    8.0
    4.0

    Args:
      initial_loss_scale: The first scale. Rather too high than too low: it comes down
        in a few steps, and goes up in thousands.
      increment_period: How many finite steps in a row it takes to raise the scale.
      multiplier: The scale is multiplied by this number, above 1, when it grows.
      backoff_factor: The scale is multiplied by this number, below 1, at a bad step.
        None: it is divided by `multiplier`.
      hysteresis: How many bad steps it takes to lower the scale once. All of them are
        skipped.
      hysteresis_reset: What sets the count of bad steps back to 0: a tuple of `"good"`
        (a finite step), `"growth"` and `"backoff"` (a change of the scale).
      min_loss_scale: The scale never falls below this floor.
      max_loss_scale: The scale never grows above this ceiling. None: float32's end.
      search_period: Replaces `increment_period` until the first bad step, so that a
        short run finds its scale quickly. None: no search.
      backoff_cooldown: For so many steps after it fell, the scale does not fall again.
        None: it falls at every bad step.
      overflow_tolerance: A bad step lowers the scale only if at least this share of
        recent steps was bad (0 to 1). None: every bad step does.

    Attributes:
      good_steps: `int64` variable of shape `[]`, finite steps in a row since it grew.
      bad_steps: `int64` variable of shape `[]`, the bad steps that `hysteresis` counts.
      cooldown_steps: `int64` variable of shape `[]`, for how many more steps the scale
        does not fall. None without `backoff_cooldown`.
      window_steps: `int64` variable of shape `[]`, the recent steps: those since the
        scale last changed. None without `overflow_tolerance`.
      window_bad_steps: `int64` variable of shape `[]`, the bad steps since the scale
        last fell. None without `overflow_tolerance`.

    Raises:
      TypeError: An argument has the wrong type.
      ValueError: An argument is out of range, or the bounds are out of order.

    Source: https://github.com/lossscale/lossscale/blob/main/docs/origins.md.
    """

    def __init__(
        self,
        initial_loss_scale: float = 2.0**15,
        increment_period: int = 2000,
        multiplier: float = 2.0,
        *,
        backoff_factor: Optional[float] = None,
        hysteresis: int = 1,
        hysteresis_reset: Sequence[str] = ("growth", "backoff"),
        min_loss_scale: float = 1.0,
        max_loss_scale: Optional[float] = None,
        search_period: Optional[int] = None,
        backoff_cooldown: Optional[int] = None,
        overflow_tolerance: Optional[float] = None,
    ) -> None:
        _ARGUMENTS.keep(self, locals())
        arguments.within_bounds(vars(self))
        super().__init__(self.initial_loss_scale)
        # TensorFlow's names, too: its checkpoints restore current_loss_scale and this.
        self.good_steps = self._add_weight("good_steps", 0, tf.int64)
        self.bad_steps = self._add_weight("bad_steps", 0, tf.int64)
        # A file holds the rest only if it is used.
        self.cooldown_steps: Any = None
        if self.backoff_cooldown is not None:
            self.cooldown_steps = self._add_weight("cooldown_steps", 0, tf.int64)
        self.window_steps: Any = None
        self.window_bad_steps: Any = None
        if self.overflow_tolerance is not None:
            self.window_steps = self._add_weight("window_steps", 0, tf.int64)
            self.window_bad_steps = self._add_weight("window_bad_steps", 0, tf.int64)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> DynamicLossScale:
        """Returns a loss scale that moves as another system's does.

        >>> loss_scale = DynamicLossScale.from_preset("megatron", hysteresis=4)
        >>> float(loss_scale), loss_scale.increment_period, loss_scale.hysteresis
        (4294967296.0, 1000, 4)

        Args:
          name: A key of `lossscale.presets.PRESETS`. That table names each preset's
            source, and says how it differs from it.
          **overrides: Arguments of this class, in place of the preset's.

        Raises:
          TypeError: The preset leaves an argument to the caller, and it is missing.
          ValueError: There is no such preset.
        """
        return cls(**presets.preset_arguments(name, overrides))

    # Programs read these names of TensorFlow's own class.
    _current_loss_scale = property(lambda self: self.current_loss_scale)
    _num_good_steps = property(lambda self: self.good_steps)

    def next_state(self, state: Any, is_finite: Flag) -> Dict[str, Tensor]:
        """Returns the values of the variables after one step, by this rule.

        ```
        state   S = initial_loss_scale, good = 0, bad = 0, cooldown = 0
        next_state(state, is_finite):
          searches = search_period is not None and no step was bad so far
          if is_finite:
            good += 1
            if "good" in hysteresis_reset: bad = 0
            if good >= (search_period if searches else increment_period):
              good = 0
              if "growth" in hysteresis_reset: bad = 0
              if max_loss_scale is not None: S = min(S * multiplier, max_loss_scale)
              elif S * multiplier is finite: S = S * multiplier
          else:
            good = 0
            bad += 1
            if bad >= hysteresis and cooldown == 0 and not tolerated:
              cooldown = backoff_cooldown          # it counts down at each step
              S = min(S, max(S * backoff_factor, min_loss_scale))
              if "backoff" in hysteresis_reset: bad = 0
        ```

        A step is tolerated if `window_bad_steps / window_steps` is below
        `overflow_tolerance`, with this step in both. The first counts the bad steps
        since the scale last fell, the second all steps since it last rose or fell. With
        the defaults, this is TensorFlow's rule bit for bit.
        """
        zero, is_bad = tf.constant(0, tf.int64), tf.logical_not(is_finite)
        scale, bad, new = state.current_loss_scale, state.bad_steps, {}

        good = select(is_finite, state.good_steps + 1, zero)
        grows = good >= self._period(state)  # never on a bad step: `good` is 0
        left = zero if "good" in self.hysteresis_reset else bad
        bad = select(is_finite, left, bad + 1)
        backs_off = tf.logical_and(is_bad, bad >= self.hysteresis)
        if self.overflow_tolerance is not None:
            steps = state.window_steps + 1
            of_bad = state.window_bad_steps + tf.cast(is_bad, tf.int64)
            is_share = of_bad / steps >= self.overflow_tolerance  # in float64
            backs_off = tf.logical_and(backs_off, is_share)
        if self.backoff_cooldown is not None:
            left = state.cooldown_steps
            backs_off = tf.logical_and(backs_off, left < 1)
            whole = tf.constant(self.backoff_cooldown, tf.int64)
            left = select(backs_off, whole, tf.maximum(left - 1, zero))
            new["cooldown_steps"] = left
        if self.overflow_tolerance is not None:
            moves = tf.logical_or(grows, backs_off)
            new["window_steps"] = select(moves, zero, steps)
            new["window_bad_steps"] = select(backs_off, zero, of_bad)
        for event, happened in (("growth", grows), ("backoff", backs_off)):
            if event in self.hysteresis_reset:
                bad = select(happened, zero, bad)
        fallen = select(backs_off, self._backed_off(state), scale)
        new["good_steps"], new["bad_steps"] = select(grows, zero, good), bad
        new["current_loss_scale"] = select(grows, self._grown(scale), fallen)
        return new

    def _period(self, state: Any) -> Scalar:
        if self.search_period is None:
            return tf.constant(self.increment_period, tf.int64)
        # A bad loss that the rule ignored does not end the search.
        has_ignored = self.ignored_loss_steps is not None
        ignored = state.ignored_loss_steps if has_ignored else 0
        searches = state.skipped_steps <= ignored
        search_period = tf.constant(self.search_period, tf.int64)
        increment_period = tf.constant(self.increment_period, tf.int64)
        return select(searches, search_period, increment_period)

    def _grown(self, scale: Scalar) -> Scalar:
        multiplier, ceiling = float(np.float32(self.multiplier)), self.max_loss_scale
        if _is_power_of_two(multiplier):
            # float32 holds the product exactly, and it is not computed if it is
            # infinite.
            if ceiling is None:
                fits = scale < 2.0**128 / multiplier
                return scale * select(fits, multiplier, 1.0)
            highest = ceiling / multiplier
            if highest >= arguments.FLOAT32_MIN:
                return tf.minimum(scale, highest) * multiplier
        # float64 holds the whole product, so that it is rounded once, and is finite.
        scale = tf.cast(scale, tf.float64)
        larger = scale * multiplier
        if ceiling is not None:
            larger = tf.minimum(larger, ceiling)
        else:
            larger = select(larger < _INFINITE, larger, scale)
        return tf.cast(larger, tf.float32)

    def _backed_off(self, state: Any) -> Scalar:
        scale, factor = state.current_loss_scale, self.backoff_factor
        multiplier = float(np.float32(self.multiplier))
        if factor is None and _is_power_of_two(multiplier):
            factor = 1.0 / multiplier  # exact, and so is the product
        if factor is not None:
            return tf.maximum(scale * factor, self.min_loss_scale)
        # Compilers must not see the constant, or they would multiply by 1 / multiplier.
        # So the result is the same in every mode, to the last bit.
        divisor = arithmetic.opaque_divisor(tf.constant(multiplier), state.good_steps)
        return tf.maximum(scale / divisor, self.min_loss_scale)

    def get_config(self) -> Dict[str, Any]:
        return _ARGUMENTS.config(self)


def _is_power_of_two(multiplier: float) -> bool:
    """Whether float32 holds a multiplier and its reciprocal exactly."""
    return math.frexp(multiplier)[0] == 0.5 and multiplier <= 2.0**126
