"""One training step of a model in eager mode, computed as if advice had been followed.

It is not applied. It finds the first fault, and what reaches the layers before it.
"""

from __future__ import annotations

from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Tuple,
)

import tensorflow as tf

from lossscale.gradients.check import dense_part
from lossscale.ranges.advice import Fault, Trial
from lossscale.ranges.calls import Call
from lossscale.ranges.magnitudes import WORDS, floats_in, is_bad, look
from lossscale.ranges.model_state import SIXTEEN_BITS
from lossscale.runtime import keras_versions, op_callbacks

#: Exponents of the loss scales at which gradients may be usable.
_LOWEST, _HIGHEST = -24, 24


class TrainingStep:
    """The loss, a `float32` tensor before it is scaled, and gradients of one batch."""

    def __init__(
        self,
        model: Any,
        data: Sequence[Any],
        loss_in: Callable[[Trial], Any],
        trial: Trial,
        loss_scale: float,
    ) -> None:
        self._model, self._trial, self._scale = model, trial, loss_scale
        self._grads: Dict[float, Dict[int, Any]] = {}
        self._derivative: Optional[str] = None
        with tf.GradientTape(persistent=True) as self._tape:
            self._tape.watch(data)
            self.loss = loss_in(trial)

    @property
    def calls(self) -> List[Call]:
        return self._trial.calls

    def first_fault(self) -> Optional[Fault]:
        """Returns the first fault that a loss scale of 1 does not prevent, or None."""
        forward = self._trial.at_fault(self.loss)
        if forward:
            return forward[0]
        if is_bad(self.loss):
            return Fault(None, dtype="float32", kinds=look(self.loss).kinds)
        low = min(self._scale, 1.0)
        if low < 1.0 and self._is_useless(low):
            low = 1.0
        return self._on_the_way_back(low) if self.kind_at(low) else None

    def kind_at(self, scale: float) -> Optional[str]:
        """Returns "inf", "-inf" or "nan" if some gradient is, at a loss scale."""
        return kind_of(self._gradients(scale).values())

    def reaches(self, path: Optional[str], scale: float) -> bool:
        """Whether finite gradients, not all zero, reach the layers before a call."""
        if self.kind_at(scale):
            return False
        grads = self._gradients(scale)
        things: List[Any] = []
        for call in self.before(path):
            things += getattr(call.layer, "trainable_variables", ())
        if not any(id(thing) in grads for thing in things):
            things = [t for c in self.calls if c.path == path for t in c.inputs]
        received = [grads[id(t)] for t in things if id(t) in grads]
        return not received or any(look(grad).largest > 0 for grad in received)

    def usable_scale(self, path: Optional[str]) -> Optional[float]:
        """Returns a loss scale at which gradients reach the layers before, or None."""
        if not self.kind_at(1.0):
            # Small gradients underflow at 1, and a loss scale finds a higher one.
            scales = [1.0, 2.0**8, 2.0**16, 2.0**_HIGHEST]
            return next((scale for scale in scales if self.reaches(path, scale)), None)
        if self.kind_at(2.0**_LOWEST):
            return None
        finite, infinite = _LOWEST, 0
        while infinite - finite > 1:
            middle = (finite + infinite) // 2
            is_finite = not self.kind_at(2.0**middle)
            finite, infinite = (middle, infinite) if is_finite else (finite, middle)
        return 2.0**finite if self.reaches(path, 2.0**finite) else None

    def before(self, path: Optional[str]) -> List[Call]:
        """Returns the calls within the model that had returned when a call began."""
        calls: List[Call] = []
        for call in self.calls:
            if path in [c.path for c in (call, *call.around)]:
                break
            calls.append(call)
        return [c for c in calls if c.parent is not None]

    def _is_useless(self, scale: float) -> bool:
        return not self.kind_at(scale) and not self.reaches(None, scale)

    def _gradients(self, scale: float) -> Dict[int, Any]:
        """Returns dense gradients at inputs, outputs and weights, by `id`."""
        if scale not in self._grads:
            tensors = [t for call in self.calls for t in (*call.inputs, *call.outputs)]
            weights = self._model.trainable_variables
            sources = [*tensors, *map(keras_versions.tensor_of, weights)]
            first_bad = _FirstBad()
            op_callbacks.add(first_bad)
            scaled = tf.constant(scale, self.loss.dtype)
            grads = self._tape.gradient(self.loss, sources, output_gradients=scaled)
            first_bad.is_over = True
            self._derivative = first_bad.operation
            pairs = zip((*tensors, *weights), grads)
            self._grads[scale] = {
                id(source): dense_part(grad)
                for source, grad in pairs
                if grad is not None
            }
        return self._grads[scale]

    def _on_the_way_back(self, scale: float) -> Fault:
        """Returns the fault of a step in which only gradients are not finite."""
        self._grads.pop(scale, None)  # so that its operations are looked at
        grads, calls = self._gradients(scale), self.calls
        derivative = self._derivative

        def received(call: Call) -> List[Any]:
            return [grads[id(t)] for t in call.outputs if id(t) in grads]

        def left_by(call: Call) -> List[Any]:
            things = [*call.inputs, *getattr(call.layer, "trainable_variables", ())]
            return [grads[id(t)] for t in things if id(t) in grads]

        def is_guilty(call: Call) -> bool:
            is_given = received(call) and not kind_of(received(call))
            return bool(is_given and kind_of(left_by(call)))

        guilty = [call for call in calls if is_guilty(call)]
        inner = [call for call in guilty if not any(call in c.around for c in guilty)]
        if not inner:  # they were infinite or NaN already at the model's outputs
            kinds = [kind_of(grads.values()), *map(kind_of, map(received, calls))]
            worst = [kind for kind in kinds if kind][-1:]
            wide = "float32"
            return Fault(None, derivative, dtype=wide, kinds=worst, is_backward=True)
        call = inner[-1]  # the first on the way back
        kind, incoming, is_cast = kind_of(left_by(call)), received(call), False
        if any(call in c.around for c in calls):
            # Nobody may have written its `call`: Keras casts what a layer is given.
            casts = list(_casts(self._trial, grads))
            within = [
                c for c, _ in casts if not any(c in other.around for other, _ in casts)
            ]
            if within:
                call = within[-1]
                kind, incoming = kind_of(received(call)), [dict(casts)[call]]
                is_cast = True
        return Fault(
            call,
            "Cast" if is_cast else derivative,
            dtype=self._trial.dtypes[call],
            kinds=[kind] if kind else [],
            largest=max(look(grad).largest for grad in incoming),
            is_backward=True,
        )


