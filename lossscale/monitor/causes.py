"""Why steps are skipped again and again: the causes that a stall names.

A cause yields its text where it is true of what was seen, whatever the others say. A
stall tells the first one that is true, in the order of `CAUSES`.
"""

from __future__ import annotations

from typing import Callable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from lossscale.monitor import model as models
from lossscale.monitor.asking import Texts
from lossscale.monitor.model import Fault, first_of, listed
from lossscale.monitor.watched import Watched
from lossscale.plotting import scale_text
from lossscale.ranges.causes import (
    ACTIVATIONS,
    BAD_DATA,
    BAD_WEIGHTS,
    INFINITE_DERIVATIVE,
    LEARNING_RATE,
    SCALE_TOO_HIGH,
    ZERO,
)

#: A lower loss scale makes no gradient overflow in float32 that is not huge by itself.
_HIGH_IN_FLOAT32 = 2.0**64
FIND = "lossscale.find_nonfinite(model, x, y) on that batch"
BACKWARD = """\
No inf or NaN was seen in the loss itself, so most likely this begins in the backward \
pass."""


class Seen(NamedTuple):
    """What was seen at a stall.

    Attributes:
      w: The optimizer.
      loss: What the unscaled loss was, "inf" or "nan", or None.
      gradients: The variables whose gradients were not finite.
      weights: The weights that are not finite, those of frozen layers as well.
      accumulators: The model's variables that may add such gradients up, by name.
      layer: The kernel and the bias of a layer whose input was not finite, or None.
    """

    w: Watched
    loss: Optional[str]
    gradients: Sequence[Fault]
    weights: Sequence[Fault]
    accumulators: Mapping[str, object]
    layer: Optional[Tuple[str, str]]

    @property
    def is_backward(self) -> bool:
        """Whether nothing was seen but gradients."""
        others = (self.loss, self.weights, self.accumulators, self.layer)
        return bool(self.gradients) and not any(others)

    @property
    def can_fall(self) -> bool:
        return self.w.scale._can_change and self.w.last.loss_scale > self.w.floor

    @property
    def may_be_too_high(self) -> bool:
        """Whether gradients may overflow because they are scaled up."""
        now = self.w.last.loss_scale
        if not self.w.computes_in_float16:
            return self.is_backward and now > _HIGH_IN_FLOAT32
        return self.is_backward and (now > 1.0 or self.can_fall)


def seen_now(w: Watched) -> Seen:
    """Looks at the model, and at the record of the last step that was not finite."""
    model, faults = w.run.model, w.faults
    ignored = {id(variable) for variable in w.run.infinite}
    weights = [v for v in models.weights_of(model) if id(v) not in ignored]
    return Seen(
        w,
        w.optimizer.nonfinite_loss(),
        faults,
        models.nonfinite(model, weights),
        models.accumulators(model, faults),
        models.layer_with_bad_input(model, faults),
    )


def what_to_look_at(w: Watched) -> str:
    """Of batches whose loss, or whose layer's input, was not finite."""
    (rows, is_shuffled), order = w.run.data, ""
    if rows:
        return f"""\
These rows of the data hold inf or NaN, counted from 0: {first_of(rows)}. Look at \
these rows, and repair them or leave them out."""
    if is_shuffled:
        order = """\
 `fit` shuffles, so in the next epoch a batch has other rows: shuffle=False keeps \
them."""
    if rows is None:
        return f"""\
Look whether the data of that batch hold inf or NaN. If not, {FIND} names the \
layer.{order}"""
    return f"The data are finite: {FIND} names the layer.{order}"


def of_weights(seen: Seen) -> Texts:
    if seen.weights:
        then = "Then lower the learning rate."
        if not any(w.applied for w in seen.w.run.watched):
            then = """\
This `fit` has applied no step, so look at what set them before, such as a file."""
        yield f"""\
Weights that hold inf or NaN: {listed(seen.weights)}. {BAD_WEIGHTS} {then}"""


