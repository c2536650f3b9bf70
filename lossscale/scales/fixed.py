"""FixedLossScale: a loss scale that never changes."""

from __future__ import annotations

from typing import Any, Dict

import tensorflow as tf

from lossscale import arguments
from lossscale.runtime import registry
from lossscale.runtime.aliases import Flag, Tensor
from lossscale.runtime.graphs import is_building
from lossscale.scales.base import LossScale

_ARGUMENTS = arguments.Declared(
    loss_scale_value=arguments.loss_scale, skip_nonfinite=arguments.boolean
)


@registry.serializable
class FixedLossScale(LossScale):
    """A loss scale that never changes.

    Use it if you know your model's gradients. It costs less than a dynamic one,
    since by default, as in TensorFlow, it checks no gradient: a NaN or an infinity is
    applied. With `skip_nonfinite` such steps are skipped and counted.

    >>> loss_scale = FixedLossScale(128)
    >>> float(loss_scale())
    128.0
    >>> loss_scale.update([tf.constant([float("nan")])])
    (None, True)

    Args:
      loss_scale_value: A positive number within float32's normal range.
      skip_nonfinite: A boolean, whether to skip a step whose gradients are not finite.
        If False, `update` returns the Python value True, and no counter ever changes.

    Raises:
      TypeError: An argument has the wrong type.
      ValueError: `loss_scale_value` is not within float32's normal range.

    Source: https://github.com/lossscale/lossscale/blob/main/docs/origins.md.
    """

    _can_change = False

    def __init__(self, loss_scale_value: float, skip_nonfinite: bool = False) -> None:
        _ARGUMENTS.keep(self, locals())
        super().__init__()
        self.checks_gradients = self.skip_nonfinite

    def __call__(self) -> Any:
        value = tf.constant(self.loss_scale_value, tf.float32)
        # Gradients of branches and loops get copies of constants, unknown to us.
        return tf.ensure_shape(value, []) if is_building() else value

    def next_state(self, state: Any, is_finite: Flag) -> Dict[str, Tensor]:
        del state, is_finite  # the scale never changes
        return {}

    def get_config(self) -> Dict[str, Any]:
        return _ARGUMENTS.config(self)
