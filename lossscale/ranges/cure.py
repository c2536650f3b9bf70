"""What to write against a fault of a training step, as far as a trial confirms it.

A trial computes the step again as if advice had been followed, in eager mode, and is
not applied:

```
the layer at fault is float32, and what must be float32 with it:
  no fault is left:        this is written
  the same fault is left:  what its operation needs, say a small number in a divisor
  another fault is left:   both are written
  the trial cannot run:    this is written, and that it is undecided
```
"""

from __future__ import annotations

import itertools
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
from lossscale.ranges.advice import Advice, Fault, Trial
from lossscale.ranges.calls import Call
from lossscale.ranges.magnitudes import WORDS, floats_in, is_bad, look
from lossscale.ranges.model_state import SIXTEEN_BITS
from lossscale.runtime import keras_versions, op_callbacks

#: A loss scale at which gradients are finite that are only too large for float16.
_LOW = 2.0**-24


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
        return self._on_the_way_back(low) if self.kind_at(low) else None

    def kind_at(self, scale: float) -> Optional[str]:
        """Returns "inf", "-inf" or "nan" if some gradient is, at a loss scale."""
        return kind_of(self._gradients(scale).values())

    def reaches(self, path: Optional[str], scale: float) -> bool:
        """Whether finite gradients, not all zero, reach the layers before a call."""
        if self.kind_at(scale):
            return False
        grads = self._gradients(scale)
        before = itertools.takewhile(
            lambda call: path not in [c.path for c in (call, *call.around)], self.calls
        )
        calls = [call for call in before if call.parent is not None]
        things = [w for c in calls for w in getattr(c.layer, "trainable_variables", ())]
        if not any(id(thing) in grads for thing in things):
            things = [t for c in self.calls if c.path == path for t in c.inputs]
        received = [grads[id(t)] for t in things if id(t) in grads]
        return not received or any(look(grad).largest > 0 for grad in received)

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


#: What runs a training step within a trial.
StepOf = Callable[[Trial], TrainingStep]

_TRIED = """\
float32 was tried in this layer, and does not help. """
_COMPUTED_IN_32 = """\
It computes in float32 already. """
_CASTS_ITSELF = """\
float32 was tried in this layer, and its `call` computes in {dtype} nevertheless: look \
there for casts to {dtype}. """
_WITH_THAT = """\
This alone is not enough. With it, another fault is left: """
_UNDECIDED = """\
Whether this is enough could not be tried, since the model does not run with it as it \
is now: {error}"""
_NO_SCALE = "No loss scale helps."
_TOO_LARGE = """\
At the loss scale 2**-24 all gradients are finite, and they reach the layers before. \
So another way is to let it fall below 1: DynamicLossScale(min_loss_scale=2.0**-24)."""

_DIVISION = """\
Look for a division by zero, and add a small number, such as {small}, to the divisor."""
_LOGARITHM = """\
Look for a logarithm of zero, and add a small number, such as {small}, to its \
argument."""
_ROOT = """\
Look for an infinite derivative, as a square root or a norm has at zero, and add a \
small number to its argument: tf.sqrt(x + {small})."""
_POWER = """\
Look for a negative power or an inverse root of zero, and add a small number, such as \
{small}, to its argument."""
_NEGATIVE_ROOT = """\
Look for a square root of a negative number, and keep its argument positive: \
tf.sqrt(tf.maximum(x, {small}))."""
_RANGE = """\
Look for a derivative that is infinite at 1 and -1, as those of acos, asin and atanh, \
or an argument beyond, and keep it within: \
tf.clip_by_value(x, {small} - 1, 1 - {small})."""
_EXPONENTIAL = """\
Look for an exponential of a large number. Subtract the largest one first, or limit \
it: tf.exp(tf.minimum(x, 10.0))."""
_ANY = """\
Look for a division by zero, a logarithm of zero, an exponential, and a learning rate \
that is too high."""
_ANY_DERIVATIVE = """\
Look for an infinite derivative, as a square root and a norm have at zero, and acos at \
1, and add a small number to its argument."""
_FORWARD = {
    **dict.fromkeys(("RealDiv", "Div", "Reciprocal", "Inv", "Xdivy"), _DIVISION),
    **dict.fromkeys(("FloorDiv", "FloorMod", "Mod", "TruncateDiv"), _DIVISION),
    **dict.fromkeys(("Log", "Log1p", "Xlogy", "Xlog1py"), _LOGARITHM),
    **dict.fromkeys(("Rsqrt", "Pow"), _POWER),
    "Sqrt": _NEGATIVE_ROOT,
    **dict.fromkeys(("Acos", "Asin", "Atanh", "Erfinv"), _RANGE),
    **dict.fromkeys(("Exp", "Expm1", "Sinh", "Cosh"), _EXPONENTIAL),
}
_BACKWARD = {
    **dict.fromkeys(("SqrtGrad", "RsqrtGrad", "Pow", "Rsqrt"), _ROOT),
    **dict.fromkeys(("Reciprocal", "Inv", "ReciprocalGrad", "InvGrad"), _RANGE),
    "RealDiv": _DIVISION,
}