def of_loss(seen: Seen) -> Texts:
    if not seen.loss or seen.weights:
        return
    w, rows, likely = seen.w, seen.w.run.data.bad_rows, []
    # Fewer bad rows than bad steps in a row are not the cause of these.
    if rows and len(rows) >= w.last.skips.bad_losses:
        likely.append(f"{BAD_DATA}, in rows {first_of(rows)}, counted from 0")
    if w.applied:  # before that no learning rate has had an effect in this training
        likely.append(LEARNING_RATE)
    if rows is None:
        likely.append(BAD_DATA)
    if w.computes_in_float16:
        last = ""
        if models.ends_in_float16(w.run.model):
            last = ", and so does the last one"
        likely.append(ACTIVATIONS + last)
    if w.last.applied and not w.applied:
        likely.append(LEARNING_RATE)
    likely.append(ZERO)
    if seen.loss == "nan":
        likely.append("a logarithm or a root of a negative number")
    yield f"""\
{FIND} names the layer, or says that the data are not finite. Likeliest first: \
{"; ".join(likely)}."""


def of_accumulators(seen: Seen) -> Texts:
    if seen.accumulators and not seen.weights:
        names = ", ".join(f"model.{name}" for name in seen.accumulators)
        yield f"""\
Variables of the model with the shape of such a gradient hold inf or NaN, too: \
{names}. If your program adds gradients up in them, clear them with \
assign(tf.zeros_like(total)). Multiplied by 0, an infinity becomes NaN and stays, and \
no step is applied again, at any loss scale."""


def of_input(seen: Seen) -> Texts:
    if seen.layer and not seen.loss and not seen.weights:
        kernel, bias = seen.layer
        where = seen.w.batches.where([seen.w.last.skips.total - 1])
        yield f"""\
The gradient of {kernel} is NaN, and that of {bias} is finite. So the input of this \
layer held inf or NaN{where}, or numbers whose products overflow in float32, and the \
layer's activation hid it from the loss, as relu does. {what_to_look_at(seen.w)}"""


def of_large_gradients(seen: Seen) -> Texts:
    """Gradients that overflow although the loss scale cannot be the cause."""
    if not seen.is_backward or seen.may_be_too_high:
        return
    w, dtype, end = seen.w, "float32", "3.4e38"
    why = f"No layer computes in float16, so a loss scale of {w.last.shown} is not it."
    if w.computes_in_float16:
        dtype, end = "float16", "65504"
        why = f"""\
The loss scale is {w.last.shown}: the gradients are not finite even without being \
scaled up."""
    if w.last.applied:
        end += ", as they become with a learning rate that is too high"
    yield f"""\
{BACKWARD} {why} Either there is {INFINITE_DERIVATIVE}. Or the gradients are too large \
for {dtype}, which ends at {end}. {FIND} says which, and what to write."""


def of_fixed_scale(seen: Seen) -> Texts:
    w = seen.w
    if not seen.may_be_too_high or w.scale._can_change:
        return
    if w.applied:
        yield f"""\
{BACKWARD} At this loss scale, which is fixed, {w.applied} steps were applied, so the \
gradients have grown. Either {LEARNING_RATE} has made them grow. Or they have to be so \
large, and need a smaller loss scale: a DynamicLossScale comes down by itself. \
{_if_not(w)}"""
    else:
        yield f"{BACKWARD} Most likely: {SCALE_TOO_HIGH} {_if_not(w)}"


def of_floor(seen: Seen) -> Texts:
    if seen.may_be_too_high and seen.w.scale._can_change and not seen.can_fall:
        yield f"""\
{BACKWARD} Most likely `min_loss_scale` is too high: the loss scale is at that floor, \
{scale_text(seen.w.floor)}, and cannot fall further. Lower it: the default is 1. \
{_if_not(seen.w)}"""


def of_falling_scale(seen: Seen) -> Texts:
    w = seen.w
    if not (seen.may_be_too_high and seen.can_fall):
        return
    likely = "the loss scale is still too high"
    if w.applied:
        likely = "the gradients have grown, and the loss scale falls to fit them"
    largest = ""
    if w.last.largest is None:
        largest = " LossScaleMonitor(check_underflow=True) logs the largest gradient."
    yield f"""\
{BACKWARD} Most likely {likely}. It was read between {scale_text(w.lowest)} and \
{scale_text(w.highest)} in this training.{largest} {_if_not(w)}"""


def _if_not(w: Watched) -> str:
    text = f"If steps are still skipped when it is low, there is {INFINITE_DERIVATIVE}"
    if w.applied:
        text += f", or {LEARNING_RATE}"
    return f"{text}: {FIND} names the layer."


#: The first that is true is told.
CAUSES: List[Callable[[Seen], Texts]] = [
    of_weights,
    of_loss,
    of_accumulators,
    of_input,
    of_large_gradients,
    of_fixed_scale,
    of_floor,
    of_falling_scale,
]
