"""gradient_ranges: what float16 would do to a model's gradients."""

from __future__ import annotations

import math
from typing import Any, Optional

import tensorflow as tf

from lossscale import arguments
from lossscale.ranges import asking
from lossscale.ranges.batches import first_batches
from lossscale.ranges.counting import GradientCounter, path_of
from lossscale.ranges.float32_model import SIXTEEN_BITS, in_float32, unchanged
from lossscale.ranges.losses import check_targets, scale_of
from lossscale.ranges.report import GradientRanges


def gradient_ranges(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    loss: Any = None,
    loss_scale: Optional[float] = None,
    batches: Optional[int] = 10,
    batch_size: Optional[int] = None,
    activations: bool = False,
    verbose: int = 1,
) -> GradientRanges:
    """Counts what float16 would do to a model's gradients at a loss scale.

    Computes the gradients of some batches in float32, under any policy of the model, as
    training would: `training=True`, the compiled loss, regularization. It runs your
    model itself, whose layers use float32 meanwhile, and leaves weights, moving
    statistics, seeds, metrics and policies as they were. It does not touch the
    optimizer. (It creates missing weights.) It does not run a custom `train_step`.
    Memory does not grow with the number of batches.

    An embedding's gradient has only the rows that a batch uses: only these are counted.
    Gradients also pass through float16 between the layers: with `activations=True` the
    report counts these, too, and the recommended scale depends on them.

    >>> import lossscale
    >>> import numpy as np
    >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False)])
    >>> x, y = np.full([8, 1], 2.0**-20), np.ones([8, 1])
    >>> _ = model(x)
    >>> model.set_weights([np.zeros([1, 1])])
    >>> ranges = lossscale.gradient_ranges(model, x, y, loss="mse", verbose=0)
    >>> float(ranges.largest_exponent[0]), ranges.largest_safe_scale == 2.0**34
    (-19.0, True)

    Args:
      model: Any Keras model with float32 weights, compiled unless you pass `loss`.
      x: Arrays, a `tf.data.Dataset`, or a `PyDataset` or `Sequence` of Keras.
      y: Targets, or None if `x` yields them, too.
      sample_weight: Weights as `fit` takes them, or None.
      loss: A loss as `compile` takes it. None: the compiled loss.
      loss_scale: The scale to report on. None: the current one of the model's
        optimizer, or 1 if it does not scale the loss.
      batches: The number of batches to look at, from the first. None: all.
      batch_size: Rows per batch if `x` holds arrays. None: 32.
      activations: Whether to report on the gradients of layers' outputs, too.
      verbose: 1 shows a progress bar, 0 nothing.

    Returns:
      `GradientRanges`: print it, read its arrays, or `plot` it.

    Raises:
      TypeError: `model` is no Keras model, or an argument has the wrong type. For
        example, `x` must not be a generator, which this would use up.
      ValueError: The model has no loss and `loss` is None, targets are missing, `x` is
        empty, the model has no trainable weights or some in 16 bits, it belongs to a
        strategy with several replicas, or `batches` is None and `x` never ends.
      RuntimeError: Called in a graph or under a `tf.distribute` strategy.
    """
    keras = asking.keras_of(model, "gradient_ranges")
    asking.has_loss(model, loss)
    batches = arguments.optional(arguments.count, "batches", batches)
    batch_size = arguments.optional(arguments.count, "batch_size", batch_size)
    scale = scale_of(model) if loss_scale is None else loss_scale
    scale = arguments.loss_scale("loss_scale", scale)
    arguments.boolean("activations", activations)
    found, length = first_batches((x, y, sample_weight), batch_size, batches)
    first = next(found)
    check_targets(model, loss, first[1], "gradient_ranges")
    _build(model, first[0])
    significands = sorted({1.0, math.frexp(scale)[0] * 2})
    with unchanged(model), in_float32(keras, model):
        counter = GradientCounter(keras, model, loss, significands, activations)
        return counter.run(first, found, length, verbose).report(scale)


def _build(model: Any, x: Any) -> None:
    """Creates missing weights, under the model's own policy, which sets their dtype."""
    if not model.built or not model.trainable_variables:
        model(x, training=False)
    if not model.trainable_variables:
        raise ValueError("`model` must have trainable weights, got none.")
    for variable in model.trainable_variables:
        dtype = tf.as_dtype(variable.dtype).name
        if dtype in SIXTEEN_BITS:
            raise ValueError(
                "`model` must have float32 weights, got "
                f"{path_of(model, variable)} in {dtype}. The policy "
                '"mixed_float16" computes in float16 and keeps its weights in float32.'
            )
