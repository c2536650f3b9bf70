"""Which optimizers a monitor watches, under which names, and its readings of each."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Tuple

from lossscale.arguments import shown
from lossscale.monitor import diagnosis
from lossscale.monitor.stalls import Reading, Stalls, read
from lossscale.monitor.underflow import Underflow, headroom
from lossscale.optimizer import LossScaleOptimizer
from lossscale.plotting import scale_text
from lossscale.runtime import kerases

_NONE_FOUND = """\
`model.optimizer` must be a lossscale.LossScaleOptimizer, got {got}{why}. Write

    model.compile(lossscale.LossScaleOptimizer(optimizer), ...)

or, for optimizers that are not attributes of the model,

    LossScaleMonitor(optimizers={{"name": optimizer}})
"""
_WRAPPED_BY_KERAS = """\
, Keras's own: under mixed_float16 `compile` wraps any optimizer without a wrapper"""


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
