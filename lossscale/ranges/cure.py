"""What to write against a fault of a training step, as far as trials confirm it.

A trial computes the step again as if advice had been followed:

```
the layer at fault is float32, and what must be float32 with it:
  no fault is left, and gradients reach the layers before it:  this is written
  the same fault is left:   these are not written
    the whole model in float32 has no fault:
                            the fewest layers before it, in float32 too, that help
    else:                   what its operation needs, say a small number in a divisor
  another fault is left:    both are written
  the trial cannot run, or gradients are all zero even in float32:
                            this is written, and that it is undecided
```
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence

import tensorflow as tf

from lossscale.ranges.advice import Advice, Fault, Trial
from lossscale.ranges.model_state import SIXTEEN_BITS
from lossscale.ranges.training_step import TrainingStep
from lossscale.runtime import keras_versions

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
_NOT_TRIED = """\
Whether float32 helps could not be tried: {error} """
_ALL_ZERO = """\
With it the step is finite, but the layers before get gradients of zero on this batch, \
in float32, too. So this does not decide whether they will learn: try another batch."""
_BEFORE = """\
{layer} alone in float32 has the same fault, since float16 has rounded what it is \
given. With all of these in float32 it has none."""
_WHOLE = """\
The whole model in float32 has no such fault, but which layers need it was not found."""
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
        model: Any,
        keras: Any,
        step: TrainingStep,
        fault: Fault,
        step_of: StepOf,
        describe: Callable[[Fault], str],
    ) -> None:
        self._model, self._keras, self._step = model, keras, step
        self._fault, self._step_of, self._describe = fault, step_of, describe
        self._error = ""
        self._path = _path_of(fault)
        self._whole: Optional[TrainingStep] = None
        self._has_whole = False

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
        if fault.dtype not in SIXTEEN_BITS and fault.call is not None:
            return self._with_layers_before(_COMPUTED_IN_32)
        if fault.call is None:
            return self._with_layers_before("")
        advice, tried = Advice(self._keras, [fault]), self._trial
        advice.try_out(Trial, self._faults_in)
        after = tried(advice)
        if after is None:
            undecided = _UNDECIDED.format(error=self._error)
            return _joined(str(advice), undecided)
        left = after.first_fault()
        if left is None:
            self.is_confirmed = True
            if after.usable_scale(self._path) is not None:
                return str(advice)
            return self._where_gradients_are_zero(advice)
        if _is_same(left, fault):
            return self._with_layers_before(
                _CASTS_ITSELF.format(dtype=left.dtype)
                if left.dtype in SIXTEEN_BITS
                else _TRIED
            )
        # What was added for the fault that is left is not advised.
        kept = [other for other in advice.faults if not _is_same(other, left)]
        fewer = Advice(self._keras, kept)
        others = Cure(
            self._model, self._keras, after, left, self._step_of, self._describe
        )
        rest = others._with_layers_before(_COMPUTED_IN_32)
        return _joined(str(fewer), f"{_WITH_THAT}{self._describe(left)} {rest}")

    def is_too_large(self) -> bool:
        """Whether gradients are too large for float16 only, so that a scale helps."""
        scale, whole = self._step.usable_scale(self._path), self.whole
        is_below = scale is not None and scale < 1.0
        return is_below and whole is not None and whole.first_fault() is None

    @property
    def whole(self) -> Optional[TrainingStep]:
        """The step with all layers in float32. None: it cannot run so."""
        if not self._has_whole:
            layers = keras_versions.layers_of(self._model)
            self._whole = self._trial(Advice(self._keras), layers)
            self._has_whole = True
        return self._whole

    def _trial(self, advice: Advice, layers: Sequence[Any] = ()) -> Optional[Any]:
        try:
            return self._step_of(Trial(advice, layers))
        except (tf.errors.OpError, TypeError, ValueError) as error:
            self._error = f"{error!s:.200}"
            return None

    def _faults_in(self, trial: Trial) -> List[Fault]:
        fault = self._step_of(trial).first_fault()
        return [fault] if fault and fault.dtype in SIXTEEN_BITS else []

    def _where_gradients_are_zero(self, advice: Advice) -> str:
        whole = self.whole
        if whole is None or whole.usable_scale(self._path) is None:
            return _joined(str(advice), _ALL_ZERO)
        fewest = self._fewest_layers_before()
        return str(fewest) if fewest else _joined(str(advice), _ALL_ZERO)

    def _with_layers_before(self, tried: str) -> str:
        """Returns the text where float32 in the layer at fault does not help."""
        whole = self.whole
        if whole is None and self._fault.dtype in SIXTEEN_BITS:
            return _NOT_TRIED.format(error=self._error) + self._remedy()
        if whole is not None and whole.first_fault() is None and self._is_narrow():
            fewest = self._fewest_layers_before()
            if fewest is None:
                return _joined(self._remedy(), _WHOLE)
            self.is_confirmed = True
            alone = self._fault.call and _BEFORE.format(layer=self._path)
            return _joined(str(fewest), alone or "")
        return tried + self._remedy()

    def _is_narrow(self) -> bool:
        return any(call.dtype in SIXTEEN_BITS for call in self._step.calls)

    def _fewest_layers_before(self) -> Optional[Advice]:
        """Returns the fewest layers up to the fault that help if they are float32."""
        calls = [c for c in self._step.before(self._path) if c.dtype in SIXTEEN_BITS]
        faults = [self._fault] if self._fault.dtype in SIXTEEN_BITS else []
        fewest, most, best = 0, len(calls), None
        while fewest < most or best is None:
            middle = (fewest + most) // 2 if best is not None else most
            chosen = [Fault(call, dtype=call.dtype) for call in calls[-middle:]]
            advice = Advice(self._keras, [*faults, *chosen] if middle else faults)
            advice.try_out(Trial, self._faults_in)
            step = self._trial(advice)
            is_cured = (
                step is not None
                and step.first_fault() is None
                and step.usable_scale(self._path) is not None
            )
            if is_cured:
                best, most = advice, middle
            elif best is None:
                return None
            else:
                fewest = middle + 1
        return best

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
