"""Why steps are skipped again and again: the causes that a stall names.

A cause yields its text where it is true of what was seen, whatever the others say.
"""

from __future__ import annotations

from typing import Callable, List

from lossscale.monitor import model as models
from lossscale.monitor.asking import Texts
from lossscale.monitor.watched import Watched
from lossscale.ranges import causes as words

#: A lower loss scale makes no gradient overflow in float32 that is not huge by itself.
_HIGH_IN_FLOAT32 = 2.0**64
FIND = "lossscale.find_nonfinite(model, x, y) on that batch"
BACKWARD = """\
No inf or NaN was seen in the loss itself, so most likely this begins in the backward \
pass."""


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


def of_weights(w: Watched) -> Texts:
    bad = w.bad_weights
    if bad:
        then = "Then lower the learning rate."
        if not any(other.applied for other in w.run.watched):
            then = """\
This `fit` has applied no step, so look at what set them before, such as a file."""
        names = models.listed(bad)
        yield f"Weights that hold inf or NaN: {names}. {words.BAD_WEIGHTS} {then}"


def of_loss(w: Watched) -> Texts:
    if not w.bad_loss or w.bad_weights:
        return
    rows, likely = w.run.data.bad_rows, []
    # Fewer bad rows than bad steps in a row, in an epoch, are not the cause of these.
    if rows and len(rows) >= min(w.last.bad_losses, w.last.own - w.epoch_began.own):
        listed = models.first_of(rows)
        likely.append(f"{words.BAD_DATA}, in rows {listed}, counted from 0")
    if w.last.applied:  # before that no learning rate has had an effect
        likely.append(words.LEARNING_RATE)
    if rows is None:
        likely.append(words.BAD_DATA)
    if w.computes_in_float16:
        last = ", and so does the last one" if w.is_all_float16 else ""
        likely.append(words.ACTIVATIONS + last)
    likely.append(words.ZERO)
    if w.bad_loss == "nan":
        likely.append("a logarithm or a root of a negative number")
    yield f"""\
{FIND} names the layer, or says that the data are not finite. Likeliest first: \
{"; ".join(likely)}."""


def of_accumulators(w: Watched) -> Texts:
    sums = w.bad_sums
    if sums and not w.bad_weights:
        names = ", ".join(f"model.{name}" for name in sums)
        yield f"""\
Variables of the model with the shape of such a gradient hold inf or NaN, too: \
{names}. If your program adds gradients up in them, clear them with \
assign(tf.zeros_like(total)). Multiplied by 0, an infinity becomes NaN and stays, and \
no step is applied again, at any loss scale."""


def of_input(w: Watched) -> Texts:
    if w.bad_layer and not w.bad_loss and not w.bad_weights:
        kernel, bias = w.bad_layer
        where = w.batches.where([w.last.own - 1])
        yield f"""\
The gradient of {kernel} is NaN, and that of {bias} is finite. So the input of this \
layer held inf or NaN{where}, or numbers whose products overflow in float32, and the \
layer's activation hid it from the loss, as relu does. {what_to_look_at(w)}"""


def _is_backward(w: Watched) -> bool:
    """Whether nothing was seen but gradients."""
    others = (w.bad_loss, w.bad_weights, w.bad_sums, w.bad_layer)
    return bool(w.faults) and not any(others)


def _can_fall(w: Watched) -> bool:
    floor = getattr(w.scale, "min_loss_scale", 0.0)
    return w.scale._can_change and w.last.loss_scale > floor


def _may_be_too_high(w: Watched) -> bool:
    """Whether gradients may overflow because they are scaled up."""
    if w.computes_in_float16:
        return w.last.loss_scale > 1.0 or _can_fall(w)
    return w.last.loss_scale > _HIGH_IN_FLOAT32


def of_large_gradients(w: Watched) -> Texts:
    """Gradients that overflow although the loss scale cannot be the cause."""
    if not _is_backward(w) or _may_be_too_high(w):
        return
    dtype, end = "float32", "3.4e38"
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


def of_high_scale(w: Watched) -> Texts:
    if not _is_backward(w) or not _may_be_too_high(w):
        return
    rate = f", or {words.LEARNING_RATE}" if w.applied else ""
    if _can_fall(w):
        likely = "Most likely the loss scale is still too high."
        if w.applied:
            likely = """\
Most likely the gradients have grown, and the loss scale falls to fit them."""
    elif w.scale._can_change:
        likely = f"""\
Most likely `min_loss_scale` is too high: the loss scale is at that floor, \
{w.last.shown}, and cannot fall further. Lower it: the default is 1."""
    else:
        likely = f"Most likely: {words.SCALE_TOO_HIGH}"
        if w.applied:
            likely = f"At first it was not, so gradients have grown. {likely}"
    yield f"""\
{BACKWARD} {likely} If steps are still skipped when it is low, there is \
{words.INFINITE_DERIVATIVE}{rate}: {FIND} names the layer."""


#: A stall tells the first that is true.
CAUSES: List[Callable[[Watched], Texts]] = [
    *(of_weights, of_loss, of_accumulators, of_input),
    *(of_large_gradients, of_high_scale),
]
