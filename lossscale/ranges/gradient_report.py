"""gradient_ranges: what float16 would do to a model's gradients."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import tensorflow as tf

from lossscale import arguments
from lossscale.gradients.check import dense_part
from lossscale.plotting import scale_text
from lossscale.ranges import calls, exponents, inputs
from lossscale.ranges.calls import Call, Watcher, copy_of
from lossscale.ranges.magnitudes import is_float
from lossscale.ranges.model_state import SIXTEEN_BITS, in_float32
from lossscale.ranges.report import Ranges, Row, cell
from lossscale.ranges.step import Step, build, of_fit
from lossscale.runtime import keras_versions
from lossscale.runtime.derivatives import derivative
from lossscale.runtime.keras_versions import layers_of, tensor_of
from lossscale.runtime.loss_scale_warning import warn

_APART = """\
The layers are too far apart for one loss scale: at the recommended one, float16 \
flushes more than a tenth of the gradients of {} to zero, at a higher one less than \
half of that. HeadroomLossScale() keeps the scale as high as the largest gradients \
allow. If the layer learns too little even so, give it dtype="float32"."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GradientRanges(Ranges):
    """What float16 would do to a model's gradients at a loss scale.

    `flushed`, `subnormal` and `overflowing` are shares of the values that are finite
    and not zero in float32, NaN if there are no such values. All arrays but `counts`
    and `histogram` have shape `[rows]`, in the order of `names`.

    Attributes:
      names: A tuple of the rows' names: variables, and with `activations=True` layers'
        outputs. Only those with a gradient have a row.
      counts: A dict of one or two `int64` arrays of shape
        `[rows, lossscale.ranges.exponents.BINS]`. Key 1.0 is for loss scales that are
        powers of two. If the given one is not, its significand is the second key.
      largest: A `float32` array, the largest finite magnitude of each row.
      loss_scale: A float, the scale of this report.
      batches: An integer, how many batches were counted.
    """

    names: Tuple[str, ...]
    counts: Dict[float, Any]
    largest: Any
    loss_scale: float
    batches: int

    _title, _what, _is_scaled = "Gradients of", "gradients", True
    _in_repr = ("loss_scale", "recommended_scale")

    def at(self, loss_scale: float) -> GradientRanges:
        """Returns the report of the same gradients at another loss scale.

        Args:
          loss_scale: A power of two, or a power of two times the scale that
            `gradient_ranges` was given.

        Raises:
          ValueError: `loss_scale` is another number.
        """
        scale = arguments.loss_scale("loss_scale", loss_scale)
        if math.frexp(scale)[0] * 2 not in self.counts:
            raise ValueError(
                f"`loss_scale` must be a power of two, got {loss_scale!r}. "
                "For another scale, pass it to `gradient_ranges`."
            )
        return dataclasses.replace(self, loss_scale=scale)

    @property
    def largest_safe_scale(self) -> Optional[float]:
        """The largest power of two at which none of these gradients overflows.

        It is within float32's range. None if all gradients are zero, or if some are not
        finite in float32: then no scale is safe.
        """
        largest = float(np.max(self.largest))
        if self.nonfinite.any() or not largest:
            return None
        return 2.0 ** min(max(exponents.largest_safe_power(largest), -126), 127)

    @property
    def recommended_scale(self) -> Optional[float]:
        """Half the largest safe scale.

        Gradients computed in float16 are rounded on the way, and can be larger than
        these. Gradients of other batches, and later in training, can be larger still.
        `DynamicLossScale` adapts to them.
        """
        largest = self.largest_safe_scale
        return None if largest is None else max(largest / 2, 2.0**-126)

    @property
    def _notes(self) -> List[str]:
        bad = ", ".join(
            f"{name} ({infinities:,} infinite, {nans:,} NaN)"
            for name, infinities, nans in zip(self.names, self.infinities, self.nans)
            if infinities + nans
        )
        if bad:
            return [f"Not finite in float32, so no loss scale helps: {bad}."]
        safe, recommended = self.largest_safe_scale, self.recommended_scale
        if safe is None or recommended is None:
            return ["All gradients are zero."]
        lost = self.at(recommended).summary["all"]["flushed"]
        notes = [
            f"Largest safe scale: {scale_text(safe)}. "
            f"Recommended: {scale_text(recommended)}, at which "
            f"{cell('flushed', lost)} are flushed to zero."
        ]
        flushed, apart = self.at(recommended).flushed, []
        for number, name in enumerate(self.names):
            alone: GradientRanges = self._joined({name: [number]})
            least = alone.at(alone.recommended_scale or 1.0).flushed[0]
            if flushed[number] > max(0.1, 2 * least):
                apart.append(name)
        return [*notes, _APART.format(", ".join(apart))] if apart else notes


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

    Use it before a float16 run, to choose a loss scale, or when the model learns less
    than in float32:

    >>> import lossscale
    >>> import numpy as np
    >>> model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False)])
    >>> x, y = np.full([8, 1], 2.0**-20), np.ones([8, 1])
    >>> _ = model(x)
    >>> model.set_weights([np.zeros([1, 1])])
    >>> ranges = lossscale.gradient_ranges(model, x, y, loss="mse", verbose=0)
    >>> float(ranges.largest_exponent[0]), ranges.largest_safe_scale == 2.0**34
    (-19.0, True)

    It runs the step that `fit` runs on some batches, also the model's own `train_step`,
    in float32 under any policy, and its optimizers do nothing. The model stays as it
    was, except that missing weights are created.
    https://github.com/lossscale/lossscale/blob/main/docs/gradient-ranges.md explains
    the report.

    Args:
      model: A Keras model with float32 weights, compiled unless you pass `loss`.
      x: Arrays, a `tf.data.Dataset`, or a `PyDataset` or `Sequence` of Keras.
      y: Targets, or None if `x` yields them.
      sample_weight: Weights as in `fit`, or None.
      loss: A loss as in `compile`, or None: the compiled one.
      loss_scale: A number, the scale to report on, or None: the model's, or 1.
      batches: An integer, how many batches to use, or None: all.
      batch_size: An integer, the rows per batch if `x` holds arrays, or None: 32.
      activations: A boolean, whether to count gradients of layers' outputs, too.
      verbose: An integer: 1 shows a progress bar.

    Returns:
      `GradientRanges`: print it, read its arrays, or `plot` it.

    Raises:
      TypeError: An argument has the wrong type, for example a generator as `x`.
      ValueError: Loss or targets are missing; `x` is empty, or never ends; the model
        has no trainable weights, some in 16 bits, or several replicas.
      RuntimeError: Called in a graph or under a `tf.distribute` strategy.
    """
    keras = inputs.keras_of(model, "gradient_ranges")
    optimizer = getattr(model, "optimizer", None)
    scale = inputs.scale_of(optimizer) if loss_scale is None else loss_scale
    scale = arguments.loss_scale("loss_scale", scale)
    arguments.boolean("activations", activations)
    data = (x, y, sample_weight)
    first, chosen, length = inputs.first_batches(data, batch_size, batches)
    # The model's own policy sets the dtype of missing weights.
    build(model, inputs.triple(first)[0], of_fit(keras, model, loss, first))
    if not model.trainable_variables:
        raise ValueError("`model` must have trainable weights, got none.")
    for variable in model.trainable_variables:
        dtype = tf.as_dtype(variable.dtype).name
        if dtype in SIXTEEN_BITS:
            raise ValueError(
                "`model` must have float32 weights, got "
                f"{_path_of(model, variable)} in {dtype}. The policy "
                '"mixed_float16" computes in float16 and keeps its weights in float32.'
            )
    significands = sorted({1.0, math.frexp(scale)[0] * 2})
    rows: Dict[int, Row] = {id(v): Row() for v in model.trainable_variables}
    in_16_bits: List[str] = []
    number = 0
    for batch in inputs.with_progress(keras, chosen, length, verbose):
        number += 1
        watcher = _Backward(activations, in_16_bits)
        # Of some steps gradients are scaled, of others not: so that of 1 is used.
        with in_float32(keras, layers_of(model)):
            step_of = of_fit(keras, model, loss, batch)
            step = Step(model, step_of, watcher, scale_of=lambda _: 1.0)
        variables = {id(tensor_of(v)): v for v in model.trainable_variables}
        found = [(variables.get(id(v), v), grad) for v, grad in step.computed]
        named = [(id(v), _path_of(model, v), grad) for v, grad in found]
        for key, name, grad in [*named, *watcher.received[::-1]]:
            row = rows.setdefault(key, Row())
            row.name = name
            row.add(grad, significands)
    counted = [row for row in rows.values() if row.name]
    if not counted:
        raise ValueError(
            "`loss` must depend on the model's weights, got a loss without gradients."
        )
    if in_16_bits:
        warn(
            "These operations compute gradients in 16 bits under any policy of the "
            f"model, so part of the report is not about float32: {in_16_bits[:3]}."
        )
    return GradientRanges(
        names=tuple(_numbered([row.name for row in counted])),
        counts={
            each: np.stack([row.counts[each] for row in counted])
            for each in significands
        },
        largest=np.array([row.largest for row in counted], np.float32),
        loss_scale=scale,
        batches=number,
    )


class _Backward(Watcher):
    """Notes the gradients of layers' outputs, and what computes them in 16 bits."""

    def __init__(self, counts_outputs: bool, in_16_bits: List[str]) -> None:
        super().__init__()
        #: Of each gradient: the layer's `id`, the row's name, and the gradient.
        self.received: List[Tuple[int, str, Any]] = []
        self._counts_outputs, self._in_16_bits = counts_outputs, in_16_bits

    def note_op(self, kind: str, _: Any, outputs: Any) -> bool:
        is_narrow = any(out.dtype.name in SIXTEEN_BITS for out in outputs)
        if self.is_watching and is_narrow and derivative(calls.__file__) is not None:
            self._in_16_bits.append(kind)
        return self.is_watching

    def end(self, call: Call, outputs: Any) -> Any:
        def come_back(upstream: Any) -> Any:
            name = f"output of {call.layer.name}"
            self.received.append((id(call.layer), name, dense_part(upstream)))
            return upstream

        def copied(value: Any) -> Any:
            return copy_of(value, come_back) if is_float(value) else value

        # A loop over time makes other gradients of its cell at each step.
        is_in_loop = any(above.is_recurrent for above in call.around)
        if self._counts_outputs and call.parent is not None and not is_in_loop:
            outputs = tf.nest.map_structure(copied, outputs)
        return super().end(call, outputs)


def _path_of(model: Any, variable: Any) -> str:
    path = keras_versions.variable_name(variable)
    prefix = f"{model.name}/"  # only Keras 3 has it
    return path[len(prefix) :] if path.startswith(prefix) else path


def _numbered(names: List[str]) -> List[str]:
    numbers = [names[: at + 1].count(name) for at, name in enumerate(names)]
    return [f"{name} ({n})" if n > 1 else name for name, n in zip(names, numbers)]
