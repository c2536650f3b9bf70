"""What to say about steps skipped in a row: the findings, and what to try."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import tensorflow as tf

from lossscale.optimizer.record import OwnSteps
from lossscale.plotting import scale_text
from lossscale.ranges.magnitudes import WORDS, kind_of, on_device
from lossscale.runtime import kerases
from lossscale.scales.base import unguarded

#: The most variables that a message names.
_NAMED = 5

_LOSS = """\
The loss itself{name} is {kind}, before it is scaled{often}: no loss scale can help. \
Look for inf and NaN in the data, for a learning rate that is too high, for a \
logarithm of zero or a division by zero, and for activations beyond float16's 65504: \
give layers with such activations, and the last layer, dtype="float32"."""
_ASK = """ \
lossscale.find_nonfinite(model, x, y) names the layer, and so does \
LossScaleMonitor(check_activations=True) in `fit`."""
_GRADIENTS = """\
Gradients that were not finite, the model's last ones first: {names}."""
_BACKWARD = """\
No inf or NaN was seen in the loss itself, so this begins in the backward pass, \
between the loss and the variable named first. Look there for an infinite derivative, \
as a square root has at zero, or give that layer dtype="float32"."""
_FLOOR = """\
The loss scale is at its floor, {floor}, and cannot fall further. If the gradients are \
too large for float16 at that scale, lower `min_loss_scale` or the learning rate."""
_FLOOR_OF_ONE = """\
The loss scale is at its floor, {floor}: the gradients overflow without being scaled. \
Give the layers named dtype="float32", or lower the learning rate. Lower \
`min_loss_scale` only if you expect gradients that large."""
_FIXED = """\
The loss scale is fixed. Use a smaller one, or a DynamicLossScale, which falls by \
itself."""
_SPIKE = """\
A step was skipped as a spike, {last}. It changed neither a weight nor the loss scale. \
Look at that batch for wrong labels, damaged inputs, or a loss that is not averaged. \
If such steps belong to the run, raise `threshold` of the SpikeGuard. Later ones are \
counted as `spikes`."""
_WEIGHTS = """\
Weights that hold inf or NaN: {names}. No step repairs them. Go back to a checkpoint."""
_STATISTICS = """\
Variables that are not trained, as BatchNormalization's statistics, hold inf or NaN: \
{names}. Skipping a step does not undo what its forward pass did to them, and later \
steps cannot repair them: predictions are lost. Go back to a checkpoint, or reset \
them, and keep the data and that layer's inputs finite."""


def of_stall(
    optimizer: Any, model: Any, own: OwnSteps, activations: Optional[str] = None
) -> str:
    """Returns the message about steps that an optimizer skipped in a row.

    The first line says what happened, each other is a finding. `activations` is that
    about the layers' outputs, None if they are not watched.
    """
    now = scale_text(optimizer.loss_scale._to_show())
    unit = unit_of(optimizer)
    first = (
        f"{own.in_a_row} steps in a row were skipped{unit}. The loss scale is {now}."
    )
    loss = optimizer.nonfinite_loss()
    faults = [(f.variable, f.kind) for f in optimizer.nonfinite_gradients()]
    ask = "" if activations else _ASK
    findings = [
        _of_loss(model, WORDS[loss], own.bad_losses) + ask if loss else None,
        activations,
        _named(_GRADIENTS, faults),
        _BACKWARD if faults and not loss else None,
        _nonfinite(_WEIGHTS, model, model.trainable_weights),
        of_statistics(model),
        None if loss else _of_scale(optimizer.loss_scale),
    ]
    return "\n  * ".join([first, *filter(None, findings)])


def of_spike(optimizer: Any) -> str:
    """Returns the message about the first skipped spike."""
    return _SPIKE.format(last=last_spike(optimizer))


def last_spike(optimizer: Any) -> str:
    """Returns the size of the last spike, and its variable."""
    spike = optimizer.last_spike()
    if spike is None:  # it was another optimizer's, or came before a restart
        return "of unknown size"
    times = f"{spike.largest / spike.limit:.3g} times the limit of {spike.limit:.3g}"
    return f"with a gradient of {spike.largest:.3g} in {spike.name}, {times}"


def unit_of(optimizer: Any) -> str:
    """Returns text that says what a step is, empty unless gradients accumulate."""
    accumulated = getattr(optimizer, "gradient_accumulation_steps", None)
    if not accumulated:
        return ""
    return f" (each a batch, with gradient_accumulation_steps={accumulated})"


def of_statistics(model: Any) -> Optional[str]:
    """Returns the finding about untrained variables, None if all are finite."""
    return _nonfinite(_STATISTICS, model, model.non_trainable_weights)


def _of_loss(model: Any, kind: str, bad_losses: int) -> str:
    """Returns the finding about a loss that is not finite before it is scaled."""
    names = []
    # A nest of names, functions and objects.
    for each in tf.nest.flatten(getattr(model, "loss", None)):
        named = getattr(each, "__name__", None) or getattr(each, "name", each)
        names += [named] if isinstance(named, str) else []
    name = f" ({', '.join(names)})" if names else ""
    often = f", at each of the last {bad_losses} steps" if bad_losses > 1 else ""
    return _LOSS.format(kind=kind, name=name, often=often)


def _of_scale(loss_scale: Any) -> Optional[str]:
    if not loss_scale._can_change:
        return _FIXED
    floor = getattr(unguarded(loss_scale), "min_loss_scale", 0.0)
    if loss_scale._to_show() > floor:
        return None
    return (_FLOOR if floor > 1 else _FLOOR_OF_ONE).format(floor=scale_text(floor))


def _nonfinite(sentence: str, model: Any, variables: Sequence[Any]) -> Optional[str]:
    """Returns `sentence` with the names of variables that are not finite."""
    faults = []
    for variable in variables:
        if tf.as_dtype(variable.dtype).is_floating:
            # Each replica has its own statistics. Perhaps those of one are not finite.
            tensor = kerases.tensor_of(variable)
            copies = model.distribute_strategy.experimental_local_results(tensor)
            # Of a large variable only one number comes from the device to the host.
            kind = kind_of(max(float(on_device(copy)) for copy in copies))
            faults += [(variable, kind)] if kind else []
    return _named(sentence, faults)


def _named(sentence: str, faults: Sequence[Tuple[Any, str]]) -> Optional[str]:
    """Returns `sentence` with the names of variables, the last ones first."""
    names = [f"{kerases.variable_name(v)} ({WORDS[kind]})" for v, kind in faults]
    if not names:
        return None
    more = len(names) - _NAMED
    listed = ", ".join(names[::-1][:_NAMED]) + (f" and {more} more" if more > 0 else "")
    return sentence.format(names=listed)
