"""Why steps are skipped again and again: the causes that a stall names.

A cause yields its text where it is true of what was seen, whatever the others say.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from lossscale.monitor import model as models
from lossscale.monitor.asking import Texts
from lossscale.monitor.watched import Watched
from lossscale.plotting import scale_text
from lossscale.ranges import causes as words

#: A lower loss scale makes no gradient overflow in float32 that is not huge by itself.
_HIGH_IN_FLOAT32 = 2.0**64
FIND = "lossscale.find_nonfinite(model, x, y) on that batch"
BACKWARD = """\
No inf or NaN was seen in the loss itself, so most likely this begins in the backward \
pass."""


class Seen(NamedTuple):
    """What was seen of an optimizer, and of its model, at a stall.

    Attributes:
      w: The optimizer.
      loss: What the unscaled loss was, "inf" or "nan", or None.
      gradients, weights: Those that were not finite.
      accumulators: The model's variables that may add such gradients up, by name.
      layer: The kernel and the bias of a layer whose input was not finite, or None.
    """

    w: Watched
    loss: Optional[str]
    gradients: List[models.Fault]
    weights: List[models.Fault]
    accumulators: Dict[str, Any]
    layer: Optional[Tuple[str, str]]

    @property
    def is_backward(self) -> bool:
        """Whether nothing was seen but gradients."""
        others = (self.loss, self.weights, self.accumulators, self.layer)
        return bool(self.gradients) and not any(others)

    @property
    def can_fall(self) -> bool:
        floor = getattr(self.w.scale, "min_loss_scale", 0.0)
        return self.w.scale._can_change and self.w.last.loss_scale > floor

    @property
    def may_be_too_high(self) -> bool:
        """Whether gradients may overflow because they are scaled up."""
        now = self.w.last.loss_scale
        if self.w.computes_in_float16:
            return self.is_backward and (now > 1.0 or self.can_fall)
        return self.is_backward and now > _HIGH_IN_FLOAT32


def seen_now(w: Watched) -> Seen:
    """Looks at the model, and at the record of the last step that was not finite."""
    model, faults = w.run.model, w.faults
    ignored = {id(variable) for variable in w.run.infinite}
    weights = [*model.trainable_weights, *models.untrained(model, of_frozen=True)]
    weights = [v for v in weights if id(v) not in ignored]
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
These rows of the data hold inf or NaN, counted from 0: {models.first_of(rows)}. Look \
at these rows, and repair them or leave them out."""
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
        names = models.listed(seen.weights)
        yield f"Weights that hold inf or NaN: {names}. {words.BAD_WEIGHTS} {then}"


def of_loss(seen: Seen) -> Texts:
    if not seen.loss or seen.weights:
        return
    w, rows, likely = seen.w, seen.w.run.data.bad_rows, []
    # Fewer bad rows than bad steps in a row are not the cause of these.
    if rows and len(rows) >= w.last.bad_losses:
        listed = models.first_of(rows)
        likely.append(f"{words.BAD_DATA}, in rows {listed}, counted from 0")
    if w.applied:  # before that no learning rate has had an effect in this training
        likely.append(words.LEARNING_RATE)
    if rows is None:
        likely.append(words.BAD_DATA)
    if w.computes_in_float16:
        is_last = models.ends_in_float16(w.run.model)
        last = ", and so does the last one" if is_last else ""
        likely.append(words.ACTIVATIONS + last)
    if w.last.applied and not w.applied:
        likely.append(words.LEARNING_RATE)
    likely.append(words.ZERO)
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
        where = seen.w.batches.where([seen.w.last.own - 1])
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
{BACKWARD} {why} Either there is {words.INFINITE_DERIVATIVE}. Or the gradients are too \
large for {dtype}, which ends at {end}. {FIND} says which, and what to write."""


def of_high_scale(seen: Seen) -> Texts:
    if not seen.may_be_too_high:
        return
    w, rate = seen.w, f", or {words.LEARNING_RATE}" if seen.w.applied else ""
    if seen.can_fall:
        likely = "Most likely the loss scale is still too high."
        if w.applied:
            likely = """\
Most likely the gradients have grown, and the loss scale falls to fit them."""
        low, high = scale_text(w.lowest), scale_text(w.highest)
        likely += f" It was read between {low} and {high} in this training."
        if w.last.largest is None:
            likely += """\
 LossScaleMonitor(check_underflow=True) logs the largest gradient."""
    elif w.scale._can_change:
        likely = f"""\
Most likely `min_loss_scale` is too high: the loss scale is at that floor, \
{w.last.shown}, and cannot fall further. Lower it: the default is 1."""
    elif w.applied:
        likely = f"""\
At this loss scale, which is fixed, {w.applied} steps were applied, so the gradients \
have grown. Either {words.LEARNING_RATE} has made them grow. Or they have to be so \
large, and need a smaller loss scale: a DynamicLossScale comes down by itself."""
    else:
        likely = f"Most likely: {words.SCALE_TOO_HIGH}"
    yield f"""\
{BACKWARD} {likely} If steps are still skipped when it is low, there is \
{words.INFINITE_DERIVATIVE}{rate}: {FIND} names the layer."""


#: A stall tells the first that is true.
CAUSES: List[Callable[[Seen], Texts]] = [
    *(of_weights, of_loss, of_accumulators, of_input),
    *(of_large_gradients, of_high_scale),
]
