"""gradient_ranges: a model's gradients in float32, as float16 would hold them."""

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
    """Tells what float16 would do to a model's gradients at a loss scale.

    Computes the gradients of some batches in float32, whatever the model's policy, as
    training would: `training=True`, the compiled loss, regularization. The very model
    computes, with its layers told to use float32 for the while. Afterwards it is what
    it was: weights, moving statistics, seeds, metrics, policies; the optimizer is not
    touched. (Weights that do not exist yet are created.) A custom `train_step` is not
    run. Memory does not grow with the number of batches.

    A gradient of an embedding counts with the rows that it has. Gradients also pass
    through float16 between the layers: with `activations=True` they are in the report
    and in the scale it recommends.

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
      model: A Keras model with float32 weights: any, if it is compiled or `loss` given.
      x: Arrays, a `tf.data.Dataset`, or a `PyDataset` or `Sequence` of Keras.
      y: Targets, and None if `x` makes whole batches.
      sample_weight: Weights as `fit` takes them, or None.
      loss: What `compile` takes. None: the compiled one.
      loss_scale: The scale to report on. None: what the model's optimizer has now, 1 if
        it scales no loss.
      batches: How many batches to look at, the first ones in order. None: all.
      batch_size: Rows of a batch, of arrays: 32 if None.
      activations: Whether to report on the gradients of layers' outputs too.
      verbose: 1 shows a progress bar, 0 nothing.

    Returns:
      `GradientRanges`: print it, read its arrays, or `plot` it.

    Raises:
      TypeError: `model` is no Keras model, or an argument has the wrong type: `x` may
        be no generator, for instance, which would be used up.
      ValueError: The model has no loss and there is no `loss`, targets are missing, `x`
        is empty, the model has no trainable weights or some in 16 bits, it belongs to
        a strategy of several replicas, or `batches` is None and `x` never ends.
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
    """Creates the weights, under the model's own policy: it decides what they are."""
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
