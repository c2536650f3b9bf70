"""TensorFlow's rewrite of graphs to float16, with a loss scale of ours."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from lossscale.compat.optimizer import LossScaleOptimizer, check_optimizer


class MixedPrecisionLossScaleOptimizer(LossScaleOptimizer):
    """`LossScaleOptimizer` under its name in `tf.compat.v1.train.experimental`.

    Args:
      opt: A `tf.compat.v1.train.Optimizer`.
      loss_scale: As `loss_scale_manager` of `LossScaleOptimizer`.

    Source: TensorFlow 2.21 `python/training/experimental/loss_scale_optimizer.py`.
    """

    def __init__(self, opt: Any, loss_scale: Any) -> None:
        self._construct(opt, "loss_scale", loss_scale)


def enable_mixed_precision_graph_rewrite(
    opt: Any, loss_scale: Any = "dynamic"
) -> LossScaleOptimizer:
    """Turns on TensorFlow's rewrite of graphs to float16, and wraps an optimizer.

    TensorFlow then rewrites graphs of new sessions and `tf.function` traces on a GPU.
    `tf.compat.v1.mixed_precision.disable_mixed_precision_graph_rewrite` turns it off.

    Args:
      opt: A `tf.compat.v1.train.Optimizer`.
      loss_scale: As `loss_scale_manager` of `LossScaleOptimizer`.

    Returns:
      A `MixedPrecisionLossScaleOptimizer` around `opt`.

    Raises:
      NotImplementedError: This version of TensorFlow has no such rewrite.
      TypeError: An argument has the wrong type.
      ValueError: `loss_scale` is out of range, or Keras's mixed precision is on, too.

    Source: TensorFlow 2.21 `python/training/experimental/mixed_precision.py`.
    """
    check_optimizer(opt)
    enable = _of_tensorflow()
    if enable is None:
        raise NotImplementedError(
            f"TensorFlow {tf.version.VERSION} has no rewrite of graphs to float16. "
            "Cast in the model, and wrap its optimizer in "
            "lossscale.compat.v1.LossScaleOptimizer."
        )
    wrapper = MixedPrecisionLossScaleOptimizer(opt, loss_scale)
    enable(opt, 1.0)  # also creates a wrapper, without variables, which is dropped
    return wrapper


def _of_tensorflow() -> Any:
    """Returns TensorFlow's own function, None if this version has none."""
    theirs = getattr(tf.compat.v1, "mixed_precision", None)
    return getattr(theirs, "enable_mixed_precision_graph_rewrite", None)
