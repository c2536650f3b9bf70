"""How far a DynamicLossScale moves, and when an overflow does not lower it."""

from __future__ import annotations

from typing import Any, List, Tuple

import tensorflow as tf

from lossscale.gradients import scaling
from lossscale.runtime.aliases import Flag
from lossscale.scales.variables import assign, value_of, where


def grown(rule: Any, scale: Any) -> Any:
    """Returns `scale` after a growth. Here and below `rule` is a `DynamicLossScale`."""
    larger = scale * rule.multiplier
    if rule.max_loss_scale is not None:
        return tf.minimum(larger, rule.max_loss_scale)
    return tf.where(tf.math.is_finite(larger), larger, scale)


def backed_off(rule: Any, scale: Any) -> Any:
    """Returns `scale` after it has backed off."""
    if rule.backoff_factor is None:
        # Compilers must not see the constant, or they would multiply by 1 / multiplier.
        # So the result is the same in every mode, to the last bit.
        multiplier = tf.convert_to_tensor(rule.multiplier, tf.float32)
        lower = scale / scaling.opaque_divisor(multiplier, rule.skipped_steps)
    else:
        lower = scale * rule.backoff_factor
    return tf.minimum(scale, tf.maximum(lower, rule.min_loss_scale))


def cool_down(rule: Any, backs_off: Any, results: List[Any]) -> Any:
    """Returns whether the scale backs off, and counts the steps until it may again."""
    left = value_of(rule.cooldown_steps)
    may = left < 1
    fewer = where(may, left, left - 1)
    if backs_off is not False:
        backs_off = where(may, backs_off, False)
        whole = tf.convert_to_tensor(rule.backoff_cooldown, tf.int64)
        fewer = where(backs_off, whole, fewer)
    results.append(assign(rule.cooldown_steps, fewer))
    return backs_off


def window(rule: Any, is_finite: Flag) -> Tuple[Any, Any]:
    """Returns the steps since the scale moved, and the bad ones, with this step."""
    steps, bad = value_of(rule.window_steps) + 1, value_of(rule.window_bad_steps)
    return steps, where(is_finite, bad, bad + 1)


def tolerate(rule: Any, backs_off: Any, steps: Any, bad: Any) -> Any:
    """Returns whether the scale backs off: not if the share of bad steps is small."""
    if backs_off is False:
        return False
    # Dividing int64 tensors gives a float64, as dividing Python's integers does.
    return where(bad / steps >= rule.overflow_tolerance, backs_off, False)


def move_window(
    rule: Any, steps: Any, bad: Any, grows: Any, backs_off: Any, results: List[Any]
) -> None:
    """Starts a new window when the scale moves. A growth keeps the bad steps."""
    zero = 0 if isinstance(steps, int) else tf.constant(0, tf.int64)
    steps = where(grows, zero, where(backs_off, zero, steps))
    bad = where(backs_off, zero, bad)
    results.append(assign(rule.window_steps, steps))
    results.append(assign(rule.window_bad_steps, bad))
