"""Which optimizers a monitor watches, what it reads of each, when and what it says."""

from __future__ import annotations

import bisect
import math
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from lossscale.arguments import shown
from lossscale.gradients.check import worst_of_all
from lossscale.monitor.skips import Skips, skips_in
from lossscale.optimizer import LossScaleOptimizer
from lossscale.optimizer.record import GRADIENTS, LEFT_OUT
from lossscale.plotting import scale_text
from lossscale.ranges.magnitudes import WORDS
from lossscale.runtime import kerases
from lossscale.scales.base import can_change, guard_of, shown_value, unguarded
from lossscale.scales.headroom import FLOAT16_MAX
from lossscale.scales.spike_guard import SpikeGuard

_BAD_LOSSES = 3  # warn after so many losses in a row that were bad before scaling
_DOUBLINGS = 40  # in float16's range, from 2**-24 to 65504
#: The largest scaled gradient may be this many doublings below 65504. The doublings
#: that remain suffice for all gradients that change a weight.
_FAR_BELOW = 16
_MARKS = 4096  # so many batches of an epoch are told apart
_NAMED = 5  # the most variables that a message names

_NONE_FOUND = """\
`model.optimizer` must be a lossscale.LossScaleOptimizer, got {got}{why}. Write

    model.compile(lossscale.LossScaleOptimizer(optimizer), ...)

or, for optimizers that are not attributes of the model,

    LossScaleMonitor(optimizers={{"name": optimizer}})
"""
_WRAPPED_BY_KERAS = """\
, Keras's own: under mixed_float16 `compile` wraps any optimizer without a wrapper"""
_LOSS = """\
The loss itself{name} is {kind}, before it is scaled{steps}: no loss scale can help."""
_CAUSES = """\
lossscale.find_nonfinite(model, x, y) on that batch names the layer, or says that the \
data are not finite. Likeliest first: inf or NaN in the data; a learning rate that is \
too high; activations beyond float16's 65504, for which their layer, and the last one, \
need dtype="float32"; a logarithm of zero or a division by zero."""
_GRADIENTS = """\
Gradients that were not finite, the model's last ones first: {names}."""
_INPUT = """\
The gradient of {kernel} is NaN, and that of {bias} is finite. So the input of this \
layer held inf or NaN{where}, or numbers whose products overflow in float32, and the \
layer's activation hid it from the loss, as relu does. Look at these rows of the data, \
and at what the layers before it make of them."""
_BACKWARD = """\
No inf or NaN was seen in the loss itself, so this begins in the backward pass. """
_SEARCH = """\
Most likely the loss scale is still too high. {search} {largest}"""
_FIXED = """\
Most likely the loss scale, which is fixed, is too high. Use a smaller one, or a \
DynamicLossScale, which falls by itself."""
_FLOOR = """\
Most likely `min_loss_scale` is too high: the loss scale is at that floor, {floor}, \
and cannot fall further. Lower it: the default is 1."""
_IF_NOT = """ \
If steps are still skipped when it is low, look for an infinite derivative, as a \
square root has at zero: lossscale.find_nonfinite(model, x, y) names the layer."""
_UNSCALED = """\
The loss scale is {now}: the gradients are not finite even without being scaled up. \
Either a derivative is infinite, as that of a square root is at zero, or they are too \
large for float16, as they become where the learning rate is too high. \
lossscale.find_nonfinite(model, x, y) on that batch says which, and what to write."""
_ACCUMULATORS = """\
Variables of the model with the shape of such a gradient hold inf or NaN, too: \
{names}. If your program adds gradients up in them, clear them with \
assign(tf.zeros_like(total)). Multiplied by 0, an infinity becomes NaN and stays, and \
no step is applied again, at any loss scale."""
_SPIKE = """\
A step was skipped as a spike, {last}. It changed neither a weight nor the loss scale. \
Look at that batch for wrong labels, damaged inputs, or a loss that is not averaged. \
If such steps belong to the run, raise `threshold` of the SpikeGuard. Later ones are \
counted as `spikes`."""
_WEIGHTS = """\
Weights that hold inf or NaN: {names}. No step repairs them. Go back to a checkpoint."""
_UNCHECKED = (
    _WEIGHTS
    + """ \
This loss scale checks no gradient, so a step that overflows is applied, too: \
FixedLossScale(S, skip_nonfinite=True) skips it, and a DynamicLossScale also falls."""
)
_STATISTICS = """\
Variables that are not trained, as BatchNormalization's statistics, hold inf or NaN: \
{names}. Skipping a step does not undo what its forward pass did to them, and later \
steps cannot repair them: predictions are lost. Go back to a checkpoint, or reset \
them, and keep the data and that layer's inputs finite. \
LossScaleMonitor(restore_statistics=True) puts them back after each such step."""


