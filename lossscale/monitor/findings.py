"""All that a monitor says: what, when, how often, and why it is true.

`FINDINGS`, at the end, is the table. A finding is a function. It gets a `Watched`, or a
`Run` if it is of the model, changes neither, and yields a text where that is true. To
add one, write the function, its row, and an entry in docs/warnings.md.
"""

from __future__ import annotations

import itertools
import math
from typing import List

from lossscale.monitor import causes
from lossscale.monitor import model as models
from lossscale.monitor.asking import Finding, Texts
from lossscale.monitor.watched import BAD_LOSSES, Run, Watched
from lossscale.optimizer import LossScaleOptimizer
from lossscale.optimizer.record import GRADIENTS, LEFT_OUT, Spike
from lossscale.plotting import scale_text
from lossscale.ranges.causes import BAD_WEIGHTS
from lossscale.ranges.magnitudes import WORDS
from lossscale.runtime import keras_versions

#: As many doublings as a `HeadroomLossScale` leaves above the largest gradient.
_RESERVE = 4

# As training begins


def sharpness(run: Run) -> Texts:
    if type(run.model).__name__ == "SharpnessAwareMinimization":
        yield """\
SharpnessAwareMinimization of Keras computes its gradients without the loss scale, \
and adds them to the weights before anything checks them: an infinite one makes \
weights infinite. \
https://github.com/lossscale/lossscale/blob/main/docs/recipes.md has a step that \
scales the loss, and restores the weights to the last bit."""


def backup(run: Run) -> Texts:
    if run.monitor.on_stall != "stop":
        return
    for callback in keras_versions.callbacks_beside(run.monitor):
        is_one = any(c.__name__ == "BackupAndRestore" for c in type(callback).__mro__)
        # Without this argument it always deletes the backup, as in Keras 2.4.
        if is_one and getattr(callback, "delete_checkpoint", True):
            yield """\
BackupAndRestore deletes its backup when training ends, even if on_stall="stop" ends \
it. So a run that the monitor stopped cannot be resumed. Write \
LossScaleMonitor(on_stall="raise"), since an error keeps the backup."""


# At each look


def left_out(w: Watched) -> Texts:
    if not w.left_out:
        return
    numbers = [number for number, why in w.skipped_in_epoch if why == LEFT_OUT]
    last = w.optimizer.last_spike()
    if last is None:  # the guard is one of the user's own
        where = w.batches.where(numbers)
        why = w.optimizer.guard.left_out_as
        yield f"{w.run.in_epoch}Steps were skipped as {why}{where}."
    else:
        yield f"""\
A step was skipped as a spike{w.batches.where(numbers[-1:])}, {_size(last)}. It \
changed neither a weight nor the loss scale. Look at that batch for wrong labels, \
damaged inputs, or a loss that is not averaged. If such gradients are normal for this \
run, raise `threshold` of the SpikeGuard."""


def _size(spike: Spike) -> str:
    of_limit = f"{spike.largest / spike.limit:.3g} times the limit of {spike.limit:.3g}"
    return f"with a gradient of {spike.largest:.3g} in {spike.name}, {of_limit}"


def bad_losses(w: Watched) -> Texts:
    before, now, skipped = w.epoch_began, w.last, w.skipped_in_epoch
    count = now.losses - before.losses
    if now.bad_losses >= BAD_LOSSES:  # `stall` is told of these
        count -= now.bad_losses
        skipped = skipped[: -now.bad_losses]
    if count <= 0:
        return
    bad = {number: WORDS[why] for number, why in skipped if why in WORDS}
    kinds = " or ".join(sorted({*bad.values()})) or "not finite"
    where = w.batches.where([*bad])
    if len(bad) > 1:
        where = where.replace(" at", " last at", 1)
    if where:
        where += f". {causes.what_to_look_at(w)}"
    elif w.is_stalled:  # its text says what can still be known
        return
    text = f"""\
{w.run.in_epoch}{"1 step was" if count == 1 else f"{count} steps were"} skipped \
because the loss{models.with_bad_loss(w.run.model, w.run.logs)} was {kinds} before it \
was scaled{where or "."}"""
    # With "skip", too, such steps count if there are ten and more than one in five.
    losses = now.losses - w.first.losses
    would_help = losses < 10 or 4 * losses <= w.applied
    # A float16 sum may be infinite until the loss scale is low.
    if "inf" in kinds and w.computes_in_float16 and not w.run.data.bad_rows:
        would_help = False
    has_fallen = w.scale._can_change and now.loss_scale < before.loss_scale
    if has_fallen and would_help and not w.optimizer.engine.skips_losses:
        text += f"""\
 Each of these steps counted as an overflow, though no loss scale is at fault: it was \
{before.shown} when the epoch began, and is {now.shown}. \
LossScaleOptimizer(..., nonfinite_loss="skip") leaves it as it is at such steps."""
    yield text


