"""Which optimizers a monitor watches, what it reads of each, when and what it says."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from lossscale.arguments import shown
from lossscale.gradients.check import worst_of_all
from lossscale.optimizer import LossScaleOptimizer
from lossscale.optimizer.record import LEFT_OUT, Skips
from lossscale.plotting import scale_text
from lossscale.ranges.magnitudes import WORDS
from lossscale.runtime import kerases
from lossscale.scales.base import can_change, left_out_as, shown_value, unguarded
from lossscale.scales.headroom import FLOAT16_MAX

_BAD_LOSSES = 3  # warn after so many losses in a row that were bad before scaling
_DOUBLINGS = 40  # in float16's range, from 2**-24 to 65504
#: The largest scaled gradient may be this many doublings below 65504. The doublings
#: that remain suffice for all gradients that change a weight.
_FAR_BELOW = 16
_NAMED = 5  # the most variables that a message names

_NONE_FOUND = """\
`model.optimizer` must be a lossscale.LossScaleOptimizer, got {got}{why}. Write

    model.compile(lossscale.LossScaleOptimizer(optimizer), ...)

or, for optimizers that are not attributes of the model,

    LossScaleMonitor(optimizers={{"name": optimizer}})
"""
_WRAPPED_BY_KERAS = """\
, Keras's own: under mixed_float16 `compile` wraps any optimizer without a wrapper"""
_ASK = """ lossscale.find_nonfinite(model, x, y) names the layer."""
_GRADIENTS = """\
Gradients that were not finite, the model's last ones first: {names}."""
_BACKWARD = """\
No inf or NaN was seen in the loss itself, so this begins in the backward pass, \
between the loss and the variable named first. Look there for an infinite derivative, \
as a square root has at zero, or give that layer dtype="float32"."""
_ACCUMULATORS = """\
Variables of the model with the shape of such a gradient hold inf or NaN, too: \
{names}. If your program adds gradients up in them, clear them with \
assign(tf.zeros_like(total)). Multiplied by 0, an infinity becomes NaN and stays, and \
no step is applied again."""
_FLOOR = """\
The loss scale is at its floor, {floor}, and cannot fall further. If the gradients are \
too large for float16 at that scale, lower `min_loss_scale` or the learning rate."""
_FLOOR_OF_ONE = """\
The loss scale is at its floor, {floor}: the gradients overflow without being scaled. \
Give the layers named dtype="float32", or lower the learning rate. Lower \
`min_loss_scale` only if you expect gradients that large."""
_FIXED = """\
The loss scale is fixed. Use a smaller one, or a DynamicLossScale, which falls by \
itself."""
_SPIKE = """\
A step was skipped as a spike, {last}. It changed neither a weight nor the loss scale. \
Look at that batch for wrong labels, damaged inputs, or a loss that is not averaged. \
If such steps belong to the run, raise `threshold` of the SpikeGuard. Later ones are \
counted as `spikes`."""
_WEIGHTS = """\
Weights that hold inf or NaN: {names}. No step repairs them. Go back to a checkpoint."""
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
    def steps(self) -> int:
        """How many steps the optimizer has applied or skipped."""
        return self.applied + self.skips.total

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
    largest = loss_scale.last_largest
    # With numpy(), since a mirrored variable has no int().
    skipped = int(loss_scale.skipped_steps.numpy())
    in_a_row = int(loss_scale.consecutive_skipped_steps.numpy())
    applied = int(optimizer.applied_steps.numpy())
    return Reading(
        shown_value(loss_scale),
        skipped,
        applied,
        optimizer.engine.record.skips(applied, in_a_row),
        None if largest is None else float(largest.numpy()),
        int(loss_scale.spikes.numpy()) if loss_scale.skips_spikes else None,
    )


