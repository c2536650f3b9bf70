"""The LossScaleManager family of TensorFlow 1.15's `tf.contrib.mixed_precision`."""

from __future__ import annotations

import abc
from typing import Any, Dict

import tensorflow as tf

from lossscale import arguments
from lossscale.runtime import mode
from lossscale.runtime.aliases import Flag, Tensor
from lossscale.runtime.control import group_ops
from lossscale.scales.base import LossScale
from lossscale.scales.dynamic import DynamicLossScale
from lossscale.scales.fixed import FixedLossScale


class LossScaleManager(tf.Module, metaclass=abc.ABCMeta):
    """Holds a loss scale, and learns after each step if the gradients were finite.

    It is for code that comes from TensorFlow 1; new code should subclass `LossScale`.
    Keep the state in `tf.Variable`s that are attributes, so that checkpoints hold it.

    Source: https://github.com/lossscale/lossscale/blob/main/docs/origins.md.
    """

    @abc.abstractmethod
    def get_loss_scale(self) -> Any:
        """Returns the loss scale, a `float32` tensor of shape `[]`."""

    @abc.abstractmethod
    def update_loss_scale(self, finite_grads: Any) -> Any:
        """Updates the loss scale by one step.

        Args:
          finite_grads: A `bool` tensor of shape `[]`: whether all gradients of all
            replicas are finite.

        Returns:
          None in eager mode. In a graph, an op that updates the loss scale.
        """

    def as_loss_scale(self) -> LossScale:
        """Returns a `LossScale` that follows this manager's rule."""
        return ManagerLossScale(self)


class _StandsOnLossScale(LossScaleManager):
    """A manager that follows the rule of its `loss_scale`."""

    def __init__(self, loss_scale: LossScale) -> None:
        super().__init__()
        self.loss_scale = loss_scale
        #: What a session's final graph, which takes no operation, has of it.
        self._in_graph = loss_scale._value() if mode.current().runs_parts else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loss_scale!r})"

    def get_loss_scale(self) -> Any:
        if self._in_graph is not None and self._in_graph.graph.finalized:
            return self._in_graph
        return self.loss_scale()

    def update_loss_scale(self, finite_grads: Any) -> Any:
        update_op, _ = self.loss_scale.adjust(finite_grads)
        return update_op

    def as_loss_scale(self) -> LossScale:
        return self.loss_scale


class FixedLossScaleManager(_StandsOnLossScale):
    """A loss scale that never changes, and skips steps that are not finite.

    >>> float(FixedLossScaleManager(128).get_loss_scale())
    128.0

    Args:
      loss_scale: A number of at least 1.

    Raises:
      TypeError: `loss_scale` is no number.
      ValueError: `loss_scale` is less than 1, or not finite in float32.

    Source: https://github.com/lossscale/lossscale/blob/main/docs/origins.md.
    """

    def __init__(self, loss_scale: float) -> None:
        value = arguments.loss_scale("loss_scale", loss_scale, least=1.0)
        super().__init__(FixedLossScale(value, skip_nonfinite=True))


class ExponentialUpdateLossScaleManager(_StandsOnLossScale):
    """A loss scale that grows after good steps and shrinks after several bad ones.

    Its `loss_scale` is a `DynamicLossScale`. Bad steps add up until the scale changes:
    a good step between them does not clear their count. The scale never falls below 1.

    >>> manager = ExponentialUpdateLossScaleManager(1024, incr_every_n_steps=1000)
    >>> for is_finite in [False, True, False]:
    ...     _ = manager.update_loss_scale(is_finite)
    >>> round(float(manager.get_loss_scale()), 1)
    819.2

    Args:
      init_loss_scale: A number of at least 1, the scale to start with.
      incr_every_n_steps: An integer, after how many good steps in a row it grows.
      decr_every_n_nan_or_inf: An integer, after how many bad steps it shrinks.
      incr_ratio: A number above 1, by which the scale is multiplied when it grows.
      decr_ratio: A number below 1, by which it is multiplied when it shrinks.

    Raises:
      TypeError: An argument has the wrong type.
      ValueError: An argument is out of its range.

    Source: https://github.com/lossscale/lossscale/blob/main/docs/origins.md.
    """

    def __init__(
        self,
        init_loss_scale: float,
        incr_every_n_steps: int,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2,
        decr_ratio: float = 0.8,
    ) -> None:
        # Checked here, too, so that errors have these names.
        start = arguments.loss_scale("init_loss_scale", init_loss_scale, least=1.0)
        period = arguments.count("incr_every_n_steps", incr_every_n_steps)
        hysteresis = arguments.count("decr_every_n_nan_or_inf", decr_every_n_nan_or_inf)
        growth = arguments.factor("incr_ratio", incr_ratio, above=1.0)
        backoff = arguments.factor("decr_ratio", decr_ratio, above=0.0, below=1.0)
        super().__init__(
            DynamicLossScale(
                start, period, growth, backoff_factor=backoff, hysteresis=hysteresis
            )
        )


class ManagerLossScale(LossScale):
    """A LossScale that follows the rule of a user's own LossScaleManager."""

    def __init__(self, manager: LossScaleManager) -> None:
        super().__init__()
        self.manager = manager

    def __call__(self) -> Any:
        return tf.cast(self.manager.get_loss_scale(), tf.float32)

    def next_state(self, state: Any, is_finite: Flag) -> Dict[str, Tensor]:
        del state  # a manager assigns to its variables itself
        updated = self.manager.update_loss_scale(is_finite)
        with tf.control_dependencies([group_ops([updated])]):
            # In a session the manager's operation runs only if another waits for it.
            return {"last_step_finite": tf.identity(is_finite)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.manager!r})"

    def get_config(self) -> Dict[str, Any]:
        raise NotImplementedError(
            f"{type(self.manager).__name__} cannot be serialized: a LossScaleManager "
            "has no config. Subclass lossscale.LossScale if you need a config."
        )