def bad_input(w: Watched) -> Texts:
    reasons = [why for _, why in w.skipped_in_epoch]
    is_new = w.last.own != w.before.own and reasons[-1:] == [GRADIENTS]
    if is_new and not w.is_stalled:  # `stall` is told with its causes
        for text in causes.of_input(w):
            yield w.run.in_epoch + text


def many_bad_losses(w: Watched) -> Texts:
    before, now = w.epoch_began, w.last
    count = now.counted_losses - before.counted_losses
    if not count:
        return
    yield f"""\
With nonfinite_loss="skip" the loss scale ignores a bad loss. But ten steps in a row, \
or more than one in five, had one, so {count} of them counted as \
{"an overflow" if count == 1 else "overflows"}: the loss scale was {before.shown} when \
the epoch began, and is {now.shown}."""


def statistics(run: Run) -> Texts:
    if not run.has_skipped:
        return
    found = run.nonfinite(models.untrained(run.model, of_frozen=False))
    ignored = {id(v) for w in run.watched for v in w.bad_sums.values()}
    bad = [fault for fault in found if id(fault[0]) not in ignored]
    if bad:
        text = f"""\
Non-trainable variables, such as BatchNormalization's statistics, contain inf or NaN: \
{models.listed(bad)}. Skipping a step does not undo what its forward pass did to \
them, and later steps cannot repair them: predictions are lost. Go back to a \
checkpoint, or reset them, and keep the data and that layer's inputs finite. """
        if run.statistics is None:
            text += """\
LossScaleMonitor(restore_statistics=True) puts them back after each such step."""
        else:
            text += """\
There is no good copy to put back. If the first batch built this model, call it on a \
batch before `fit`: model(x)."""
        yield text


def stall(w: Watched) -> Texts:
    """With a list: what was seen, and the first cause that is true."""
    if not w.is_stalled:
        return
    now, loss = w.last, w.bad_loss
    where = w.batches.where([now.own - 1]).replace("at", "the last at", 1)
    lines = [
        f"{now.in_a_row} steps in a row were skipped{w.unit}{where}. "
        f"The loss scale is {now.shown}."
    ]
    if loss:
        name = models.with_bad_loss(w.run.model, w.run.logs)
        times = f", at each of the last {now.bad_losses} steps"
        lines.append(
            f"The loss itself{name} is {WORDS[loss]}, before it is scaled"
            f"{times if now.bad_losses > 1 else ''}: the loss scale did not make it so."
        )
    if w.faults:
        names = models.listed(w.faults)
        lines.append(
            f"Gradients that were not finite, the model's last ones first: {names}."
        )
    of_causes = (text for cause in causes.CAUSES for text in cause(w))
    yield "\n  * ".join([*lines, *itertools.islice(of_causes, 1)])


# As an epoch ends


def many_left_out(w: Watched) -> Texts:
    count = w.last.left_out - w.epoch_began.left_out
    steps = w.last.applied - w.epoch_began.applied + count
    if count > 1 and steps < 10 * count:
        text = f"""\
{w.run.in_epoch}{count} of {steps} finite steps were skipped as \
{w.optimizer.guard.left_out_as}, more than a tenth. The model does not learn from \
these batches."""
        if w.optimizer.last_spike():
            text += """\
 Most often gradients vary more than the SpikeGuard expects: raise its `threshold` or \
`min_ratio`. If batches are damaged, repair the data."""
        yield text


def unchecked_weights(w: Watched) -> Texts:
    if w.scale.checks_gradients:
        return
    bad = w.bad_weights
    if bad:
        yield f"""\
Weights that hold inf or NaN: {models.listed(bad)}. {BAD_WEIGHTS} This loss scale \
checks no gradient, so a step is applied even if gradients overflow, data hold inf or \
NaN, or a learning rate that is too high has made the loss infinite. \
FixedLossScale(S, skip_nonfinite=True) skips such steps, a DynamicLossScale also \
falls, and then the monitor says which of these it is."""


