"""Which optimizers a monitor watches, what it reads of each, and when it speaks."""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from lossscale.arguments import shown
from lossscale.monitor import diagnosis
from lossscale.optimizer import LossScaleOptimizer
from lossscale.optimizer.record import OwnSteps
from lossscale.plotting import scale_text
from lossscale.runtime import kerases
from lossscale.scales.base import LossScale, unguarded
from lossscale.scales.headroom import FLOAT16_MAX

#: Warn after this many losses in a row that are not finite before they are scaled.
BAD_LOSSES = 3

_NEVER = -1
#: The doublings in float16's range, from 2**-24 to 65504.
_DOUBLINGS = 40
#: The largest scaled gradient may be this many doublings below 65504. The doublings
#: that remain suffice for all gradients that change a weight.
FAR_BELOW = 16

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


class Reading(NamedTuple):
    """The state of a `LossScaleOptimizer` at one time, in plain Python.

    The loss scale counts every batch as a step, even if an optimizer accumulates the
    gradients of several batches before it updates the weights.

    Attributes:
      loss_scale: The loss scale.
      skipped: The number of skipped steps.
      in_a_row: The number of skipped steps since the last good step.
      applied: The number of applied steps.
      largest: The greatest magnitude of the last step's unscaled gradients, infinite if
        it was skipped. None: the loss scale does not keep it.
      own: The steps that this optimizer itself skipped. None: all that were skipped.
      spikes: How many finite steps a `SpikeGuard` skipped. None: there is no guard.
    """

    loss_scale: float
    skipped: int
    in_a_row: int
    applied: int
    largest: Optional[float] = None
    own: Optional[OwnSteps] = None
    spikes: Optional[int] = None

    @property
    def own_skipped(self) -> int:
        """The number of steps that this optimizer skipped."""
        return self.skipped if self.own is None else self.own.skipped

    @property
    def own_in_a_row(self) -> int:
        """Consecutive skips of this optimizer up to the last step."""
        return self.in_a_row if self.own is None else self.own.in_a_row

    @property
    def bad_losses(self) -> int:
        """How many of them had a loss that was not finite before it was scaled."""
        return 0 if self.own is None else self.own.bad_losses


def read(optimizer: Any) -> Reading:
    """Reads an optimizer's counters and its loss scale from the device."""
    loss_scale = optimizer.loss_scale
    largest = loss_scale.last_largest
    # With numpy(), since a mirrored variable has no int().
    skipped = int(loss_scale.skipped_steps.numpy())
    in_a_row = int(loss_scale.consecutive_skipped_steps.numpy())
    spikes = int(loss_scale.spikes.numpy()) if loss_scale.skips_spikes else None
    return Reading(
        loss_scale._to_show(),
        skipped,
        in_a_row,
        int(optimizer.applied_steps.numpy()),
        None if largest is None else float(largest.numpy()),
        optimizer._record.own_steps(skipped, in_a_row),
        spikes,
    )