class Reading(NamedTuple):
    """The state of a `LossScaleOptimizer` at one time, in plain Python."""

    loss_scale: float
    skipped: int
    applied: int
    #: The steps that the optimizer skipped itself, and why.
    skips: Skips = Skips()
    #: The greatest magnitude of the last step's unscaled gradients, infinite if it was
    #: skipped. None: the loss scale does not keep it.
    largest: Optional[float] = None
    #: How many finite steps a `SpikeGuard` skipped. None: there is no guard.
    spikes: Optional[int] = None

    @property
    def headroom(self) -> Optional[float]:
        """How many doublings the largest scaled gradient is below 65504.

        None if unknown: it is not kept, the step was skipped, or all gradients were 0.
        """
        if self.largest is None or not 0.0 < self.largest < math.inf:
            return None
        return math.log2(FLOAT16_MAX / self.largest) - math.log2(self.loss_scale)


def read(optimizer: Any) -> Reading:
    """Reads an optimizer's counters and its loss scale from the device."""
    loss_scale = optimizer.loss_scale
    largest, guard = loss_scale.last_largest, guard_of(loss_scale)
    # With numpy(), since a mirrored variable has no int().
    skipped = int(loss_scale.skipped_steps.numpy())
    in_a_row = int(loss_scale.consecutive_skipped_steps.numpy())
    applied = int(optimizer.applied_steps.numpy())
    return Reading(
        shown_value(loss_scale),
        skipped,
        applied,
        skips_in(optimizer.engine.record, applied, in_a_row),
        None if largest is None else float(largest.numpy()),
        None if guard is None else int(guard.spikes.numpy()),
    )


