"""What to say of steps that are skipped in a row: what was found, and what to try."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import tensorflow as tf

from lossscale.plotting import scale_text
from lossscale.runtime import kerases
from lossscale.scales.base import LossScale
from lossscale.scales.fixed import FixedLossScale

#: How many variables a message names.
_NAMED = 5
_KINDS = {"inf": "inf", "nan": "NaN"}

_LOSS = """\
The loss itself is {kind}, before it is scaled: no loss scale can help. Look for inf \
and NaN in the data, for a logarithm of or a division by zero, and for activations \
beyond float16's 65504: give such a layer, and the last one, dtype="float32"."""
_GRADIENTS = """\
Gradients that were not finite, the model's last ones first: {names}."""
_BACKWARD = """\
No inf or NaN was seen in the loss itself, so this begins on the way back from it, \
between the loss and the variable named first. Look there for an infinite derivative, \
as a square root has at zero, or give that layer dtype="float32"."""
_FLOOR = """\
The loss scale is at its floor, {floor}, and cannot fall further. If the gradients are \
too large for float16 at that scale, lower `min_loss_scale` or the learning rate."""
_FIXED = """\
The loss scale is fixed. Take a smaller one, or a DynamicLossScale, which falls by \
itself."""
_WEIGHTS = """\
Weights that hold inf or NaN: {names}. They stay so. Go back to a checkpoint."""
_STATISTICS = """\
Variables that are not trained, as BatchNormalization's statistics, hold inf or NaN: \
{names}. A skipped step cannot take back what its forward pass did to them, and they \
stay so: predictions are lost. Go back to a checkpoint, or set them anew, and keep the \
data and that layer's inputs finite."""


def of_stall(optimizer: Any, model: Any, steps: int) -> str:
    """Returns what is to be said of `steps` steps that were skipped in a row.

    Args:
      optimizer: A `LossScaleOptimizer`.
      model: The model that it trains, of any Keras.
      steps: How many.

    Returns:
      A message of several lines: one that says what happened, and one for each finding.
    """
    now = scale_text(float(optimizer.loss_scale))
    unit = unit_of(optimizer)
    first = f"{steps} steps in a row were skipped{unit}. The loss scale is {now}."
    loss = optimizer.nonfinite_loss()
    faults = [(f.variable, f.kind) for f in optimizer.nonfinite_gradients()]
    findings = [
        _LOSS.format(kind=_KINDS[loss]) if loss else None,
        _named(_GRADIENTS, faults),
        _BACKWARD if faults and not loss else None,
        None if loss else _of_scale(optimizer.loss_scale),
        _named(_WEIGHTS, nonfinite(model, model.trainable_weights)),
        of_statistics(model),
    ]
    return "\n  * ".join([first, *(found for found in findings if found)])


def unit_of(optimizer: Any) -> str:
    """Returns what is to be said of what a step is: nothing where there is no doubt."""
    accumulated = getattr(optimizer, "gradient_accumulation_steps", None)
    if not accumulated:
        return ""
    return f" (each a batch, with gradient_accumulation_steps={accumulated})"


def of_statistics(model: Any) -> Optional[str]:
    """Returns what is to be said of a model's untrained variables, None if nothing."""
    return _named(_STATISTICS, nonfinite(model, model.non_trainable_weights))


def _of_scale(loss_scale: LossScale) -> Optional[str]:
    if isinstance(loss_scale, FixedLossScale):
        return _FIXED
    floor = getattr(loss_scale, "min_loss_scale", 0.0)
    return (
        _FLOOR.format(floor=scale_text(floor)) if float(loss_scale) <= floor else None
    )


def nonfinite(model: Any, variables: Sequence[Any]) -> List[Tuple[Any, str]]:
    """Returns pairs of a variable that is not finite, and "nan" or "inf"."""
    kinds = [(variable, _kind(model, variable)) for variable in variables]
    return [(variable, kind) for variable, kind in kinds if kind]


def _kind(model: Any, variable: Any) -> Optional[str]:
    if not tf.as_dtype(variable.dtype).is_floating:
        return None
    # Each replica has statistics of its own, and perhaps one alone is poisoned.
    tensor = kerases.tensor_of(variable)
    copies = model.distribute_strategy.experimental_local_results(tensor)
    # On their devices: of a large variable only one bool comes to the host.
    if all(bool(tf.reduce_all(tf.math.is_finite(copy))) for copy in copies):
        return None
    is_nan = any(bool(tf.reduce_any(tf.math.is_nan(copy))) for copy in copies)
    return "nan" if is_nan else "inf"


def _named(sentence: str, faults: Sequence[Tuple[Any, str]]) -> Optional[str]:
    """Returns `sentence` with the names of some variables, the last ones first."""
    names = [f"{kerases.variable_name(v)} ({_KINDS[kind]})" for v, kind in faults]
    if not names:
        return None
    more = len(names) - _NAMED
    listed = ", ".join(names[::-1][:_NAMED]) + (f" and {more} more" if more > 0 else "")
    return sentence.format(names=listed)
