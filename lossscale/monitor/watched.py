"""Which optimizers a monitor watches, what it reads of each, and when it speaks."""

from __future__ import annotations

import math
from typing import Any, Dict, NamedTuple, Optional

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
      applied: The number of applied steps.
      own: The steps that this optimizer itself skipped, and not one that shares its
        loss scale.
      largest: The greatest magnitude of the last step's unscaled gradients, infinite if
        it was skipped. None: the loss scale does not keep it.
      spikes: How many finite steps a `SpikeGuard` skipped. None: there is no guard.
    """

    loss_scale: float
    skipped: int
    applied: int
    own: OwnSteps
    largest: Optional[float] = None
    spikes: Optional[int] = None

    @property
    def headroom(self) -> Optional[float]:
        """How many doublings the largest scaled gradient is below 65504.

        None if unknown: it is not kept, the step was skipped, or all gradients were 0.
        """
        if self.largest is None or not 0.0 < self.largest < math.inf:
            return None
        scaled = math.log2(self.largest) + math.log2(self.loss_scale)
        return math.log2(FLOAT16_MAX) - scaled


def read(optimizer: Any) -> Reading:
    """Reads an optimizer's counters and its loss scale from the device."""
    loss_scale = optimizer.loss_scale
    largest = loss_scale.last_largest
    # With numpy(), since a mirrored variable has no int().
    skipped = int(loss_scale.skipped_steps.numpy())
    in_a_row = int(loss_scale.consecutive_skipped_steps.numpy())
    return Reading(
        loss_scale._to_show(),
        skipped,
        int(optimizer.applied_steps.numpy()),
        optimizer._record.own_steps(skipped, in_a_row),
        None if largest is None else float(largest.numpy()),
        int(loss_scale.spikes.numpy()) if loss_scale.skips_spikes else None,
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

    _last: Reading
    _told: Optional[int]

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._stuck = 0.0

    def start(self, reading: Reading) -> None:
        """Begins, or begins again. Then it reports a stall that goes on once more."""
        self._last, self._told = reading, None

    def see(self, reading: Reading, loss_scale: LossScale) -> bool:
        """Returns whether to report a stall now, given a reading of `loss_scale`."""
        before, self._last = self._last, reading
        own = reading.own
        is_stall = own.in_a_row >= self._patience
        if reading.applied == 0:
            scales = before.loss_scale, reading.loss_scale
            lowered = _steps_that_lowered(unguarded(loss_scale), *scales)
            stuck = max(own.skipped - before.own.skipped - lowered, 0.0)
            self._stuck = stuck if lowered else self._stuck + stuck
            is_stall = is_stall and self._stuck >= self._patience
        if not is_stall and own.bad_losses < BAD_LOSSES:
            return False
        # The number of steps skipped before it identifies each run of skipped steps.
        told, self._told = self._told, own.skipped - own.in_a_row
        return told != self._told


def _steps_that_lowered(loss_scale: Any, high: float, low: float) -> float:
    """Returns how many bad steps lowered the scale from `high` to `low`."""
    if low >= high:
        return 0
    multiplier = getattr(loss_scale, "multiplier", None)
    backoff = getattr(loss_scale, "backoff_factor", None) or 1 / (multiplier or 1)
    if backoff >= 1:  # not DynamicLossScale's rule: perhaps all steps lowered it
        return math.inf
    falls = math.ceil(math.log(high / low) / -math.log(backoff) - 1e-6)
    return falls * int(getattr(loss_scale, "hysteresis", 1))


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
        self._patience = patience
        self._epochs = 0
        self._least = math.inf
        self._skipped: Optional[int] = None
        self._told = False

    def see(self, reading: Reading) -> Optional[str]:
        """Returns the message about underflow, None if there is none now."""
        room = reading.headroom
        skipped, self._skipped = self._skipped, reading.skipped
        if skipped not in (None, reading.skipped) or (room or math.inf) <= FAR_BELOW:
            self._epochs, self._least = 0, math.inf
        elif room is not None:
            self._epochs, self._least = self._epochs + 1, min(self._least, room)
        if self._told or self._epochs < self._patience:
            return None
        self._told = True
        least = math.floor(self._least)
        borne = 2.0 ** (math.floor(math.log2(reading.loss_scale) + self._least) - 1)
        return _UNDERFLOW.format(
            epochs=self._epochs,
            room=least,
            left=max(_DOUBLINGS - least, 0),
            now=scale_text(reading.loss_scale),
            borne=scale_text(borne),
        )


class Watched:
    """One optimizer that a monitor watches, and the readings of it.

    Attributes:
      optimizer: A `LossScaleOptimizer`.
      name: The prefix of its messages and logs; empty if it is the only one.
      shares: Whether another watched optimizer shares its loss scale.
      start: The reading from when training began.
      last: The last reading.
    """

    start: Reading
    last: Reading

    def __init__(self, optimizer: Any, name: str, patience: int) -> None:
        self.optimizer, self.name = optimizer, name
        self.shares = False
        self._stalls = Stalls(patience)
        self._underflow = Underflow(patience)
        self._told_of_spike = False
        self._room = math.nan  # the last known headroom
        self._largest = math.nan  # the largest gradient of the last good step read

    def begin(self) -> None:
        """Reads the starting values, which later readings are compared with."""
        self.start = self.last = read(self.optimizer)
        self._lowest = self._highest = self.start.loss_scale
        self._stalls.start(self.start)

    def read(self) -> None:
        """Reads the device."""
        self.last = now = read(self.optimizer)
        self._room = self._room if now.headroom is None else now.headroom
        if now.largest is not None and math.isfinite(now.largest):
            self._largest = now.largest
        self._lowest = min(self._lowest, now.loss_scale)
        self._highest = max(self._highest, now.loss_scale)

    def stall(self, model: Any, activations: Any = None) -> Optional[str]:
        """Returns the message about a stall, None if there is none now."""
        if not self._stalls.see(self.last, self.optimizer.loss_scale):
            return None
        finding = activations.finding() if activations else None
        own = self.last.own
        return self._named(diagnosis.of_stall(self.optimizer, model, own, finding))

    def underflow(self) -> Optional[str]:
        """Returns the message about underflow after an epoch, None if there is none."""
        return self._named(self._underflow.see(self.last))

    def spike(self) -> Optional[str]:
        """Returns the message about the first spike, None if there is none now."""
        if self._told_of_spike or not self._spikes:
            return None
        self._told_of_spike = True
        return self._named(diagnosis.of_spike(self.optimizer))

    def _named(self, message: Optional[str]) -> Optional[str]:
        return f"{self.name}: {message}" if message and self.name else message

    @property
    def _spikes(self) -> int:
        """How many spikes were skipped since training began."""
        return (self.last.spikes or 0) - (self.start.spikes or 0)

    def add_to(self, logs: Dict[str, Any]) -> None:
        """Adds the last reading to Keras's logs."""
        prefix = f"{self.name}_" if self.name else ""
        logs[f"{prefix}loss_scale"] = self.last.loss_scale
        logs[f"{prefix}skipped_steps"] = self._skipped(self.last)
        if self.last.spikes is not None:
            logs[f"{prefix}spikes"] = self.last.spikes
        if self.last.largest is not None:
            logs[f"{prefix}headroom"] = self._room
            logs[f"{prefix}largest_gradient"] = self._largest

    def summary(self) -> str:
        """Returns a line that says what happened since training began."""
        start, now = self.start, self.last
        skipped = self._skipped(now) - self._skipped(start)
        scales = [now.loss_scale, self._lowest, self._highest]
        final, low, high = map(scale_text, scales)
        line = (
            f"Loss scale{f' of {self.name}' if self.name else ''}: "
            f"{now.applied - start.applied} steps applied, {skipped} skipped"
            f"{diagnosis.unit_of(self.optimizer)}; "
        )
        if self.shares:
            bad = now.skipped - start.skipped
            line += f"shared, with {bad} steps skipped for all; "
        line += f"it is {final}, and was read between {low} and {high}."
        if self._spikes:
            last = diagnosis.last_spike(self.optimizer)
            line += f" Spikes skipped: {self._spikes}, the last {last}."
        if not math.isnan(self._room):
            line += f" Headroom: {self._room:.1f} doublings."
        return line

    def _skipped(self, reading: Reading) -> int:
        """Returns the skipped steps: only its own ones if the loss scale is shared."""
        return reading.own.skipped if self.shares else reading.skipped


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
        found = {f"optimizer_{i}": each for i, each in enumerate(value)}
        found = {"": value[0]} if len(value) == 1 else found
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
    compiled = getattr(model, "optimizer", None)
    pairs = [("optimizer", compiled)]
    for name, thing in vars(model).items():
        if not isinstance(thing, (dict, list, tuple)):
            pairs.append((name, thing))
        elif not name.startswith("_"):  # Keras keeps the objects that it tracks there
            items = thing.items() if isinstance(thing, dict) else enumerate(thing)
            pairs += [(f"{name}_{key}", each) for key, each in items]
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
    by_keras = kerases.is_own_wrapper(compiled) and not others
    got = ", ".join(others) or repr(compiled)
    why = _WRAPPED_BY_KERAS if by_keras else ""
    raise TypeError(_NONE_FOUND.format(got=got, why=why))
