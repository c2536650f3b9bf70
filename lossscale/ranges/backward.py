"""Finds the layer that makes a gradient infinite on the way back from the loss."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import tensorflow as tf

from lossscale.gradients.check import dense_part
from lossscale.ranges.layer_calls import Call, floats_in
from lossscale.ranges.origins import Origins, is_bad, kinds_of, largest_of
from lossscale.runtime import kerases


class CallsOnTape:
    """A `Watcher` that notes every call, and copies its inputs on the tape.

    Two layers may get the same tensor. The gradient of a layer's own copy is only what
    that layer hands back.
    """

    def __init__(self, origins: Origins) -> None:
        self._origins = origins
        #: Calls in the order in which they returned, so inner calls come first.
        self.calls: List[Call] = []

    def begin(self, call: Call, args: Any, kwargs: Any) -> Tuple[Any, Any]:
        """Notes a call that begins, and returns copies of its arguments."""
        self._origins.enter(call, floats_in((args, kwargs)))
        args, kwargs = tf.nest.map_structure(_copy, (args, kwargs))
        call.inputs = floats_in((args, kwargs))
        return args, kwargs

    def end(self, call: Call, outputs: Any) -> Any:
        """Notes the outputs of a call that returns."""
        call.outputs = floats_in(outputs)
        self.calls.append(call)
        return outputs


def _copy(value: Any) -> Any:
    if not floats_in(value):
        return value
    copied = tf.identity(value)
    # Keras keeps a tensor's mask here (private, seen on 2.4 to 2.21 and Keras 3.15).
    mask = getattr(value, "_keras_mask", None)
    if mask is not None:
        copied._keras_mask = mask
    return copied


class Gradients:
    """The gradients of a loss at the inputs and outputs of calls, and at weights."""

    def __init__(self, tape: Any, loss: Any, calls: List[Call], model: Any) -> None:
        self._calls = calls
        tensors = [t for call in calls for t in (*call.inputs, *call.outputs)]
        weights = list(model.trainable_variables)
        sources = [*tensors, *(kerases.tensor_of(weight) for weight in weights)]
        found = tape.gradient(loss, sources)
        keys = [id(each) for each in (*tensors, *weights)]
        self._by_id: Dict[int, Any] = {
            key: dense_part(grad) for key, grad in zip(keys, found) if grad is not None
        }

    @property
    def are_finite(self) -> bool:
        """Whether all of these gradients are finite."""
        return not any(map(is_bad, self._by_id.values()))

    def first_bad(self) -> Optional[Call]:
        """Returns the first call on the way back that made a finite gradient infinite.

        None: the gradient was infinite or NaN already at the model's outputs.
        """
        guilty = [call for call in self._calls if self._is_guilty(call)]
        innermost = [
            call for call in guilty if not any(o.is_within(call) for o in guilty)
        ]
        return innermost[-1] if innermost else None

    def kind_and_largest(self, call: Call) -> Tuple[str, float]:
        """Returns whether a call makes inf or NaN, and the largest gradient it got."""
        bad = [each for each in self._left_by(call) if is_bad(each)]
        kinds = {kind for each in bad for kind in kinds_of(each)}
        largest = [largest_of(each) for each in self._at(call.outputs)]
        return "nan" if kinds == {"nan"} else "inf", max(largest, default=0.0)

    def _is_guilty(self, call: Call) -> bool:
        came = self._at(call.outputs)
        is_reached = bool(came) and not any(map(is_bad, came))
        return is_reached and any(map(is_bad, self._left_by(call)))

    def _left_by(self, call: Call) -> List[Any]:
        weights = getattr(call.layer, "trainable_variables", ())
        return self._at([*call.inputs, *weights])

    def _at(self, things: Any) -> List[Any]:
        return [self._by_id[id(each)] for each in things if id(each) in self._by_id]