class _FirstBad:
    """Notes the first operation with finite inputs and a result that is not finite."""

    operation: Optional[str] = None
    is_over = False

    def note_op(self, kind: str, inputs: Any, outputs: Any) -> bool:
        is_first = not self.is_over and self.operation is None
        if is_first and any(map(is_bad, outputs)):
            is_made = not any(map(is_bad, floats_in(list(inputs))))
            self.operation = kind if is_made else None
        return not self.is_over and self.operation is None


def _casts(trial: Trial, grads: Dict[int, Any]) -> Iterator[Tuple[Call, Any]]:
    """Yields the calls at which a finite float32 gradient overflows when it is cast."""
    wide = [t for c in trial.calls for t in c.inputs if t.dtype == tf.float32]
    wide = [t for t in wide if id(t) in grads and not is_bad(grads[id(t)])]
    for call in trial.calls:
        for out in call.outputs if trial.dtypes[call] in SIXTEEN_BITS else ():
            for tensor in wide if is_bad(grads.get(id(out))) else ():
                is_same = tensor.shape == out.shape
                if is_same and bool(tf.reduce_all(tf.cast(out, tf.float32) == tensor)):
                    yield call, grads[id(tensor)]


def kind_of(values: Iterable[Any]) -> Optional[str]:
    """Returns the kind of values that are not finite, NaN only if none is infinite."""
    kinds = {kind for value in values for kind in look(value).kinds}
    return next((kind for kind in WORDS if kind in kinds), None)
