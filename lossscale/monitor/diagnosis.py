"""Why steps were skipped: what a monitor finds in its readings and in the model.

A function returns a finding as the text that says it, or None if it does not apply.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from lossscale.gradients.check import worst_of_all
from lossscale.monitor import texts
from lossscale.monitor.reading import Batches, Readings, attributes_of
from lossscale.plotting import scale_text
from lossscale.ranges.magnitudes import WORDS
from lossscale.runtime import keras_versions

_NAMED = 5  # the most variables that a message names
#: A lower loss scale makes no gradient overflow in float32 that is not huge by itself.
_HIGH_IN_FLOAT32 = 2.0**64
_KERAS = ("keras", "tf_keras", "tensorflow")


def of_stall(
    optimizer: Any,
    model: Any,
    logs: Any,
    readings: Readings,
    batches: Batches,
    infinite: Sequence[Any],
) -> List[str]:
    """Returns what was seen at a stall, one cause of it, and what it has left.

    What it has left are statistics that are not finite, but `infinite`, which began so.
    """
    skips, loss = readings.last.skips, optimizer.nonfinite_loss()
    faults = [(f.variable, f.kind) for f in optimizer.nonfinite_gradients()]
    seen: List[Optional[str]] = []
    if loss:
        steps = f", at each of the last {skips.bad_losses} steps"
        steps = steps if skips.bad_losses > 1 else ""
        name = bad_outputs(model, logs) or _name_of_loss(model)
        seen.append(texts.LOSS.format(name=name, kind=WORDS[loss], steps=steps))
    if faults:
        seen.append(texts.GRADIENTS.format(names=_listed(faults)))
    accumulators = _accumulators(model, [variable for variable, _ in faults])
    cause = _nonfinite(texts.WEIGHTS, model, model.trainable_weights)
    if cause is None and loss:
        cause = _of_loss(optimizer, model, readings)
    elif cause is None and accumulators:
        names = ", ".join(f"model.{name}" for name in accumulators)
        cause = texts.ACCUMULATORS.format(names=names)
    elif cause is None and faults:
        cause = of_input(optimizer, model, readings, batches)
        cause = cause or texts.BACKWARD + _of_backward(optimizer, model, readings)
    left = of_statistics(model, [*infinite, *accumulators.values()])
    return list(filter(None, [*seen, cause, left]))


def of_input(
    optimizer: Any, model: Any, readings: Readings, batches: Batches
) -> Optional[str]:
    """Returns the finding that a layer's input was not finite, if that is known.

    A bias's gradient is the sum of the gradients at the layer's output. If it is
    finite, so are these, and a NaN in the kernel's gradient is of the input.
    """
    kinds = {id(f.variable): f.kind for f in optimizer.nonfinite_gradients()}
    for layer in keras_versions.layers_of(model) if "nan" in kinds.values() else []:
        pair = [getattr(layer, name, None) for name in ("kernel", "bias")]
        if [kinds.get(id(weight)) for weight in pair] == ["nan", None] and all(
            getattr(weight, "trainable", False) for weight in pair
        ):
            kernel, bias = map(keras_versions.variable_name, pair)
            where = batches.where([readings.last.skips.total - 1])
            return texts.INPUT.format(kernel=kernel, bias=bias, where=where)
    return None


def computes_in_float16(optimizer: Any, model: Any) -> bool:
    """Whether a layer does, or gradients are added up in it. No layers: perhaps."""
    dtypes = [layer.compute_dtype for layer in _computing_layers(model)]
    added_up = getattr(optimizer, "communication_dtype", None)
    return "float16" in [*dtypes, added_up] or not dtypes


def _computing_layers(model: Any) -> List[Any]:
    """Returns the layers that compute something, without those that only hold some."""

    def only_holds(layer: Any) -> bool:
        is_of_keras = type(layer).__module__.split(".")[0] in _KERAS
        is_input = type(layer).__name__ == "InputLayer"
        return is_of_keras and (hasattr(layer, "layers") or is_input)

    return [layer for layer in keras_versions.layers_of(model) if not only_holds(layer)]


def _is_last_in_float16(model: Any) -> bool:
    outputs = tf.nest.flatten(getattr(model, "outputs", None) or [])
    dtypes = [tf.as_dtype(output.dtype).name for output in outputs]
    if dtypes:
        return "float16" in dtypes
    return {layer.compute_dtype for layer in _computing_layers(model)} == {"float16"}


def _of_loss(optimizer: Any, model: Any, readings: Readings) -> str:
    causes = [texts.BAD_DATA]
    if readings.last.applied > 0:  # before the first step no rate has had an effect
        causes.append(texts.LEARNING_RATE)
    if computes_in_float16(optimizer, model):
        is_last = _is_last_in_float16(model)
        causes.append(texts.ACTIVATIONS_AND_LAST if is_last else texts.ACTIVATIONS)
    return texts.CAUSES.format(causes="; ".join([*causes, texts.DIVISION]))


def _of_backward(optimizer: Any, model: Any, readings: Readings) -> str:
    now, rule = readings.last.loss_scale, optimizer.loss_scale
    is_wide = not computes_in_float16(optimizer, model)
    rate = texts.RATE
    if not readings.last.applied:  # no rate has had an effect
        rate = texts.ENDS.format(end="3.4e38" if is_wide else "65504")
    if is_wide and now < _HIGH_IN_FLOAT32:
        return texts.WIDE.format(now=scale_text(now), rate=rate)
    floor = getattr(rule, "min_loss_scale", 0.0)
    if now <= 1.0 and (now <= floor or not rule._can_change):
        return texts.UNSCALED.format(now=scale_text(now), rate=rate)
    if not rule._can_change:
        return texts.FIXED + texts.IF_NOT
    if now <= floor:
        return texts.FLOOR.format(floor=scale_text(floor)) + texts.IF_NOT
    low, high = scale_text(readings.lowest), scale_text(readings.highest)
    done, left = backoffs(rule, readings.highest, now), backoffs(rule, now, floor)
    search = texts.SEARCHED.format(low=low, high=high)
    if done and done + left < math.inf:
        search = texts.SEARCHING.format(
            done=done,
            high=high,
            scale=scale_text(now),
            floor=scale_text(floor),
            left=left,
        )
    largest = texts.LARGEST_UNSEEN
    if math.isfinite(readings.largest):
        largest = texts.LARGEST.format(
            largest=readings.largest, scaled=readings.largest * now
        )
    elif readings.last.largest is None:
        largest = texts.LARGEST_NOT_KEPT
    return texts.SEARCH.format(search=search, largest=largest) + texts.IF_NOT


def of_weights(model: Any) -> Optional[str]:
    """Returns the finding about weights where no gradient is checked."""
    return _nonfinite(texts.UNCHECKED, model, model.trainable_weights)


def of_statistics(model: Any, but: Sequence[Any]) -> Optional[str]:
    """Returns the finding about untrained variables, None if all are finite."""
    ignored = {id(v) for v in but}
    variables = [v for v in keras_versions.statistics_of(model) if id(v) not in ignored]
    return _nonfinite(texts.STATISTICS, model, variables)


def infinite_statistics(model: Any) -> List[Any]:
    """Returns the untrained variables that are infinite, as a least value may begin."""
    variables = keras_versions.statistics_of(model) if model.built else []
    return [v for v in variables if _kind_of(model, v) == "inf"]


def backoffs(loss_scale: Any, high: float, low: float) -> float:
    """Returns how often a scale backs off from `high` to `low`, infinite if unknown."""
    multiplier = getattr(loss_scale, "multiplier", None)
    backoff = getattr(loss_scale, "backoff_factor", None) or 1 / (multiplier or 1)
    if low >= high:
        return 0
    if backoff >= 1 or low <= 0:
        return math.inf
    return math.ceil(math.log(high / low) / -math.log(backoff) - 1e-6)


def bad_outputs(model: Any, logs: Any) -> str:
    """Returns which outputs of several have a loss that is not finite in the logs."""
    named = getattr(model, "loss", None)
    outputs = [*(getattr(model, "output_names", None) or ())]
    outputs += list(named) if isinstance(named, dict) else []
    losses = logs if isinstance(logs, dict) else {}
    bad = [n for n in outputs if not np.isfinite(losses.get(f"{n}_loss", 0.0))]
    return f" of output {' and '.join(dict.fromkeys(bad))}" if bad else ""


def _name_of_loss(model: Any) -> str:
    names = []
    # A nest of names, functions and objects.
    for loss in tf.nest.flatten(getattr(model, "loss", None)):
        named = getattr(loss, "__name__", None) or getattr(loss, "name", loss)
        names += [named] if isinstance(named, str) else []
    return f" ({', '.join(names)})" if names else ""


def _accumulators(model: Any, at_fault: Sequence[Any]) -> Dict[str, Any]:
    """Returns bad attributes of a model that may add up the gradients at fault."""
    shapes = {tuple(v.shape) for v in at_fault}
    trained = {id(v) for v in model.trainable_weights}
    return {
        name: value
        for name, value in attributes_of(model)
        if hasattr(value, "assign")
        and hasattr(value, "shape")
        and id(value) not in trained
        and tuple(value.shape) in shapes
        and _nonfinite(texts.STATISTICS, model, [value])
    }


def _nonfinite(sentence: str, model: Any, variables: Sequence[Any]) -> Optional[str]:
    kinds = [(variable, _kind_of(model, variable)) for variable in variables]
    faults = [(variable, kind) for variable, kind in kinds if kind]
    return sentence.format(names=_listed(faults)) if faults else None


def _kind_of(model: Any, variable: Any) -> str:
    local = model.distribute_strategy.experimental_local_results
    copies = local(keras_versions.tensor_of(variable))
    # Of a large variable only one number comes from the device to the host.
    worst = sum(float(worst_of_all([copy])[0]) for copy in copies)
    return "nan" if math.isnan(worst) else "inf" if math.isinf(worst) else ""


def _listed(faults: Sequence[Tuple[Any, str]]) -> str:
    """Returns the names of variables and what they hold, the last ones first."""
    names = [f"{keras_versions.variable_name(v)} ({WORDS[kind]})" for v, kind in faults]
    more = len(names) - _NAMED
    return ", ".join(names[::-1][:_NAMED]) + (f" and {more} more" if more > 0 else "")