def underflow(w: Watched) -> Texts:
    has_room = w.roomy_epochs >= w.patience and w.room < math.inf
    if not has_room or not w.computes_in_float16:
        return
    room = math.floor(w.room)
    possible = math.floor(math.log2(w.last.loss_scale) + w.room) - _RESERVE
    yield f"""\
Gradients may underflow: for {w.roomy_epochs} epochs no step was skipped, and the \
largest scaled gradient that was read was {room} doublings below 65504, where float16 \
ends. Only {max(40 - room, 0)} of float16's 40 doublings are left below it, and \
smaller gradients become zero. The loss scale is {w.last.shown}, and could be \
{scale_text(2.0 ** min(possible, 127))}. Write

    scale = lossscale.HeadroomLossScale()  # finds it by itself
    optimizer = lossscale.LossScaleOptimizer(inner_optimizer, scale)
"""


def all_zero(w: Watched) -> Texts:
    is_zero = w.roomy_epochs >= w.patience and w.room == math.inf
    is_low = w.last.loss_scale < 2.0**40 and w.computes_in_float16
    if not (is_zero and is_low and w.run.model.trainable_weights):
        return
    text = f"""\
All gradients that were read were zero, for {w.roomy_epochs} epochs in which no step \
was skipped. Either the loss does not depend on the weights, or gradients underflow at \
a loss scale of {w.last.shown}: HeadroomLossScale(2.0**40) begins high, and finds it \
by itself."""
    if w.is_all_float16:
        text += """\
 Give the last layer dtype="float32", too: in float16 the loss itself may be zero."""
    yield text


def replaced(run: Run) -> Texts:
    compiled = getattr(run.model, "optimizer", None)
    is_ours = isinstance(compiled, LossScaleOptimizer)
    is_idle = not any(w.applied or w.skipped_in_epoch for w in run.watched)
    if is_idle and keras_versions.is_own_wrapper(compiled) and not is_ours:
        yield """\
In this epoch no watched optimizer made a step, and `model.optimizer` is Keras's own \
LossScaleOptimizer, which `compile` puts around an optimizer without a wrapper. Write \
model.compile(lossscale.LossScaleOptimizer(Adam(), old_optimizer.loss_scale), ...)."""


#: What a monitor may say, in the order in which it asks. `asking` explains a row.
FINDINGS: List[Finding] = [
    Finding("begin", "model", "training", sharpness),
    Finding("begin", "model", "training", backup),
    Finding("look", "optimizer", "process", left_out),
    Finding("look", "optimizer", "epoch", bad_losses),
    Finding("look", "optimizer", "epoch", bad_input),
    Finding("look", "optimizer", "epoch", many_bad_losses),
    Finding("look", "model", "training", statistics),
    Finding("look", "optimizer", "skips in a row", stall, stops=True),
    Finding("epoch end", "optimizer", "epoch", many_left_out),
    Finding("epoch end", "optimizer", "training", unchecked_weights),
    Finding("epoch end", "optimizer", "process", underflow),
    Finding("epoch end", "optimizer", "process", all_zero),
    Finding("epoch end", "model", "training", replaced),
]


# As training ends: printed


def summary(run: Run) -> Texts:
    for w in run.watched:
        first, now = w.first, w.last
        line = f"Loss scale{f' of {w.name}' if w.name else ''}: {w.applied} steps "
        line += f"applied, {w.skipped(now) - w.skipped(first)} skipped in this fit"
        line += f"{w.unit}; "
        if w.shares:
            skipped = now.skipped - first.skipped
            line += f"shared, with {skipped} steps skipped for all; "
        low, high = scale_text(w.lowest), scale_text(w.highest)
        line += f"it is {now.shown}, and was read between {low} and {high}."
        if now.losses > first.losses:
            losses = now.losses - first.losses
            line += f" Steps skipped for a loss that was not finite: {losses}."
        if w.left_out:
            line += f" Steps left out as {w.optimizer.guard.left_out_as}: {w.left_out}"
            last = w.optimizer.last_spike()
            line += f", the last {_size(last)}." if last else "."
        if not math.isnan(w.headroom):
            line += f" Headroom: {w.headroom:.1f} doublings."
        yield line
    times = run.statistics.times() if run.statistics else 0
    if times:
        yield f"Batches after which statistics were put back: {times}."
