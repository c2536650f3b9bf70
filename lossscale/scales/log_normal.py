"""LogNormalLossScale: a scale from the distribution of the largest gradients."""

from __future__ import annotations

import math
from typing import Any, Dict

import tensorflow as tf

from lossscale import arguments
from lossscale.runtime import registry
from lossscale.runtime.aliases import Flag, Scalar, Variable
from lossscale.scales.base import LossScale


@registry.serializable
class LogNormalLossScale(LossScale):
    """A loss scale that assumes a log-normal distribution of the largest gradients.

    It estimates that distribution, and makes overflows as rare as `standard_deviations`
    says: 3.09 is once in 1,000 steps. OpenSeq2Seq's LogMax.

    ```
    state   S = initial_loss_scale, t = 0, mean = slow_mean = slow_square = 0
    adjust(is_finite, largest):
      if is_finite and largest == 0: nothing changes
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

    OpenSeq2Seq differs in four points. On a bad step it takes `x = 2**log2_max`, though
    the logarithm seems to be meant: one overflow holds its scale at the floor for
    hundreds of steps. Here `x` is one doubling above the largest gradient that the
    scale allowed, the least that overflows. If all gradients are zero, its logarithm is
    infinite; here nothing changes. Its last line always takes 16. Its state is float32.

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
        initial = arguments.loss_scale("initial_loss_scale", initial_loss_scale)
        top = arguments.factor("log2_max", log2_max, above=-127.0, below=128.0)
        fast = arguments.factor("beta1", beta1, above=0.0, below=1.0)
        slow = arguments.factor("beta2", beta2, above=0.0, below=1.0)
        deviations = arguments.factor(
            "standard_deviations", standard_deviations, above=0.0
        )
        floor = arguments.loss_scale("min_loss_scale", min_loss_scale)
        ceiling = arguments.loss_scale("max_loss_scale", max_loss_scale)
        arguments.ordered("min_loss_scale", floor, "initial_loss_scale", initial)
        arguments.ordered("initial_loss_scale", initial, "max_loss_scale", ceiling)
        super().__init__()
        self.initial_loss_scale = initial
        self.log2_max = top
        self.beta1 = fast
        self.beta2 = slow
        self.standard_deviations = deviations
        self.min_loss_scale = floor
        self.max_loss_scale = ceiling
        self.current_loss_scale = self._add_weight(
            "current_loss_scale", initial, tf.float32
        )
        self.seen_steps = self._add_weight("seen_steps", 0, tf.int64)
        # The variance is a difference of squares: in float32 mere rounding error.
        self.mean = self._add_weight("mean", 0.0, tf.float64)
        self.slow_mean = self._add_weight("slow_mean", 0.0, tf.float64)
        self.slow_square = self._add_weight("slow_square", 0.0, tf.float64)

    def __call__(self) -> Any:
        return tf.convert_to_tensor(self.current_loss_scale)

    def _adjust(self, is_finite: Flag, largest: Scalar = None) -> Any:
        says_nothing = tf.logical_and(is_finite, tf.equal(largest, 0.0))
        overflowed = self.log2_max + 1.0 - _log2(self._value())
        x = tf.where(is_finite, _log2(largest), overflowed)
        steps = tf.convert_to_tensor(self.seen_steps) + 1
        mean = _averaged(self.mean, x, self.beta1)
        slow_mean = _averaged(self.slow_mean, x, self.beta2)
        slow_square = _averaged(self.slow_square, x * x, self.beta2)
        m = mean / _weight(self.beta1, steps)
        s = slow_mean / _weight(self.beta2, steps)
        variance = slow_square / _weight(self.beta2, steps) - s * s
        sigma = tf.sqrt(tf.maximum(variance, tf.zeros_like(variance)))
        log2_scale = self.log2_max - (m + self.standard_deviations * sigma)
        # The logarithm is bounded: beyond float32 the power would be infinity or zero.
        log2_scale = tf.maximum(log2_scale, math.log2(self.min_loss_scale))
        log2_scale = tf.minimum(log2_scale, math.log2(self.max_loss_scale))
        scale = tf.cast(tf.pow(tf.constant(2.0, tf.float64), log2_scale), tf.float32)
        scale = tf.minimum(tf.maximum(scale, self.min_loss_scale), self.max_loss_scale)
        moved = [
            (self.current_loss_scale, scale),
            (self.seen_steps, steps),
            (self.mean, mean),
            (self.slow_mean, slow_mean),
            (self.slow_square, slow_square),
        ]
        results = []
        for variable, value in moved:
            kept = tf.where(says_nothing, tf.convert_to_tensor(variable), value)
            results.append(variable.assign(kept, read_value=False))
        return results

    def get_config(self) -> Dict[str, Any]:
        return {
            "initial_loss_scale": self.initial_loss_scale,
            "log2_max": self.log2_max,
            "beta1": self.beta1,
            "beta2": self.beta2,
            "standard_deviations": self.standard_deviations,
            "min_loss_scale": self.min_loss_scale,
            "max_loss_scale": self.max_loss_scale,
        }


def _log2(value: Any) -> Any:
    return tf.math.log(tf.cast(value, tf.float64)) / math.log(2.0)


def _averaged(variable: Variable, value: Any, beta: float) -> Any:
    return beta * tf.convert_to_tensor(variable) + (1.0 - beta) * value


def _weight(beta: float, steps: Any) -> Any:
    """Returns the sum of the weights of so many steps."""
    return 1.0 - tf.pow(tf.constant(beta, tf.float64), tf.cast(steps, tf.float64))
