"""HeadroomLossScale: as high as the largest gradient allows, found without trying."""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, Optional

import tensorflow as tf

from lossscale import arguments
from lossscale.arguments import or_none
from lossscale.runtime import registry
from lossscale.runtime.aliases import Flag, Scalar, Tensor
from lossscale.scales.base import LossScale

FLOAT16_MAX = 65504.0
_HIGHEST = 2.0**127  # float32's largest power of two
#: The bits of a float32 that hold its exponent.
_EXPONENT = 0x7F800000
_ARGUMENTS = arguments.Declared(
    initial_loss_scale=arguments.loss_scale,
    headroom=partial(arguments.count, least=0, most=126),
    half_life=partial(arguments.factor, above=0.0),
    increment_period=arguments.count,
    min_loss_scale=arguments.loss_scale,
    max_loss_scale=or_none(arguments.loss_scale),
)


@registry.serializable
class HeadroomLossScale(LossScale):
    """A loss scale that is computed from the largest gradient.

    Other loss scales learn only from overflows: they lose steps to find out how high
    they can be, or stay far too low without a sign. This one leaves `headroom`
    doublings free above the largest gradient, for larger ones of later steps. It has
    found its size after the first good step; until then overflows halve it.

    >>> loss_scale = HeadroomLossScale()
    >>> _ = loss_scale.update([tf.constant([2.0**-20, -(2.0**-10)])])
    >>> float(loss_scale)  # 2**-10 times 2**21 is 2**11, nearly 5 doublings below 65504
    2097152.0

    Gradients of activations are float16, too, and may be larger than those of weights.
    When they overflow, the ceiling falls, and the scale with it. `next_state` is the
    whole rule.

    Args:
      initial_loss_scale: A number, the scale of the first step.
      headroom: An integer, how many doublings below float16's 65504 the largest scaled
        gradient stays at least. At most it is one more, since the scale stays a power
        of two.
      half_life: A number above 0, after how many steps `peak` has fallen to half, so
        that the scale can double in that time.
      increment_period: An integer, after how many good steps in a row the ceiling
        doubles.
      min_loss_scale: A number, the floor.
      max_loss_scale: A number, the highest ceiling, or None: 2**127.

    Attributes:
      peak: `float32` variable of shape `[]`, the largest recent gradient.
      ceiling: `float32` variable of shape `[]`, lowered by overflows.
      good_steps: `int64` variable of shape `[]`, finite steps in a row since the
        ceiling rose.

    Raises:
      TypeError: An argument has the wrong type.
      ValueError: An argument is out of its range, or the bounds are out of order.
    """

    needs_largest = True

    def __init__(
        self,
        initial_loss_scale: float = 2.0**15,
        headroom: int = 4,
        half_life: float = 100,
        *,
        increment_period: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: Optional[float] = None,
    ) -> None:
        _ARGUMENTS.keep(self, locals())
        self._highest = self.max_loss_scale or _HIGHEST
        arguments.within_bounds({**vars(self), "max_loss_scale": self._highest})
        super().__init__(self.initial_loss_scale)
        self.peak = self._add_weight("peak", 0.0, tf.float32)
        self.ceiling = self._add_weight("ceiling", self._highest, tf.float32)
        self.good_steps = self._add_weight("good_steps", 0, tf.int64)

    def next_state(
        self, state: Any, is_finite: Flag, largest: Scalar = None
    ) -> Dict[str, Tensor]:
        """Returns the values of the variables after one step, by this rule.

        ```
        state   S = initial_loss_scale, peak = 0, good = 0
                highest = 2**127 if max_loss_scale is None else max_loss_scale
                ceiling = highest
        next_state(state, is_finite, largest):
          if is_finite:
            peak = max(largest, peak * 2**(-1 / half_life))
            good += 1
            if good >= increment_period:
              good = 0
              ceiling = min(2 * ceiling, highest)
          else:               # an overflow: no largest gradient is known
            good = 0
            ceiling = max(min(ceiling, S) / 2, min_loss_scale)
          wanted = 2**floor(log2(65504 / peak) - headroom) if peak > 0 else S
          S = max(min(wanted, ceiling), min_loss_scale)
        ```
        """
        scale, zero = state.current_loss_scale, tf.constant(0, tf.int64)
        fading = state.peak * 2.0 ** (-1.0 / self.half_life)
        peak = tf.where(is_finite, tf.maximum(largest, fading), state.peak)
        good = tf.where(is_finite, state.good_steps + 1, zero)
        grows = good >= self.increment_period  # never on a bad step: `good` is 0
        # Half of the ceiling and of the highest: their double may be infinite.
        raised = 2.0 * tf.minimum(state.ceiling, self._highest / 2.0)
        lowered = tf.minimum(state.ceiling, scale) / 2.0
        lowered = tf.maximum(lowered, self.min_loss_scale)
        ceiling = tf.where(grows, raised, state.ceiling)
        ceiling = tf.where(is_finite, ceiling, lowered)
        # The exponent bits are the power of two. A logarithm would round.
        most = FLOAT16_MAX * 2.0**-self.headroom  # that `peak` may be, scaled
        least = max(most / _HIGHEST, arguments.FLOAT32_MIN)  # 2**127 is wanted at most
        bits = tf.bitcast(most / tf.maximum(peak, least), tf.int32)
        wanted = tf.bitcast(tf.bitwise.bitwise_and(bits, _EXPONENT), tf.float32)
        wanted = tf.where(peak > 0.0, wanted, scale)
        return {
            "peak": peak,
            "good_steps": tf.where(grows, zero, good),
            "ceiling": ceiling,
            "current_loss_scale": tf.maximum(
                tf.minimum(wanted, ceiling), self.min_loss_scale
            ),
        }

    def get_config(self) -> Dict[str, Any]:
        return _ARGUMENTS.config(self)