class Batches:
    """In which batches of an epoch an optimizer skipped steps.

    A step writes down which of the skipped ones it is, and the callback knows the
    batch. The count of skipped steps before each batch joins the two: it stays on the
    device, unread, unless there is something to say.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._calls, self._every = optimizer, 0, 1
        self._first: List[int] = []
        self._counts: List[Any] = []
        self._next = 0

    def begin(self, batch: int, size: int) -> None:
        """Notes a batch that begins, the first of `size` in one call."""
        self._next = batch + size
        if self._calls % self._every == 0:
            self._first.append(batch)
            self._counts.append(self._optimizer.engine.record.counts())
        self._calls += 1
        if len(self._first) > _MARKS:  # tell half as many apart
            del self._first[1::2], self._counts[1::2]
            self._every *= 2

    def where(self, numbers: Sequence[int]) -> str:
        """Returns where some of the skipped steps were, empty if it is unknown."""
        before = [sum(each.numpy()) for each in self._counts]
        places = []
        for number in numbers:
            at = bisect.bisect_right(before, number) - 1
            if at >= 0:
                first, last = self._first[at], [*self._first[1:], self._next][at] - 1
                places.append(f"{first} to {last}" if last > first else f"{first}")
        listed = ", ".join(dict.fromkeys(places))
        unit = "batch" if listed.isdigit() else "batches"
        return f", at {unit} {listed}, counted from 0" if listed else ""


class Watched:
    """One optimizer that a monitor watches: its readings, and when to warn.

    Attributes:
      optimizer: A `LossScaleOptimizer`.
      name: The prefix of its messages and logs; empty if it is the only one.
      shares: Whether another watched optimizer shares its loss scale.
      start: The reading from when training began.
      last: The last reading.
      batches: The batches of this epoch.
      skipped_in_epoch: Whether the last epoch that ended skipped a step.
    """

    start: Reading
    last: Reading
    batches: Batches

    name = ""

    def __init__(self, optimizer: Any, patience: int) -> None:
        self.optimizer = optimizer
        self.shares = self.skipped_in_epoch = False
        self._patience = patience
        self._stuck = 0.0
        self._epochs, self._least = 0, math.inf
        self._told_of_underflow = self._told_of_spike = False
        self._told_of_losses = False  # in this epoch
        self._judged_skips = 0
        self._room = math.nan  # the last known headroom
        self._largest = math.nan  # the largest gradient of the last good step read

    def begin(self, reading: Reading) -> None:
        """Begins, or begins again. Then it reports a stall that goes on once more."""
        self.start = self.last = self._judged = self._epoch_began = reading
        self._lowest = self._highest = reading.loss_scale
        self._told: Optional[int] = None
        self._told_of_weights = False
        self.batches = Batches(self.optimizer)
        self._told_of_losses = False

    def see(self, reading: Reading) -> None:
        self.last = reading
        self._room = self._room if reading.headroom is None else reading.headroom
        if reading.largest is not None and math.isfinite(reading.largest):
            self._largest = reading.largest
        self._lowest = min(self._lowest, reading.loss_scale)
        self._highest = max(self._highest, reading.loss_scale)

    def is_stall(self) -> bool:
        """Returns whether to report a stall now, after a new reading.

        A stall is `patience` skipped steps in a row. Until the first step is applied,
        only steps count that did not lower the loss scale, since a scale that starts
        too high must fall until it fits. No scale helps a loss that is not finite
        before it is scaled, so the third such loss is a stall, too.
        """
        before, now = self._judged, self.last
        self._judged, own = now, now.skips
        is_stall = own.in_a_row >= self._patience
        if now.applied == 0:
            scale = self.optimizer.loss_scale
            lowered = _backoffs(scale, before.loss_scale, now.loss_scale)
            lowered *= int(getattr(unguarded(scale), "hysteresis", 1))
            stuck = max(own.nonfinite - before.skips.nonfinite - lowered, 0.0)
            self._stuck = stuck if lowered else self._stuck + stuck
            is_stall = is_stall and self._stuck >= self._patience
        if not is_stall and own.bad_losses < _BAD_LOSSES:
            return False
        # The number of steps skipped before it identifies each run of skipped steps.
        told, self._told = self._told, own.nonfinite - own.in_a_row
        return told != self._told

    def stall(self, model: Any, logs: Any, but: Sequence[Any]) -> Optional[str]:
        """Returns the message about a stall, None if there is none now.

        It says what happened, what was seen, one cause and what to do, and which
        statistics are not finite, `but` those that began so.
        """
        if not self.is_stall():
            return None
        optimizer, own, now = self.optimizer, self.last.skips, self.last.loss_scale
        loss = optimizer.nonfinite_loss()
        faults = [(f.variable, f.kind) for f in optimizer.nonfinite_gradients()]
        where = self.batches.where([own.total - 1]).replace("at", "the last at", 1)
        seen: List[Optional[str]] = []
        if loss:
            steps = f", at each of the last {own.bad_losses} steps"
            steps = steps if own.bad_losses > 1 else ""
            name = _bad_outputs(model, logs) or _name_of_loss(model)
            seen.append(_LOSS.format(name=name, kind=WORDS[loss], steps=steps))
        if faults:
            seen.append(_GRADIENTS.format(names=_listed(faults)))
        accumulators = _accumulators(model, [variable for variable, _ in faults])
        cause = _nonfinite(_WEIGHTS, model, model.trainable_weights)
        if cause is None and loss:
            cause = _CAUSES
        elif cause is None and accumulators:
            names = ", ".join(f"model.{name}" for name in accumulators)
            cause = _ACCUMULATORS.format(names=names)
        elif cause is None and faults:
            cause = self._input(model) or _BACKWARD + self._backward()
        statistics = of_statistics(model, [*but, *accumulators.values()])
        first = (
            f"{own.in_a_row} steps in a row were skipped{self._unit}{where}. "
            f"The loss scale is {scale_text(now)}."
        )
        return self._named(
            "\n  * ".join([first, *filter(None, [*seen, cause, statistics])])
        )

    def _input(self, model: Any) -> Optional[str]:
        """Returns the finding that a layer's input was not finite, if that is known.

        A bias's gradient is the sum of the gradients at the layer's output. If it is
        finite, so are these, and a NaN in the kernel's gradient is of the input.
        """
        kinds = {id(f.variable): f.kind for f in self.optimizer.nonfinite_gradients()}
        for layer in kerases.layers_of(model) if "nan" in kinds.values() else []:
            pair = [getattr(layer, name, None) for name in ("kernel", "bias")]
            if [kinds.get(id(each)) for each in pair] == ["nan", None] and all(
                getattr(each, "trainable", False) for each in pair
            ):
                kernel, bias = map(kerases.variable_name, pair)
                where = self.batches.where([self.last.skips.total - 1])
                return _INPUT.format(kernel=kernel, bias=bias, where=where)
        return None

    def _backward(self) -> str:
        """Returns what to do where only gradients are not finite."""
        now, rule = self.last.loss_scale, self.optimizer.loss_scale
        floor = getattr(unguarded(rule), "min_loss_scale", 0.0)
        if now <= 1.0 and (now <= floor or not can_change(rule)):
            return _UNSCALED.format(now=scale_text(now))
        if not can_change(rule):
            return _FIXED + _IF_NOT
        if now <= floor:
            return _FLOOR.format(floor=scale_text(floor)) + _IF_NOT
        low, high = scale_text(self._lowest), scale_text(self._highest)
        done, left = _backoffs(rule, self._highest, now), _backoffs(rule, now, floor)
        search = f"Since training began, it was read between {low} and {high}."
        if done and done + left < math.inf:
            search = (
                f"It is at step {done} of its search: lowered from {high} to "
                f"{scale_text(now)}, it comes to its floor, {scale_text(floor)}, at "
                f"step {done + left}."
            )
        largest = "The largest gradient is not known, since no good step was read."
        if math.isfinite(self._largest):
            largest = (
                "The largest gradient of the last good step that was read was "
                f"{self._largest:.3g}: times the loss scale {self._largest * now:.3g}, "
                "and float16 ends at 65504."
            )
        elif self.last.largest is None:
            largest = (
                "The largest gradient is not known: "
                "LossScaleMonitor(check_underflow=True) keeps it."
            )
        return _SEARCH.format(search=search, largest=largest) + _IF_NOT

    @property
    def until_stall(self) -> int:
        """After how many more steps there may be a stall, if all are skipped."""
        in_a_row = self.last.skips.in_a_row
        is_long = in_a_row >= self._patience  # during the search
        left = self._patience - (int(self._stuck) if is_long else in_a_row)
        return left if left > 0 else self._patience

    def underflow(self) -> Optional[str]:
        """Returns the message about underflow after an epoch, None if there is none."""
        before, now = self._epoch_began, self.last
        self._epoch_began, self._told_of_losses = now, False
        self.batches = Batches(self.optimizer)
        self.skipped_in_epoch = now.skipped != before.skipped
        is_near = now.headroom is not None and now.headroom <= _FAR_BELOW
        # A scale that overflows is not too low: gradients of activations count, too.
        if self.skipped_in_epoch or is_near:
            self._epochs, self._least = 0, math.inf
        elif now.headroom is not None:
            self._epochs += 1
            self._least = min(self._least, now.headroom)
        if self._told_of_underflow or self._epochs < self._patience:
            return None
        self._told_of_underflow = True
        least = math.floor(self._least)
        borne = 2.0 ** (math.floor(math.log2(now.loss_scale) + self._least) - 1)
        return self._named(
            f"Gradients may underflow: for {self._epochs} epochs no step was skipped, "
            f"and the largest scaled gradient stayed {least} doublings or more below "
            f"65504, where float16 ends. Only {max(_DOUBLINGS - least, 0)} of "
            f"float16's {_DOUBLINGS} doublings are left below it, and smaller "
            "gradients become zero. The loss scale is "
            f"{scale_text(now.loss_scale)}, and could be {scale_text(borne)}. Write\n\n"
            "    scale = lossscale.HeadroomLossScale()  # finds it by itself\n"
            "    optimizer = lossscale.LossScaleOptimizer(inner_optimizer, scale)\n"
        )

    def bad_batches(self, model: Any, epoch: Optional[int], logs: Any) -> Optional[str]:
        """Returns the message about bad losses and left out steps, once in each epoch.

        `epoch` is the epoch's number as `fit` shows it. None: unknown.
        """
        before, now, scale = self._epoch_began, self.last, self.optimizer.loss_scale
        skips, count = now.skips, now.skips.losses - before.skips.losses
        # The skipped steps that are known, by their numbers among all of them, and why.
        first = skips.total - len(skips.last)
        known = [(n, why) for n, (_, why) in enumerate(skips.last, first)]
        known = [pair for pair in known if pair[0] >= before.skips.total]
        bad = [(number, WORDS[why]) for number, why in known if why in WORDS]
        # A guard's own spikes have a message of their own.
        reason = (
            "" if scale.left_out_as == SpikeGuard.left_out_as else scale.left_out_as
        )
        left_out = [n for n, why in known if why == LEFT_OUT and reason]
        is_new, self._judged_skips = skips.total != self._judged_skips, skips.total
        is_overflow = is_new and bool(known) and known[-1][1] == GRADIENTS
        hidden = self._input(model) if is_overflow else None
        if self._told_of_losses or not (count or left_out or hidden):
            return None
        self._told_of_losses = True
        texts = [f"Epoch {epoch}:"] if epoch is not None else []
        if count:
            kinds = " or ".join(sorted({kind for _, kind in bad})) or "not finite"
            where = self.batches.where([number for number, _ in bad])
            # If each loss is bad, it is not the rows: a stall is told.
            rows = ": look at these rows" if skips.bad_losses < _BAD_LOSSES else ""
            where = where if len(bad) == 1 else where.replace(" at", " last at", 1)
            texts.append(
                f"{count} {'step was' if count == 1 else 'steps were'} skipped because "
                f"the loss{_bad_outputs(model, logs)} was {kinds} before it was "
                f"scaled{where}{rows}."
            )
            if can_change(scale) and not self.optimizer.engine.skips_losses:
                texts.append(
                    "The loss scale was told of each as of an overflow, though no loss "
                    f"scale is at fault: it was {scale_text(before.loss_scale)} when "
                    f"the epoch began, and is {scale_text(now.loss_scale)}. "
                    'LossScaleOptimizer(..., nonfinite_loss="skip") leaves it as it is '
                    "at such steps."
                )
        if hidden:
            texts.append(hidden)
        if left_out:
            texts.append(
                f"Steps were skipped as {reason}{self.batches.where(left_out)}."
            )
        return self._named(" ".join(texts))

    def unchecked(self, model: Any) -> Optional[str]:
        """Returns the message about weights that nothing keeps finite, once."""
        if self._told_of_weights or self.optimizer.loss_scale.checks_gradients:
            return None
        found = _nonfinite(_UNCHECKED, model, model.trainable_weights)
        self._told_of_weights = bool(found)
        return found and self._named(found)

    def spike(self) -> Optional[str]:
        if self._told_of_spike or not self._spikes:
            return None
        self._told_of_spike = True
        return self._named(_SPIKE.format(last=self._last_spike))

    def _named(self, message: str) -> str:
        return f"{self.name}: {message}" if self.name else message

    @property
    def _spikes(self) -> int:
        """How many spikes were skipped since training began."""
        return (self.last.spikes or 0) - (self.start.spikes or 0)

    @property
    def _last_spike(self) -> str:
        spike = self.optimizer.last_spike()
        if spike is None:  # it was another optimizer's, or came before a restart
            return "of unknown size"
        return (
            f"with a gradient of {spike.largest:.3g} in {spike.name}, "
            f"{spike.largest / spike.limit:.3g} times the limit of {spike.limit:.3g}"
        )

    @property
    def _unit(self) -> str:
        """Text that says what a step is, empty unless gradients accumulate."""
        steps = getattr(self.optimizer, "gradient_accumulation_steps", None)
        text = f" (each a batch, with gradient_accumulation_steps={steps})"
        return text if steps else ""

    def add_to(self, logs: Dict[str, Any]) -> None:
        prefix = f"{self.name}_" if self.name else ""
        logs[f"{prefix}loss_scale"] = self.last.loss_scale
        logs[f"{prefix}skipped_steps"] = self._skipped(self.last)
        logs[f"{prefix}nonfinite_losses"] = self.last.skips.losses
        if self.last.spikes is not None:
            logs[f"{prefix}spikes"] = self.last.spikes
        if self.last.largest is not None:
            logs[f"{prefix}headroom"] = self._room
            logs[f"{prefix}largest_gradient"] = self._largest

    def summary(self) -> str:
        start, now = self.start, self.last
        skipped = self._skipped(now) - self._skipped(start)
        scales = [now.loss_scale, self._lowest, self._highest]
        final, low, high = map(scale_text, scales)
        line = (
            f"Loss scale{f' of {self.name}' if self.name else ''}: "
            f"{now.applied - start.applied} steps applied, {skipped} skipped"
            f"{self._unit}; "
        )
        if self.shares:
            bad = now.skipped - start.skipped
            line += f"shared, with {bad} steps skipped for all; "
        line += f"it is {final}, and was read between {low} and {high}."
        losses = now.skips.losses - start.skips.losses
        if losses:
            line += f" Steps skipped for a loss that was not finite: {losses}."
        left_out = now.skips.left_out - start.skips.left_out
        reason = self.optimizer.loss_scale.left_out_as
        if left_out and reason != SpikeGuard.left_out_as:
            line += f" Steps left out as {reason}: {left_out}."
        if self._spikes:
            line += f" Spikes skipped: {self._spikes}, the last {self._last_spike}."
        if not math.isnan(self._room):
            line += f" Headroom: {self._room:.1f} doublings."
        return line

    def _skipped(self, reading: Reading) -> int:
        """Returns the skipped steps: only its own ones if the loss scale is shared."""
        return reading.skips.nonfinite if self.shares else reading.skipped


def _backoffs(loss_scale: Any, high: float, low: float) -> float:
    """Returns how often a loss scale backs off from one value to another.

    Infinite if its rule is not that of `DynamicLossScale`, or the lower value is 0.
    """
    rule = unguarded(loss_scale)
    multiplier = getattr(rule, "multiplier", None)
    backoff = getattr(rule, "backoff_factor", None) or 1 / (multiplier or 1)
    if low >= high:
        return 0
    if backoff >= 1 or low <= 0:
        return math.inf
    return math.ceil(math.log(high / low) / -math.log(backoff) - 1e-6)


def _bad_outputs(model: Any, logs: Any) -> str:
    """Returns which outputs of several have a loss that is not finite in the logs."""
    named = getattr(model, "loss", None)
    outputs = [*(getattr(model, "output_names", None) or ())]
    outputs += list(named) if isinstance(named, dict) else []
    losses = logs if isinstance(logs, dict) else {}
    found = [n for n in outputs if not np.isfinite(losses.get(f"{n}_loss", 0.0))]
    return f" of output {' and '.join(dict.fromkeys(found))}" if found else ""


def _name_of_loss(model: Any) -> str:
    """Returns the names of a model's losses in parentheses, empty without names."""
    names = []
    # A nest of names, functions and objects.
    for each in tf.nest.flatten(getattr(model, "loss", None)):
        named = getattr(each, "__name__", None) or getattr(each, "name", each)
        names += [named] if isinstance(named, str) else []
    return f" ({', '.join(names)})" if names else ""


