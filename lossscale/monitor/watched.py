"""Which optimizers a monitor watches, what it reads of each, when and what it says."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from lossscale.arguments import shown
from lossscale.optimizer import LossScaleOptimizer
from lossscale.optimizer.record import LEFT_OUT, OwnSteps, Skips
from lossscale.plotting import scale_text
from lossscale.ranges.magnitudes import WORDS, kind_of, magnitude
from lossscale.runtime import kerases
from lossscale.scales.base import can_change, left_out_as, shown_value, unguarded
from lossscale.scales.headroom import FLOAT16_MAX

#: Warn after this many losses in a row that are not finite before they are scaled.
_BAD_LOSSES = 3
#: The doublings in float16's range, from 2**-24 to 65504.
_DOUBLINGS = 40
#: The largest scaled gradient may be this many doublings below 65504. The doublings
#: that remain suffice for all gradients that change a weight.
_FAR_BELOW = 16
#: The most variables that a message names.
_NAMED = 5

_UNDERFLOW = """\
Gradients may underflow: for {epochs} epochs no step was skipped, and the largest \
scaled gradient stayed {room:.0f} doublings or more below 65504, where float16 ends. \
Only {left} of float16's 40 doublings are left below it, and smaller gradients become \
zero. The loss scale is {now}, and could be {borne}. Write

    scale = lossscale.HeadroomLossScale()  # finds it by itself
    optimizer = lossscale.LossScaleOptimizer(inner_optimizer, scale)
"""
_NONE_FOUND = """\
`model.optimizer` must be a lossscale.LossScaleOptimizer, got {got}{why}. Write

    model.compile(lossscale.LossScaleOptimizer(optimizer), ...)

or, for optimizers that are not attributes of the model,

    LossScaleMonitor(optimizers={{"name": optimizer}})