class Stalls:
    """Reports each stall once. A stall is `patience` skipped steps in a row.

    Until the first step is applied, it counts only steps that did not lower the loss
    scale, since a scale that starts too high must fall until it fits. No scale helps a
    loss that is not finite before it is scaled, so the third such loss is a stall, too.

    ```
    see(reading):
      if applied == 0:
        lowered = how many of the steps since the last reading lowered the scale
        stuck = (stuck if lowered == 0 else 0) + steps - lowered
      is_stall = in_a_row >= patience and (applied > 0 or stuck >= patience)
      is_stall = is_stall or bad_losses >= BAD_LOSSES
      return is_stall and it has not reported this run of skipped steps
    ```
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._last: Optional[Reading] = None
        self._stuck = 0.0
        self._told = _NEVER

    def start(self, reading: Reading) -> None:
        """Begins, or begins again. Then it reports a stall that goes on once more."""
        self._last = reading
        self._told = _NEVER

    def see(self, reading: Reading, loss_scale: LossScale) -> bool:
        """Returns whether to report a stall now, given a reading of `loss_scale`."""
        before, self._last = self._last or reading, reading
        if reading.applied == 0:
            steps = max(reading.own_skipped - before.own_skipped, 0)
            scales = (before.loss_scale, reading.loss_scale)
            lowered = _steps_that_lowered(loss_scale, *scales)
            kept = self._stuck if lowered == 0 else 0.0
            self._stuck = kept + max(steps - lowered, 0.0)
        searches = reading.applied == 0 and self._stuck < self.patience
        is_stall = reading.own_in_a_row >= self.patience and not searches
        if not is_stall and reading.bad_losses < BAD_LOSSES:
            return False
        # The number of steps skipped before it identifies each run of skipped steps.
        told, self._told = self._told, reading.own_skipped - reading.own_in_a_row
        return told != self._told


def _steps_that_lowered(loss_scale: Any, high: float, low: float) -> float:
    """Returns how many bad steps lowered the scale from `high` to `low`."""
    if low >= high:
        return 0
    loss_scale = unguarded(loss_scale)
    multiplier = getattr(loss_scale, "multiplier", None)
    backoff = getattr(loss_scale, "backoff_factor", None) or 1 / (multiplier or 1)
    if backoff >= 1:  # not DynamicLossScale's rule: perhaps all steps lowered it
        return math.inf
    falls = math.ceil(math.log(high / low) / -math.log(backoff) - 1e-6)
    return falls * int(getattr(loss_scale, "hysteresis", 1))


def headroom(reading: Reading) -> Optional[float]:
    """Returns how many doublings the largest scaled gradient is below 65504.

    None if unknown: nobody looked, the step was skipped, or all gradients were zero.
    """
    largest = reading.largest
    if largest is None or not 0.0 < largest < math.inf:
        return None
    return math.log2(FLOAT16_MAX) - math.log2(largest) - math.log2(reading.loss_scale)


class Underflow:
    """Reports once that a loss scale stays far too low.

    ```
    see(reading):              # at the end of each epoch
      if the epoch skipped a step, or headroom <= FAR_BELOW: epochs = 0
      elif headroom is known: epochs += 1
      return epochs == patience, and never again
    ```

    After an overflow the scale is not too low for all gradients: those of activations
    count, too.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._epochs = 0
        self._least = math.inf
        self._skipped: Optional[int] = None
        self._told = False

    def see(self, reading: Reading) -> Optional[str]:
        """Returns the message about underflow, None if there is none now."""
        room = headroom(reading)
        skipped, self._skipped = self._skipped, reading.skipped
        if skipped not in (None, reading.skipped) or (room or math.inf) <= FAR_BELOW:
            self._epochs, self._least = 0, math.inf
        elif room is not None:
            self._epochs, self._least = self._epochs + 1, min(self._least, room)
        if self._told or self._epochs < self.patience:
            return None
        self._told = True
        borne = 2.0 ** (math.floor(math.log2(reading.loss_scale) + self._least) - 1)
        return _UNDERFLOW.format(
            epochs=self._epochs,
            room=math.floor(self._least),
            left=max(_DOUBLINGS - math.floor(self._least), 0),
            now=scale_text(reading.loss_scale),
            borne=scale_text(borne),
        )


class Watched:
    """One optimizer that a monitor watches, and the readings of it.

    Attributes:
      optimizer: A `LossScaleOptimizer`.
      name: The prefix of its messages and logs; empty if it is the only one.
      shares: Whether another watched optimizer shares its loss scale.
      start: The reading from when training began. None: it has not begun.
      last: The last reading.
    """

    def __init__(self, optimizer: Any, name: str, patience: int) -> None:
        self.optimizer, self.name = optimizer, name
        self.shares = False
        self.start: Optional[Reading] = None
        self._stalls = Stalls(patience)
        self._underflow = Underflow(patience)
        self._told_of_spike = False
        self._room: Optional[float] = None  # the last known headroom
        self._largest = math.nan  # the largest gradient of the last good step read

    def begin(self) -> None:
        """Reads the starting values, which later readings are compared with."""
        self.start = self.last = read(self.optimizer)
        self._lowest = self._highest = self.start.loss_scale
        self._stalls.start(self.start)

    def read(self) -> None:
        """Reads the device."""
        self.last = read(self.optimizer)
        found = headroom(self.last)
        self._room = self._room if found is None else found
        if self.last.largest is not None and math.isfinite(self.last.largest):
            self._largest = self.last.largest
        self._lowest = min(self._lowest, self.last.loss_scale)
        self._highest = max(self._highest, self.last.loss_scale)

    def stall(self, model: Any, activations: Any = None) -> Optional[str]:
        """Returns the message about a stall, None if there is none now."""
        if not self._stalls.see(self.last, self.optimizer.loss_scale):
            return None
        steps, bad_losses = self.last.own_in_a_row, self.last.bad_losses
        found = activations.finding() if activations else None
        message = diagnosis.of_stall(self.optimizer, model, steps, bad_losses, found)
        return f"{self.name}: {message}" if self.name else message

    def underflow(self) -> Optional[str]:
        """Returns the message about underflow after an epoch, None if there is none."""
        message = self._underflow.see(self.last)
        return f"{self.name}: {message}" if message and self.name else message

    def spike(self) -> Optional[str]:
        """Returns the message about the first spike, None if there is none now."""
        if self._told_of_spike or not self._spikes():
            return None
        self._told_of_spike = True
        message = diagnosis.of_spike(self.optimizer)
        return f"{self.name}: {message}" if self.name else message

    def _spikes(self) -> int:
        """Returns how many spikes were skipped since training began."""
        return (self.last.spikes or 0) - ((self.start or self.last).spikes or 0)

    def add_to(self, logs: Dict[str, Any]) -> None:
        """Adds the last reading to Keras's logs."""
        prefix = f"{self.name}_" if self.name else ""
        logs[f"{prefix}loss_scale"] = self.last.loss_scale
        logs[f"{prefix}skipped_steps"] = self._skipped(self.last)
        if self.last.spikes is not None:
            logs[f"{prefix}spikes"] = self.last.spikes
        if self.last.largest is not None:
            logs[f"{prefix}headroom"] = math.nan if self._room is None else self._room
            logs[f"{prefix}largest_gradient"] = self._largest

    def summary(self) -> str:
        """Returns a line that says what happened since training began."""
        start, now = self.start or self.last, self.last
        whose = f" of {self.name}" if self.name else ""
        skipped = self._skipped(now) - self._skipped(start)
        line = (
            f"Loss scale{whose}: {now.applied - start.applied} steps applied, "
            f"{skipped} skipped{diagnosis.unit_of(self.optimizer)}; {self._scale()}."
        )
        if self._spikes():
            last = diagnosis.last_spike(self.optimizer)
            line += f" Spikes skipped: {self._spikes()}, the last {last}."
        if self._room is None:
            return line
        return f"{line} Headroom: {self._room:.1f} doublings."

    def _skipped(self, reading: Reading) -> int:
        """Returns the skipped steps: only its own ones if the loss scale is shared."""
        return reading.own_skipped if self.shares else reading.skipped

    def _scale(self) -> str:
        """Returns the summary's words about the loss scale itself."""
        start, now = self.start or self.last, self.last
        scales = [now.loss_scale, self._lowest, self._highest]
        final, low, high = map(scale_text, scales)
        shared = ""
        if self.shares:
            bad = now.skipped - start.skipped
            shared = f"shared, with {bad} steps skipped for all; "
        return f"{shared}it is {final}, and was read between {low} and {high}"