def of_statistics(model: Any, but: Sequence[Any]) -> Optional[str]:
    """Returns the finding about untrained variables, None if all are finite."""
    known = {id(each) for each in but}
    variables = [v for v in kerases.statistics_of(model) if id(v) not in known]
    return _nonfinite(_STATISTICS, model, variables)


def infinite_statistics(model: Any) -> List[Any]:
    """Returns the untrained variables that are infinite, as a least value may begin."""
    found = kerases.statistics_of(model) if model.built else []
    return [each for each in found if _kind_of(model, each) == "inf"]


def _accumulators(model: Any, at_fault: Sequence[Any]) -> Dict[str, Any]:
    """Returns variables in which a model may add up the gradients that are at fault.

    They are attributes of the model itself, not finite, and of such a gradient's shape.
    """
    shapes = {tuple(each.shape) for each in at_fault}
    trained = {id(each) for each in model.trainable_weights}
    return {
        name: each
        for name, each in _attributes(model)
        if hasattr(each, "assign")
        and hasattr(each, "shape")
        and id(each) not in trained
        and tuple(each.shape) in shapes
        and _nonfinite(_STATISTICS, model, [each])
    }


def _attributes(model: Any) -> Iterator[Tuple[str, Any]]:
    """Yields what is in a model's attributes, also in lists and dicts, with names."""
    for name, thing in vars(model).items():
        if not isinstance(thing, (dict, list, tuple)):
            yield name, thing
        elif not name.startswith("_"):  # Keras keeps the objects that it tracks there
            items = thing.items() if isinstance(thing, dict) else enumerate(thing)
            yield from ((f"{name}_{key}", each) for key, each in items)