class Cure:
    """What helps against the first fault of a step, and what trials of that show."""

    #: Whether a trial has confirmed what the text says.
    is_confirmed = False

    def __init__(
        self,
        keras: Any,
        step: TrainingStep,
        fault: Fault,
        step_of: StepOf,
        describe: Callable[[Fault], str],
    ) -> None:
        self._keras, self._step = keras, step
        self._fault, self._step_of, self._describe = fault, step_of, describe
        self._error = ""

    def __str__(self) -> str:
        text = self.text()
        if not self._fault.is_backward:
            return text
        if self.is_too_large():
            return " ".join(filter(None, [text, _TOO_LARGE]))
        return " ".join(filter(None, ["" if self.is_confirmed else _NO_SCALE, text]))

    def text(self) -> str:
        """Returns what to write, without what a loss scale can do."""
        fault = self._fault
        if fault.call is None:
            return self._remedy()
        if fault.dtype not in SIXTEEN_BITS:
            return _COMPUTED_IN_32 + self._remedy()
        advice = Advice(self._keras, [fault])
        advice.try_out(Trial, self._faults_in)
        after = self._trial(advice)
        if after is None:
            return _joined(str(advice), _UNDECIDED.format(error=self._error))
        left = after.first_fault()
        if left is None:
            self.is_confirmed = True
            return str(advice)
        if _is_same(left, fault):
            is_narrow = left.dtype in SIXTEEN_BITS
            tried = _CASTS_ITSELF.format(dtype=left.dtype) if is_narrow else _TRIED
            return tried + self._remedy()
        # What was added for the fault that is left is not advised.
        kept = [other for other in advice.faults if not _is_same(other, left)]
        rest = Cure(self._keras, after, left, self._step_of, self._describe)._remedy()
        said = f"{_WITH_THAT}{self._describe(left)} {_COMPUTED_IN_32}{rest}"
        return _joined(str(Advice(self._keras, kept)), said)

    def is_too_large(self) -> bool:
        """Whether gradients are too large for float16 only, so that a scale helps."""
        return self.is_confirmed and self._step.reaches(_path_of(self._fault), _LOW)

    def _trial(self, advice: Advice) -> Optional[Any]:
        try:
            return self._step_of(Trial(advice))
        except (tf.errors.OpError, TypeError, ValueError) as error:
            self._error = f"{error!s:.200}"
            return None

    def _faults_in(self, trial: Trial) -> List[Fault]:
        fault = self._step_of(trial).first_fault()
        return [fault] if fault and fault.dtype in SIXTEEN_BITS else []

    def _remedy(self) -> str:
        fault = self._fault
        texts = _BACKWARD if fault.is_backward else _FORWARD
        other = _ANY_DERIVATIVE if fault.is_backward else _ANY
        # 1e-6 is lost beside larger numbers in float16, and its inverse overflows.
        small = "1e-3" if fault.dtype in SIXTEEN_BITS else "1e-6"
        text = texts.get(fault.operation or "", other).format(small=small)
        return text if fault.call else text.replace("Look for", "Look in the loss for")


def _path_of(fault: Fault) -> Optional[str]:
    call = fault.call
    return None if call is None or call.parent is None else call.path


def _is_same(one: Fault, other: Fault) -> bool:
    if _path_of(one) != _path_of(other) or one.is_backward != other.is_backward:
        return False
    return one.is_backward or one.operation == other.operation


def _joined(*texts: str) -> str:
    return "\n".join(filter(None, texts))