def given_optimizers(name: str, value: Any) -> Dict[str, Any]:
    """Returns an argument's optimizers by name. A single one has an empty name.

    Args:
      name: The argument's name.
      value: One `LossScaleOptimizer`, a list of them, or a dict of them by name.

    Raises:
      TypeError: `value` is none of these.
    """
    found = value
    if isinstance(value, (list, tuple)):
        single = len(value) == 1
        found = {
            "" if single else f"optimizer_{i}": each for i, each in enumerate(value)
        }
    elif not isinstance(value, dict):
        found = {"": value}
    for each, optimizer in found.items():
        if not isinstance(each, str) or not isinstance(optimizer, LossScaleOptimizer):
            raise TypeError(
                f"`{name}` must be a lossscale.LossScaleOptimizer, a list of them, or "
                f"a dict of them by name, got {shown(value)}. Pass the wrapper: "
                "lossscale.LossScaleOptimizer(optimizer)."
            )
    if not found:
        raise TypeError(f"`{name}` must hold an optimizer, got {shown(value)}.")
    return dict(found)


def optimizers_of(model: Any) -> Dict[str, Any]:
    """Returns the optimizers of a model by the names of its attributes.

    They are the compiled one, and those in its attributes, as a GAN has them, also in
    lists and dicts. A single one has an empty name.

    Raises:
      TypeError: None of them is a `LossScaleOptimizer`.
    """
    every = _optimizers_in(model)
    ours = [(n, each) for n, each in every if isinstance(each, LossScaleOptimizer)]
    if not ours:
        raise TypeError(_none_found(model, every))
    found: Dict[str, Any] = {}
    for name, optimizer in ours:
        if not any(optimizer is known for known in found.values()):
            found[name] = optimizer
    return found if len(found) > 1 else {"": ours[0][1]}


def _optimizers_in(model: Any) -> List[Tuple[str, Any]]:
    """Returns pairs of a name and an optimizer that a model has."""
    things = [("optimizer", getattr(model, "optimizer", None)), *vars(model).items()]
    pairs = []
    for name, thing in things:
        if name.startswith("_") and isinstance(thing, (dict, list, tuple)):
            continue  # Keras and TensorFlow keep the objects that they track there
        if isinstance(thing, dict):
            pairs += [(f"{name}_{key}", each) for key, each in thing.items()]
        elif isinstance(thing, (list, tuple)):
            pairs += [(f"{name}_{i}", each) for i, each in enumerate(thing)]
        else:
            pairs.append((name, thing))
    return [
        (n.strip("_"), each) for n, each in pairs if hasattr(each, "apply_gradients")
    ]


def _none_found(model: Any, every: List[Tuple[str, Any]]) -> str:
    compiled = getattr(model, "optimizer", None)
    # A user with other optimizers may not know the one that Keras compiles by default.
    others = [f"model.{n} = {each!r}" for n, each in every if each is not compiled]
    why = _WRAPPED_BY_KERAS if kerases.is_own_wrapper(compiled) else ""
    if others:
        return _NONE_FOUND.format(got=", ".join(others), why="")
    return _NONE_FOUND.format(got=repr(compiled), why=why)