class Watched:
    """One optimizer that a monitor watches: its readings, and when to warn.

    Attributes:
      optimizer: A `LossScaleOptimizer`.
      name: The prefix of its messages and logs; empty if it is the only one.
      shares: Whether another watched optimizer shares its loss scale.
      start: The reading from when training began.
      last: The last reading.
      skipped_in_epoch: Whether the last epoch that ended skipped a step.
    """

    start: Reading
    last: Reading

    def __init__(self, optimizer: Any, name: str, patience: int) -> None:
        self.optimizer, self.name = optimizer, name
        self.shares = self.skipped_in_epoch = False
        self._patience = patience
        self._stuck = 0.0
        self._epochs, self._least = 0, math.inf
        self._told_of_underflow = self._told_of_spike = False
        self._told_of_losses = False  # in this epoch
        self._room = math.nan  # the last known headroom
        self._largest = math.nan  # the largest gradient of the last good step read

    def begin(self, reading: Reading) -> None:
        """Begins, or begins again. Then it reports a stall that goes on once more."""
        self.start = self.last = self._judged = self._epoch_began = reading
        self._lowest = self._highest = reading.loss_scale
        self._told: Optional[int] = None
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

    def stall(self, model: Any) -> Optional[str]:
        """Returns the message about a stall, None if there is none now.

        The first line says what happened, each other is a finding.
        """
        if not self.is_stall():
            return None
        optimizer, own, now = self.optimizer, self.last.skips, self.last.loss_scale
        loss_scale, loss = unguarded(optimizer.loss_scale), optimizer.nonfinite_loss()
        faults = [(f.variable, f.kind) for f in optimizer.nonfinite_gradients()]
        findings: List[Optional[str]] = []
        if loss:
            steps = f", at each of the last {own.bad_losses} steps"
            findings.append(
                f"The loss itself{_name_of_loss(model)} is {WORDS[loss]}, before it is "
                f"scaled{steps if own.bad_losses > 1 else ''}: no loss scale can help. "
                "Look for inf and NaN in the data, for a learning rate that is too "
                "high, for a logarithm of zero or a division by zero, and for "
                "activations beyond float16's 65504: give layers with such "
                'activations, and the last layer, dtype="float32".' + _ASK
            )
        if faults:
            findings.append(_GRADIENTS.format(names=_listed(faults)))
        floor = getattr(loss_scale, "min_loss_scale", 0.0)
        if faults and not loss:
            searches = can_change(loss_scale) and now > floor
            findings.append(self._search(floor) if searches else _BACKWARD)
        accumulators = _accumulators(model, [variable for variable, _ in faults])
        if accumulators:
            names = ", ".join(f"model.{name}" for name in accumulators)
            findings.append(_ACCUMULATORS.format(names=names))
        findings.append(_nonfinite(_WEIGHTS, model, model.trainable_weights))
        findings.append(of_statistics(model, list(accumulators.values())))
        if not loss and not can_change(loss_scale):
            findings.append(_FIXED)
        elif not loss and now <= floor:
            text = _FLOOR if floor > 1 else _FLOOR_OF_ONE
            findings.append(text.format(floor=scale_text(floor)))
        first = (
            f"{own.in_a_row} steps in a row were skipped{self._unit}. "
            f"The loss scale is {scale_text(now)}."
        )
        return self._named("\n  * ".join([first, *filter(None, findings)]))

    def _search(self, floor: float) -> str:
        """Returns what is known of a loss scale that can still fall."""
        now, rule = self.last.loss_scale, self.optimizer.loss_scale
        low, high = scale_text(self._lowest), scale_text(self._highest)
        done, left = _backoffs(rule, self._highest, now), _backoffs(rule, now, floor)
        if done and done + left < math.inf:
            search = (
                f"It is at step {done} of its search: lowered from {high} to "
                f"{scale_text(now)}, it comes to its floor, {scale_text(floor)}, at "
                f"step {done + left}."
            )
        else:
            search = f"Since training began, it was read between {low} and {high}."
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
        else:
            largest = "The largest gradient is not known, since no good step was read."
        return (
            "No inf or NaN was seen in the loss itself, so this begins in the backward "
            f"pass, and the loss scale may just be too high. {search} {largest} If "
            "steps are still skipped when it is low, look between the loss and the "
            "variable named first for an infinite derivative, as a square root has at "
            "zero."
        )

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

    def bad_batches(
        self, epoch: Optional[int], batches: Optional[int]
    ) -> Optional[str]:
        """Returns the message about bad losses and left out steps, once in each epoch.

        `epoch` is the epoch's number as `fit` shows it, and `batches` how many batches
        it has had. None: unknown.
        """
        before, now, scale = self._epoch_began, self.last, self.optimizer.loss_scale
        steps, skipped = now.steps - before.steps, now.skips.total - before.skips.total
        last = now.skips.last[-skipped:] if skipped else ()
        new = [(number - before.steps, why) for number, why in last]
        count = now.skips.losses - before.skips.losses
        bad = [(n, WORDS[why]) for n, why in new if why in WORDS]
        reason = "" if scale.skips_spikes else left_out_as(scale)
        left_out = [n for n, why in new if why == LEFT_OUT and reason]
        if self._told_of_losses or not (count or left_out):
            return None
        self._told_of_losses = True
        when = "" if epoch is None else f"Epoch {epoch}: "
        texts = []
        if count:
            kinds = " or ".join(sorted({kind for _, kind in bad})) or "not finite"
            where = _where([number for number, _ in bad], steps, batches, count)
            texts.append(
                f"{when}{count} of {steps:,} steps {'was' if count == 1 else 'were'} "
                f"skipped because the loss was {kinds} before it was scaled{where}: "
                "look at these rows."
            )
            if can_change(scale) and not self.optimizer.engine.skips_losses:
                texts.append(
                    "The loss scale was told of each as of an overflow, though no loss "
                    f"scale is at fault: it was {scale_text(before.loss_scale)} when "
                    f"the epoch began, and is {scale_text(now.loss_scale)}. "
                    'LossScaleOptimizer(..., nonfinite_loss="skip") leaves it as it is '
                    "at such steps."
                )
        if left_out:
            where = _where(left_out, steps, batches, len(left_out))
            texts.append(f"{when}Steps were skipped as {reason}{where}.")
        return self._named(" ".join(texts))

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
        if left_out and self.last.spikes is None:
            line += f" Steps left out as {left_out_as(self.optimizer.loss_scale)}: "
            line += f"{left_out}."
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


