"""LogNormalLossScale: a scale from the distribution of the largest gradients."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Dict

import tensorflow as tf

from lossscale import arguments
from lossscale.runtime import registry
from lossscale.runtime.aliases import Flag, Results, Scalar, Variable
from lossscale.scales.base import LossScale, usable

_ARGUMENTS = arguments.Declared(
    initial_loss_scale=arguments.loss_scale,
    log2_max=partial(arguments.factor, above=-127.0, below=128.0),
    beta1=partial(arguments.factor, above=0.0, below=1.0),
    beta2=partial(arguments.factor, above=0.0, below=1.0),
    standard_deviations=partial(arguments.factor, above=0.0),
    min_loss_scale=arguments.loss_scale,
    max_loss_scale=arguments.loss_scale,
)


@registry.serializable
class LogNormalLossScale(LossScale):
    """A loss scale that assumes a log-normal distribution of the largest gradients.

    It estimates that distribution, and makes overflows as rare as `standard_deviations`
    says: 3.09 is once in 1,000 steps. OpenSeq2Seq's LogMax.

    ```
    state   S = initial_loss_scale, t = 0, mean = slow_mean = slow_square = 0
    adjust(is_finite, largest):
      # A restored S that is 0, NaN or the like is replaced as in `DynamicLossScale`.
      if is_finite and largest == 0: nothing else changes
      x = log2(largest) if is_finite else log2_max - log2(S) + 1
      t += 1
      mean        = beta1 * mean        + (1 - beta1) * x
      slow_mean   = beta2 * slow_mean   + (1 - beta2) * x
      slow_square = beta2 * slow_square + (1 - beta2) * x * x
      m = mean / (1 - beta1**t)
      s = slow_mean / (1 - beta2**t)
      sigma = sqrt(max(slow_square / (1 - beta2**t) - s * s, 0))
      S = 2**(log2_max - (m + standard_deviations * sigma))
      S = min(max(S, min_loss_scale), max_loss_scale)
      should_apply_gradients = is_finite
    ```

    On a bad step OpenSeq2Seq takes `x = 2**log2_max` (not its logarithm), so that one
    overflow holds its scale at the floor for hundreds of steps. Here `x` is one
    doubling above the largest gradient that the scale allowed. If all gradients are
    zero, its logarithm is infinite. It computes S with 16, whatever `log2_max` is, and
    its state is float32.

    >>> loss_scale = LogNormalLossScale()
    >>> for _ in range(3):
    ...     _ = loss_scale.update([tf.constant([2.0**-10, 2.0**-30])])
    >>> round(float(loss_scale))  # 2**(16 + 10) would be above the ceiling
    16777216

    Args:
      initial_loss_scale: The scale of the first step.
      log2_max: The binary logarithm of the largest allowed scaled gradient.
      beta1: The share of `mean` that each step keeps.
      beta2: The share of `slow_mean` and `slow_square` that each step keeps.
      standard_deviations: How many lie between the mean and `log2_max`.
      min_loss_scale: The floor.
      max_loss_scale: The ceiling.

    Attributes:
      current_loss_scale: `float32` variable of shape `[]`.
      seen_steps: `int64` variable of shape `[]`, the `t` above.
      mean: `float64` variable of shape `[]`.
      slow_mean: `float64` variable of shape `[]`.
      slow_square: `float64` variable of shape `[]`.

    Raises:
      TypeError: An argument has the wrong type.
      ValueError: An argument is out of its range, or the bounds are out of order.

    Source: Kuchaiev et al., "Mixed-Precision Training for NLP and Speech Recognition
    with OpenSeq2Seq", 2018; the rule and all defaults, OpenSeq2Seq (commit 2383d5d)
    `open_seq2seq/optimizers/automatic_loss_scaler.py`, `LogMaxScaler`.
    """

    needs_largest = True

    def __init__(
        self,
        initial_loss_scale: float = 1.0,
        log2_max: float = 16.0,
        beta1: float = 0.99,
        beta2: float = 0.999,
        standard_deviations: float = 3.09,
        *,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        _ARGUMENTS.keep(self, locals())
        arguments.within_bounds(vars(self))
        super().__init__()
        self.current_loss_scale = self._add_weight(
            "current_loss_scale", self.initial_loss_scale, tf.float32
        )
        self.seen_steps = self._add_weight("seen_steps", 0, tf.int64)
        # The variance is a difference of squares: in float32 mere rounding error.
        self.mean = self._add_weight("mean", 0.0, tf.float64)
        self.slow_mean = self._add_weight("slow_mean", 0.0, tf.float64)
        self.slow_square = self._add_weight("slow_square", 0.0, tf.float64)

    def __call__(self) -> Any:
        return tf.convert_to_tensor(self.current_loss_scale)

    def _adjust(self, is_finite: Flag, largest: Scalar = None) -> Results:
        current = tf.convert_to_tensor(self.current_loss_scale)
        restored = usable(self, current)
        is_silent = tf.logical_and(is_finite, tf.equal(largest, 0.0))
        overflowed = self.log2_max + 1.0 - _log2(restored)
        x = tf.where(is_finite, _log2(largest), overflowed)

        def averaged(variable: Variable, value: Any, beta: float) -> Any:
            old = tf.convert_to_tensor(variable)
            return tf.where(is_silent, old, beta * old + (1.0 - beta) * value)

        seen = tf.convert_to_tensor(self.seen_steps)
        steps = tf.where(is_silent, seen, seen + 1)
        mean = averaged(self.mean, x, self.beta1)
        slow_mean = averaged(self.slow_mean, x, self.beta2)
        slow_square = averaged(self.slow_square, x * x, self.beta2)
        m = mean / _weight(self.beta1, steps)
        s = slow_mean / _weight(self.beta2, steps)
        variance = slow_square / _weight(self.beta2, steps) - s * s
        sigma = tf.sqrt(tf.maximum(variance, tf.zeros_like(variance)))
        log2_scale = self.log2_max - (m + self.standard_deviations * sigma)
        # Beyond float32 it is infinity or zero, which the bounds replace.
        scale = tf.cast(tf.pow(tf.constant(2.0, tf.float64), log2_scale), tf.float32)
        scale = tf.minimum(tf.maximum(scale, self.min_loss_scale), self.max_loss_scale)
        stays = tf.logical_or(is_silent, tf.not_equal(current, restored))
        scale = tf.where(stays, restored, scale)
        return [
            self.current_loss_scale.assign(scale, read_value=False),
            self.seen_steps.assign(steps, read_value=False),
            self.mean.assign(mean, read_value=False),
            self.slow_mean.assign(slow_mean, read_value=False),
            self.slow_square.assign(slow_square, read_value=False),
        ]

    def get_config(self) -> Dict[str, Any]:
        return _ARGUMENTS.config(self)


def _log2(value: Scalar) -> Any:
    return tf.math.log(tf.cast(value, tf.float64)) / math.log(2.0)


def _weight(beta: float, steps: Any) -> Any:
    """Returns the sum of the weights of so many steps."""
    return 1.0 - tf.pow(tf.constant(beta, tf.float64), tf.cast(steps, tf.float64))
