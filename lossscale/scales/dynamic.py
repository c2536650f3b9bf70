"""DynamicLossScale: the rule, and nothing else."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence

import tensorflow as tf

from lossscale import arguments, presets
from lossscale.runtime import mode, registry
from lossscale.runtime.aliases import Flag
from lossscale.scales import moves
from lossscale.scales.base import LossScale
from lossscale.scales.variables import assign, value_of, where

#: The events that may clear the count of bad steps.
HYSTERESIS_RESETS = ("good", "growth", "backoff")
#: A config holds these arguments only if they are not None.
_NEWER = ("search_period", "backoff_cooldown", "overflow_tolerance")


@registry.serializable
class DynamicLossScale(LossScale):
    """A loss scale that grows while gradients are finite and falls when they are not.

    With its defaults it is TensorFlow's rule, bit for bit.

    ```
    state   S = initial_loss_scale, good = 0, bad = 0
    adjust(is_finite):
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
          cooldown = backoff_cooldown       # it counts down at each step
          S = min(S, max(S * backoff_factor, min_loss_scale))
          if "backoff" in hysteresis_reset: bad = 0
      should_apply_gradients = is_finite
    ```

    The outer `min` matters only for a scale restored from below the floor: an overflow
    never raises the scale.

    >>> loss_scale = DynamicLossScale(initial_loss_scale=4.0, increment_period=2)
    >>> for is_finite in [True, True, False]:
    ...     _ = loss_scale.adjust(is_finite)
    ...     print(float(loss_scale))
    4.0
    8.0
    4.0

    Args:
      initial_loss_scale: The scale to start with. Start high: a scale that is too high
        falls at every step, one that is too low rises once in `increment_period`.
      increment_period: The scale grows after this many finite steps in a row.
      multiplier: The scale is multiplied by this when it grows.
      backoff_factor: The scale is multiplied by this on overflow. None: it is divided
        by `multiplier`.
      hysteresis: How many bad steps it takes before the scale backs off. Every bad step
        is skipped, whatever this is.
      hysteresis_reset: The events that clear the count of bad steps: any of `"good"` (a
        finite step), `"growth"` and `"backoff"` (the scale changes, or would if a bound
        did not stop it). With `hysteresis=1` it makes no difference.
      min_loss_scale: The floor.
      max_loss_scale: The ceiling. None: only float32 bounds the scale; it does not grow
        where the result would be infinite.
      search_period: Takes the place of `increment_period` until the first bad step. 1
        finds a scale that is far from `initial_loss_scale` in a few steps. The first
        bad step ends the search, even if `hysteresis` keeps the scale. None: there is
        no search.
      backoff_cooldown: After the scale has backed off, it does not back off again for
        this many steps. Bad steps are still skipped and counted. None: no cooldown.
      overflow_tolerance: A share, from 0 to 1. An overflow leaves the scale as it is
        while the share of bad steps since the scale last moved, this step included, is
        below it. Such steps are still skipped. None: no overflow is tolerated, as with
        0. fairseq's default is 0 since version 0.12, and was 0.05 before.

    Attributes:
      current_loss_scale: `float32` variable of shape `[]`.
      good_steps: `int64` variable of shape `[]`, finite steps in a row.
      bad_steps: `int64` variable of shape `[]`, the bad steps that `hysteresis` counts.
      cooldown_steps: `int64` variable of shape `[]`, how many more steps the scale does
        not back off. None without `backoff_cooldown`.
      window_steps: `int64` variable of shape `[]`, steps since the scale last moved.
        None without `overflow_tolerance`.
      window_bad_steps: The same, of bad steps since the scale last backed off.

    Raises:
      TypeError: An argument has the wrong type.
      ValueError: An argument is out of its range, or the bounds are out of order.

    Source: the rule, the first three defaults and the floor of 1, TensorFlow 2.21
    `python/training/experimental/loss_scale.py`. Hysteresis:
    TensorFlow 1.15 `contrib/mixed_precision/python/loss_scale_manager.py` for
    `("growth", "backoff")`; DeepSpeed `runtime/fp16/loss_scaler.py` and Megatron-LM
    `core/optimizer/grad_scaler.py` for `("growth",)`; apex
    `csrc/update_scale_hysteresis.cu` for `("good",)`; Paddle `amp/grad_scaler.py` for
    `("good", "backoff")`. The search: Chainer 7.8.1 `chainer/optimizer.py`. The
    cooldown: Ramesh et al., "Zero-Shot Text-to-Image Generation", appendix D. The
    tolerance: fairseq 0.12.2 `fairseq/optim/dynamic_loss_scaler.py`.
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
        initial = arguments.loss_scale("initial_loss_scale", initial_loss_scale)
        period = arguments.count("increment_period", increment_period)
        growth = arguments.factor("multiplier", multiplier, above=1.0)
        backoff = arguments.optional(
            arguments.factor, "backoff_factor", backoff_factor, above=0.0, below=1.0
        )
        steps = arguments.count("hysteresis", hysteresis)
        resets = arguments.names(
            "hysteresis_reset", hysteresis_reset, HYSTERESIS_RESETS
        )
        floor = arguments.loss_scale("min_loss_scale", min_loss_scale)
        ceiling = arguments.optional(
            arguments.loss_scale, "max_loss_scale", max_loss_scale
        )
        search = arguments.optional(arguments.count, "search_period", search_period)
        cooldown = arguments.optional(
            arguments.count, "backoff_cooldown", backoff_cooldown
        )
        tolerance = arguments.optional(
            arguments.share, "overflow_tolerance", overflow_tolerance
        )
        arguments.ordered("min_loss_scale", floor, "initial_loss_scale", initial)
        if ceiling is not None:
            arguments.ordered("initial_loss_scale", initial, "max_loss_scale", ceiling)
        super().__init__()
        self.initial_loss_scale = initial
        self.increment_period = period
        self.multiplier = growth
        self.backoff_factor = backoff
        self.hysteresis = steps
        self.hysteresis_reset = resets
        self.min_loss_scale = floor
        self.max_loss_scale = ceiling
        self.search_period = search
        self.backoff_cooldown = cooldown
        self.overflow_tolerance = tolerance
        # The first two names are also TensorFlow's: its checkpoints restore into them.
        self.current_loss_scale = self._add_weight(
            "current_loss_scale", initial, tf.float32
        )
        self.good_steps = self._add_weight("good_steps", 0, tf.int64)
        self.bad_steps = self._add_weight("bad_steps", 0, tf.int64)
        self.cooldown_steps: Any = None
        if cooldown is not None:  # without a cooldown no file holds this variable
            self.cooldown_steps = self._add_weight("cooldown_steps", 0, tf.int64)
        self.window_steps: Any = None
        self.window_bad_steps: Any = None
        if tolerance is not None:  # without a tolerance no file holds these
            self.window_steps = self._add_weight("window_steps", 0, tf.int64)
            self.window_bad_steps = self._add_weight("window_bad_steps", 0, tf.int64)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> DynamicLossScale:
        """Returns a loss scale that moves as another system's does.

        >>> loss_scale = DynamicLossScale.from_preset("megatron", hysteresis=4)
        >>> float(loss_scale), loss_scale.increment_period, loss_scale.hysteresis
        (4294967296.0, 1000, 4)

        Args:
          name: A key of `lossscale.presets.PRESETS`, such as "torch". That table says
            where each preset comes from, and how it differs from the original.
          **overrides: Arguments of this class, in place of the preset's.

        Raises:
          TypeError: The preset leaves an argument to the caller, and it is missing.
          ValueError: There is no such preset.
        """
        return cls(**presets.preset_arguments(name, overrides))

    def __call__(self) -> Any:
        return tf.convert_to_tensor(self.current_loss_scale)

    # Programs read these names of TensorFlow's own class.
    _current_loss_scale = property(lambda self: self.current_loss_scale)
    _num_good_steps = property(lambda self: self.good_steps)

    def _adjust(self, is_finite: Flag) -> Any:
        # In eager mode Python computes the rule: one operation takes longer than that.
        knows = mode.current().knows_values
        return self._rule(bool(is_finite) if knows else is_finite)

    def _rule(self, is_finite: Flag, grows: Any = None) -> List[Any]:
        """Moves the state by one step. Returns the operations that do so.

        Args:
          is_finite: The flag: a tensor, or a Python bool if its value is known here.
          grows: False if the loss scale surely does not grow at this step, else None.
        """
        knows = isinstance(is_finite, bool)
        zero = 0 if knows else tf.constant(0, tf.int64)
        results, bad, backs_off = [], None, False
        if grows is False:
            results.append(self.good_steps.assign_add(1, read_value=False))
        else:
            good = where(is_finite, value_of(self.good_steps) + 1, zero)
            # `grows` is False on a bad step, since `good` is 0 there.
            grows = self._in_period(lambda period: good >= period)
            good = where(grows, zero, good)
            results.append(assign(self.good_steps, good))
        if is_finite is not True:
            bad = value_of(self.bad_steps)
            bad = where(is_finite, bad, bad + 1)
            backs_off = where(is_finite, False, bad >= self.hysteresis)
        if self.overflow_tolerance is not None:
            window = moves.window(self, is_finite)
            backs_off = moves.tolerate(self, backs_off, *window)
        if self.cooldown_steps is not None:
            backs_off = moves.cool_down(self, backs_off, results)
        if self.overflow_tolerance is not None:
            moves.move_window(self, *window, grows, backs_off, results)
        resets = {"good": is_finite, "growth": grows, "backoff": backs_off}
        for name in self.hysteresis_reset:
            if resets[name] is not False:
                bad = where(resets[name], zero, bad)
        if bad is not None:
            results.append(assign(self.bad_steps, bad))
        if grows is not False or backs_off is not False:
            results.append(self._move(grows, backs_off))
        return results

    def _stays(self) -> Any:
        if (type(self).adjust, type(self)._adjust) != _RULE:
            return None  # a subclass has a rule of its own
        # The same as good + 1 < period, without an addition at each step.
        good = tf.convert_to_tensor(self.good_steps)
        return self._in_period(lambda period: good < period - 1)

    def _in_period(self, holds: Callable[[int], Any]) -> Any:
        """Returns `holds(period)`, with the period that is in force now.

        That is `search_period` until `skipped_steps` counts a bad step. In a session a
        bad step may change it before this reads it. No harm: nothing grows then.
        """
        usual = holds(self.increment_period)
        if self.search_period is None:
            return usual
        searches = value_of(self.skipped_steps) < 1
        return where(searches, holds(self.search_period), usual)

    def _count_good(self) -> Any:
        return self._rule(is_finite=True, grows=False)

    def _move(self, grows: Any, backs_off: Any) -> Any:
        scale = self._value()
        moved = where(grows, moves.grown(self, scale), scale)
        moved = where(backs_off, moves.backed_off(self, scale), moved)
        return self.current_loss_scale.assign(moved, read_value=False)

    def get_config(self) -> Dict[str, Any]:
        config = {
            "initial_loss_scale": self.initial_loss_scale,
            "increment_period": self.increment_period,
            "multiplier": self.multiplier,
            "backoff_factor": self.backoff_factor,
            "hysteresis": self.hysteresis,
            "hysteresis_reset": list(self.hysteresis_reset),  # JSON has no tuples
            "min_loss_scale": self.min_loss_scale,
            "max_loss_scale": self.max_loss_scale,
        }
        # Without these three, older versions of this package can read the config.
        newer = {name: getattr(self, name) for name in _NEWER}
        return {**config, **{k: v for k, v in newer.items() if v is not None}}


#: The rule that `_stays` and `_count_good` shorten: no subclass may have changed it.
_RULE = (DynamicLossScale.adjust, DynamicLossScale._adjust)