def _where(numbers: List[int], steps: int, batches: Optional[int], count: int) -> str:
    """Returns at which batches of an epoch its steps of these numbers were.

    They are the last ones of `count`. Empty if none is known.
    """
    one, several = "batch", "batches"
    if batches and steps % batches == 0:  # several steps in each
        numbers = [number * batches // steps for number in numbers]
    elif batches and batches % steps:  # Keras 2 goes on within an epoch, from a backup
        numbers = [number + batches - steps for number in numbers]
    elif batches:  # one step of several batches
        one, several = "step", "steps"
    listed = list(dict.fromkeys(numbers))
    if not listed:
        return ""
    last, unit = "" if count == 1 else "last ", one if len(listed) == 1 else several
    return f", {last}at {unit} {', '.join(map(str, listed))}, counted from 0"


def _name_of_loss(model: Any) -> str:
    """Returns the names of a model's losses in parentheses, empty without names."""
    names = []
    # A nest of names, functions and objects.
    for each in tf.nest.flatten(getattr(model, "loss", None)):
        named = getattr(each, "__name__", None) or getattr(each, "name", each)
        names += [named] if isinstance(named, str) else []
    return f" ({', '.join(names)})" if names else ""


def of_statistics(model: Any, but: Sequence[Any] = ()) -> Optional[str]:
    """Returns the finding about untrained variables, None if all are finite."""
    known = {id(each) for each in but}
    variables = [v for v in kerases.statistics_of(model) if id(v) not in known]
    return _nonfinite(_STATISTICS, model, variables)


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
    faults = []
    for variable in variables:
        if tf.as_dtype(variable.dtype).is_floating:
            # Each replica has its own statistics. Perhaps those of one are not finite.
            tensor = kerases.tensor_of(variable)
            copies = model.distribute_strategy.experimental_local_results(tensor)
            # Of a large variable only one number comes from the device to the host.
            worst = sum(float(worst_of_all([copy])[0]) for copy in copies)
            if not math.isfinite(worst):
                faults.append((variable, "nan" if math.isnan(worst) else "inf"))
    return sentence.format(names=_listed(faults)) if faults else None


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