def _nonfinite(sentence: str, model: Any, variables: Sequence[Any]) -> Optional[str]:
    """Returns `sentence` with the names of variables that are not finite."""
    kinds = [(variable, _kind_of(model, variable)) for variable in variables]
    faults = [(variable, kind) for variable, kind in kinds if kind]
    return sentence.format(names=_listed(faults)) if faults else None


def _kind_of(model: Any, variable: Any) -> str:
    """Returns "nan" or "inf" if a variable holds one on any replica, else nothing."""
    local = model.distribute_strategy.experimental_local_results
    copies = local(kerases.tensor_of(variable))
    # Of a large variable only one number comes from the device to the host.
    worst = sum(float(worst_of_all([copy])[0]) for copy in copies)
    return "nan" if math.isnan(worst) else "inf" if math.isinf(worst) else ""


def _listed(faults: Sequence[Tuple[Any, str]]) -> str:
    """Returns the names of variables and what they hold, the last ones first."""
    names = [f"{kerases.variable_name(v)} ({WORDS[kind]})" for v, kind in faults]
    more = len(names) - _NAMED
    return ", ".join(names[::-1][:_NAMED]) + (f" and {more} more" if more > 0 else "")


def given_optimizers(name: str, value: Any) -> Dict[str, Any]:
    """Returns the optimizers of the argument `name`. A single one has an empty name."""
    listed = value if isinstance(value, (list, tuple)) else [value]
    if isinstance(value, dict):
        found = dict(value)
    elif len(listed) == 1:
        found = {"": listed[0]}
    else:
        found = {f"optimizer_{i}": each for i, each in enumerate(listed)}
    are_named = all(isinstance(each, str) for each in found)
    are_ours = all(isinstance(each, LossScaleOptimizer) for each in found.values())
    if not (found and are_named and are_ours):
        raise TypeError(
            f"`{name}` must be a lossscale.LossScaleOptimizer, a list of them, or a "
            f"dict of them by name, got {shown(value)}. Pass the wrapper: "
            "lossscale.LossScaleOptimizer(optimizer)."
        )
    return found


def optimizers_of(model: Any) -> Dict[str, Any]:
    """Returns the optimizers of a model by the names of its attributes.

    They are the compiled one, and those in its attributes, as a GAN has them, also in
    lists and dicts. A single one has an empty name. Raises a TypeError if there is no
    `LossScaleOptimizer`.
    """
    compiled = getattr(model, "optimizer", None)
    pairs = [("optimizer", compiled), *_attributes(model)]
    found: Dict[str, Any] = {}
    for name, each in pairs:
        is_new = not any(each is known for known in found.values())
        if isinstance(each, LossScaleOptimizer) and is_new:
            found[name.strip("_")] = each
    if found:
        return found if len(found) > 1 else dict(zip([""], found.values()))
    # A user with other optimizers may not know the one that Keras compiles by default.
    others = [
        f"model.{name.strip('_')} = {each!r}"
        for name, each in pairs
        if hasattr(each, "apply_gradients") and each is not compiled
    ]
    got = ", ".join(others) or repr(compiled)
    why = _WRAPPED_BY_KERAS if kerases.is_own_wrapper(compiled) and not others else ""
    raise TypeError(_NONE_FOUND.format(got=got, why=why))