"""
_WRAPPED_BY_KERAS = """\
, Keras's own: under mixed_float16 `compile` wraps any optimizer without a wrapper"""
_LOSS = """\
The loss itself{name} is {kind}, before it is scaled{often}: no loss scale can help. \
Look for inf and NaN in the data, for a learning rate that is too high, for a \
logarithm of zero or a division by zero, and for activations beyond float16's 65504: \
give layers with such activations, and the last layer, dtype="float32"."""
_ASK = """ \
lossscale.find_nonfinite(model, x, y) names the layer, and so does \
LossScaleMonitor(check_activations=True) in `fit`."""
_BAD_BATCHES = """\
{when}{count} of {steps:,} steps {were} skipped because the loss was {kind} before it \
was scaled{where}: look at these rows."""
_LEFT_OUT = "{when}Steps were skipped as {reason}{where}."
_COST = """ \
The loss scale was told of each as of an overflow, though no loss scale is at fault: \
it was {before} when the epoch began, and is {now}. \
LossScaleOptimizer(..., nonfinite_loss="skip") leaves it as it is at such steps."""
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
_SEARCH = """\
No inf or NaN was seen in the loss itself, so this begins in the backward pass, and \
the loss scale may just be too high. {search}. {largest}. If steps are still skipped \
when it is low, look between the loss and the variable named first for an infinite \
derivative, as a square root has at zero."""
_LOWERED = """\
It is at step {done} of its search: lowered from {high} to {now}, it comes to its \
floor, {floor}, at step {end}"""
_MOVED = "Since training began, it was read between {low} and {high}"
_LARGEST = """\
The largest gradient of the last good step that was read was {largest:.3g}: times the \
loss scale {scaled:.3g}, and float16 ends at 65504"""
_NO_LARGEST = """\
The largest gradient is not known: LossScaleMonitor(check_underflow=True) keeps it"""
_NONE_READ = "The largest gradient is not known, since no good step was read"
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
    own: OwnSteps
    #: The greatest magnitude of the last step's unscaled gradients, infinite if it was
    #: skipped. None: the loss scale does not keep it.
    largest: Optional[float] = None
    #: How many finite steps a `SpikeGuard` skipped. None: there is no guard.
    spikes: Optional[int] = None
    #: The steps that the optimizer skipped, and why.
    skips: Skips = Skips()

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
        optimizer.engine.record.own_steps(applied, in_a_row),
        None if largest is None else float(largest.numpy()),
        int(loss_scale.spikes.numpy()) if loss_scale.skips_spikes else None,
        optimizer.engine.record.skips(),
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
        self._judged, own = now, now.own
        is_stall = own.in_a_row >= self._patience
        if now.applied == 0:
            lowered = _steps_that_lowered(self.optimizer.loss_scale, before, now)
            stuck = max(own.skipped - before.own.skipped - lowered, 0.0)
            self._stuck = stuck if lowered else self._stuck + stuck
            is_stall = is_stall and self._stuck >= self._patience
        if not is_stall and own.bad_losses < _BAD_LOSSES:
            return False
        # The number of steps skipped before it identifies each run of skipped steps.
        told, self._told = self._told, own.skipped - own.in_a_row
        return told != self._told

    def stall(self, model: Any, activations: Any) -> Optional[str]:
        """Returns the message about a stall, None if there is none now.

        The first line says what happened, each other is a finding. `activations` is
        None if the layers' outputs are not watched.
        """
        if not self.is_stall():
            return None
        optimizer, own, now = self.optimizer, self.last.own, self.last.loss_scale
        loss_scale, loss = unguarded(optimizer.loss_scale), optimizer.nonfinite_loss()
        faults = [(f.variable, f.kind) for f in optimizer.nonfinite_gradients()]
        findings: List[Optional[str]] = []
        if loss:
            text = _LOSS if activations else _LOSS + _ASK
            steps = f", at each of the last {own.bad_losses} steps"
            often = steps if own.bad_losses > 1 else ""
            name = _name_of_loss(model)
            findings.append(text.format(kind=WORDS[loss], name=name, often=often))
        if activations:
            findings.append(activations.finding())
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
        done, left = _backoffs(rule, self._highest, now), _backoffs(rule, now, floor)
        scales = {"low": self._lowest, "high": self._highest, "floor": floor}
        texts = {name: scale_text(scale) for name, scale in scales.items()}
        search = _MOVED.format(**texts)
        if done and left:
            at = scale_text(now)
            search = _LOWERED.format(done=done, now=at, end=done + left, **texts)
        largest = _NO_LARGEST if self.last.largest is None else _NONE_READ
        if math.isfinite(self._largest):
            scaled = self._largest * now
            largest = _LARGEST.format(largest=self._largest, scaled=scaled)
        return _SEARCH.format(search=search, largest=largest)

    @property
    def until_stall(self) -> int:
        """After how many more steps there may be a stall, if all are skipped."""
        in_a_row = self.last.own.in_a_row
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
            _UNDERFLOW.format(
                epochs=self._epochs,
                room=least,
                left=max(_DOUBLINGS - least, 0),
                now=scale_text(now.loss_scale),
                borne=scale_text(borne),
            )
        )

    def bad_batches(
        self, epoch: Optional[int], batches: Optional[int]
    ) -> Optional[str]:
        """Returns the message about losses that were not finite, once in each epoch.

        And about steps that a loss scale of the user's own has left out. `epoch` and
        `batches` are the epoch's number as `fit` shows it, and how many batches it has
        had, or None.
        """
        before, now = self._epoch_began, self.last
        steps, scale = now.steps - before.steps, self.optimizer.loss_scale
        new = now.skips.total - before.skips.total
        found = [(n - before.steps, why) for n, why in now.skips.last[-new:] if new]
        when = "" if epoch is None else f"Epoch {epoch}: "
        count = now.skips.losses - before.skips.losses
        own = "" if scale.skips_spikes else left_out_as(scale)
        numbers = [n for n, why in found if why == LEFT_OUT and own]
        if self._told_of_losses or not (count or numbers):
            return None
        self._told_of_losses = True
        text = ""
        if count:
            last = [(n, why) for n, why in found if why in WORDS]
            kinds = sorted({WORDS[why] for _, why in last}) or ["not finite"]
            text = _BAD_BATCHES.format(
                when=when,
                count=count,
                steps=steps,
                were="was" if count == 1 else "were",
                kind=" or ".join(kinds),
                where=_where([n for n, _ in last], steps, batches, count),
            )
            if can_change(scale) and not self.optimizer.engine.skips_losses:
                scales = map(scale_text, (before.loss_scale, now.loss_scale))
                text += _COST.format(**dict(zip(("before", "now"), scales)))
        if numbers:
            where = _where(numbers, steps, batches, len(numbers))
            left_out = _LEFT_OUT.format(when=when, reason=own, where=where)
            text = f"{text} {left_out}" if text else left_out
        return self._named(text)

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
        if self._spikes:
            line += f" Spikes skipped: {self._spikes}, the last {self._last_spike}."
        if not math.isnan(self._room):
            line += f" Headroom: {self._room:.1f} doublings."
        return line

    def _skipped(self, reading: Reading) -> int:
        """Returns the skipped steps: only its own ones if the loss scale is shared."""
        return reading.own.skipped if self.shares else reading.skipped


def _steps_that_lowered(loss_scale: Any, before: Reading, now: Reading) -> float:
    """Returns how many bad steps lowered the loss scale between two readings."""
    if now.loss_scale >= before.loss_scale:
        return 0
    falls = _backoffs(loss_scale, before.loss_scale, now.loss_scale)
    if falls is None:  # perhaps all steps lowered it
        return math.inf
    return falls * int(getattr(unguarded(loss_scale), "hysteresis", 1))


def _backoffs(loss_scale: Any, high: float, low: float) -> Optional[int]:
    """Returns how often a loss scale backs off from one value to a lower one.

    None if its rule is not that of `DynamicLossScale`, or the lower value is 0.
    """
    rule = unguarded(loss_scale)
    multiplier = getattr(rule, "multiplier", None)
    backoff = getattr(rule, "backoff_factor", None) or 1 / (multiplier or 1)
    if backoff >= 1 or low <= 0:
        return None
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
            kind = kind_of(max(float(magnitude(copy)) for copy in copies))
            faults += [(variable, kind)] if kind else []
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
