"""Which optimizers a monitor watches, what it reads of one, and in which batches."""

from __future__ import annotations

import bisect
import math
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from lossscale.arguments import shown
from lossscale.optimizer import LossScaleOptimizer
from lossscale.optimizer.record import BY_UPDATE, GRADIENTS, KEPT, LEFT_OUT, Record
from lossscale.runtime import keras_versions
from lossscale.scales.headroom import FLOAT16_MAX
from lossscale.scales.spike_guard import SpikeGuard


class Skips(NamedTuple):
    """Which steps an optimizer itself skipped since this process began, and why."""

    total: int = 0
    #: Those of them at which the unscaled loss was not finite.
    losses: int = 0
    #: Those of them that were finite, and left out by the guard.
    left_out: int = 0
    #: Those of them that were finite, and left out by the loss scale's own `update`.
    by_update: int = 0
    #: How many in a row, up to the last step, were not left out; 0 if it was applied.
    in_a_row: int = 0
    #: The last ones of these for which the unscaled loss was at fault.
    bad_losses: int = 0
    #: Of the last few, oldest first, the number and the reason: see `Record.skipped`.
    last: Tuple[Tuple[int, str], ...] = ()

    @property
    def nonfinite(self) -> int:
        """How many were skipped that were not finite."""
        return self.total - self.left_out - self.by_update


def skips_in(record: Record, applied: int, in_a_row: int) -> Skips:
    """Returns what a record says. `in_a_row` is the loss scale's own count."""
    (gradients, inf, nan, left_out, by_update), last = record.skipped()
    total = gradients + inf + nan + left_out + by_update
    number, run, losses = applied + total, 0, 0
    for step, reason in reversed(last):
        number -= 1
        if step != number or reason in (LEFT_OUT, BY_UPDATE):
            break
        losses += losses == run and reason != GRADIENTS
        run += 1
    # The record has only the last steps. Of more, the loss scale's count is used.
    run, losses = (
        in_a_row if steps == KEPT else min(steps, in_a_row) for steps in (run, losses)
    )
    return Skips(total, inf + nan, left_out, by_update, run, losses, tuple(last))


_MARKS = 4096  # so many batches of an epoch are told apart


class Reading(NamedTuple):
    """The state of a `LossScaleOptimizer` at one time, in plain Python."""

    loss_scale: float
    skipped: int
    applied: int
    skips: Skips = Skips()
    #: The greatest magnitude of the last step's unscaled gradients, infinite if it was
    #: skipped. None: the loss scale does not keep it.
    largest: Optional[float] = None
    #: How many finite steps a `SpikeGuard` skipped. None: there is no guard.
    spikes: Optional[int] = None
    #: How many bad losses have counted as overflows with nonfinite_loss="skip", since
    #: there were many.
    counted_losses: int = 0

    @property
    def headroom(self) -> Optional[float]:
        """Doublings of the largest scaled gradient below 65504, or None: not known."""
        if self.largest is None or not 0.0 < self.largest < math.inf:
            return None
        return math.log2(FLOAT16_MAX / self.largest) - math.log2(self.loss_scale)


def read(optimizer: Any) -> Reading:
    """Reads an optimizer's counters and its loss scale from the device."""
    loss_scale = optimizer.loss_scale
    largest, guard = loss_scale.last_largest, optimizer.guard
    # With numpy(), since a mirrored variable has no int().
    skipped = int(loss_scale.skipped_steps.numpy())
    in_a_row = int(loss_scale.consecutive_skipped_steps.numpy())
    applied = int(optimizer.applied_steps.numpy())
    ignored_losses = optimizer.engine.ignored_losses
    return Reading(
        loss_scale._to_show(),
        skipped,
        applied,
        skips_in(optimizer.engine.record, applied, in_a_row),
        None if largest is None else float(largest.numpy()),
        int(guard.spikes.numpy()) if isinstance(guard, SpikeGuard) else None,
        0 if ignored_losses is None else int(ignored_losses.counted.numpy()),
    )


class Readings:
    """What was read of an optimizer since training began. NaN: not known."""

    def __init__(self, reading: Reading, before: Optional[Readings] = None) -> None:
        self.first = self.last = reading
        self.lowest = self.highest = reading.loss_scale
        # An earlier training of the same optimizer has still seen its gradients.
        self.largest: float = before.largest if before else math.nan
        self.headroom: float = before.headroom if before else math.nan

    def add(self, reading: Reading) -> None:
        self.last = reading
        if reading.headroom is not None:
            self.headroom = reading.headroom
        if reading.largest is not None and math.isfinite(reading.largest):
            self.largest = reading.largest
        self.lowest = min(self.lowest, reading.loss_scale)
        self.highest = max(self.highest, reading.loss_scale)


class Batches:
    """In which batches of an epoch an optimizer skipped steps.

    A step writes down which of the skipped ones it is, and the callback knows the
    batch. The count of skipped steps before each batch joins the two: it stays on the
    device, unread, unless there is something to say.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._begun, self._every = optimizer, 0, 1
        self._first: List[int] = []
        self._counts: List[Any] = []
        self._next = 0
        #: Of the last three calls, if each runs several batches: the first batch, and
        #: the optimizer's steps before it.
        self._calls: List[Tuple[int, List[Any]]] = []

    def begin(self, batch: int, size: int) -> None:
        """Notes a batch that begins, the first of `size` in one call."""
        self._next = batch + size
        if size > 1:
            self._calls = [*self._calls[-2:], (batch, self._taken())]
        if self._begun % self._every == 0:
            self._first.append(batch)
            self._counts.append(self._optimizer.engine.record.counts())
        self._begun += 1
        if len(self._first) > _MARKS:  # tell half as many apart
            del self._first[1::2], self._counts[1::2]
            self._every *= 2

    def _taken(self) -> List[Any]:
        applied = tf.identity(keras_versions.tensor_of(self._optimizer.applied_steps))
        return [applied, self._optimizer.engine.record.counts()]

    def _end(self) -> int:
        """Returns the number after that of the last batch that has taken a step.

        The last call of an epoch may run fewer batches than the others, or none, and no
        Keras says how many. So its steps are compared with those of the call before, or
        with one for each batch. Where these do not agree, it counts as a full call.
        """
        taken = [
            int(sum(np.sum(n.numpy()) for n in counts)) for _, counts in self._calls
        ]
        if self._calls:
            taken.append(int(sum(np.sum(n.numpy()) for n in self._taken())))
        firsts = [*[first for first, _ in self._calls], self._next]
        for at in reversed(range(len(self._calls))):
            steps = taken[at + 1] - taken[at]
            if steps == 0:
                continue
            full = 1.0
            if at > 0:
                full = (taken[at] - taken[at - 1]) / (firsts[at] - firsts[at - 1])
            is_known = steps > 0 and full >= 1 and full == int(full)
            batches = math.ceil(steps / full) if is_known else firsts[at + 1]
            return min(firsts[at + 1], firsts[at] + batches)
        return self._next

    def where(self, numbers: Sequence[int]) -> str:
        """Returns where some of the skipped steps were, empty if it is unknown."""
        before, end = [sum(counts.numpy()) for counts in self._counts], self._end()
        places = []
        for number in numbers:
            at = bisect.bisect_right(before, number) - 1
            if at >= 0:
                first = self._first[at]
                last = max(first, min([*self._first[1:], end][at], end) - 1)
                places.append(f"{first} to {last}" if last > first else f"{first}")
        listed = ", ".join(dict.fromkeys(places))
        unit = "batch" if listed.isdigit() else "batches"
        return f", at {unit} {listed}, counted from 0" if listed else ""


_NONE_FOUND = """\
`model.optimizer` must be a lossscale.LossScaleOptimizer, got {got}{why}. Write

    model.compile(lossscale.LossScaleOptimizer(optimizer), ...)

or, for optimizers that are not attributes of the model,

    LossScaleMonitor(optimizers={{"name": optimizer}})
"""
_WRAPPED_BY_KERAS = """\
, Keras's own: under mixed_float16 `compile` wraps any optimizer without a wrapper"""


def given_optimizers(name: str, value: Any) -> Dict[str, Any]:
    """Returns the optimizers of the argument `name`. A single one has an empty name."""
    listed = value if isinstance(value, (list, tuple)) else [value]
    if isinstance(value, dict):
        optimizers = dict(value)
    elif len(listed) == 1:
        optimizers = {"": listed[0]}
    else:
        optimizers = {f"optimizer_{i}": optimizer for i, optimizer in enumerate(listed)}
    are_named = all(isinstance(key, str) for key in optimizers)
    are_ours = all(
        isinstance(optimizer, LossScaleOptimizer) for optimizer in optimizers.values()
    )
    if not (optimizers and are_named and are_ours):
        raise TypeError(
            f"`{name}` must be a lossscale.LossScaleOptimizer, a list of them, or a "
            f"dict of them by name, got {shown(value)}. Pass the wrapper: "
            "lossscale.LossScaleOptimizer(optimizer)."
        )
    return optimizers


def optimizers_of(model: Any) -> Dict[str, Any]:
    """Returns the optimizers of a model by the names of its attributes, or raises.

    They are the compiled one, and those in its attributes, as a GAN has them. A single
    one has an empty name.
    """
    compiled = getattr(model, "optimizer", None)
    pairs = [("optimizer", compiled), *attributes_of(model)]
    optimizers: Dict[str, Any] = {}
    for name, value in pairs:
        is_new = not any(value is other for other in optimizers.values())
        if isinstance(value, LossScaleOptimizer) and is_new:
            optimizers[name.strip("_")] = value
    if optimizers:
        return (
            optimizers if len(optimizers) > 1 else dict(zip([""], optimizers.values()))
        )
    # A user with other optimizers may not know the one that Keras compiles by default.
    others = [
        f"model.{name.strip('_')} = {shown(value)}"
        for name, value in pairs
        if hasattr(value, "apply_gradients") and value is not compiled
    ]
    got = ", ".join(others) or shown(compiled)
    why = (
        _WRAPPED_BY_KERAS
        if keras_versions.is_own_wrapper(compiled) and not others
        else ""
    )
    raise TypeError(_NONE_FOUND.format(got=got, why=why))


def attributes_of(model: Any) -> Iterator[Tuple[str, Any]]:
    """Yields what is in a model's attributes, also in lists and dicts, with names."""
    for name, thing in vars(model).items():
        if not isinstance(thing, (dict, list, tuple)):
            yield name, thing
        elif not name.startswith("_"):  # Keras keeps the objects that it tracks there
            items = thing.items() if isinstance(thing, dict) else enumerate(thing)
            yield from ((f"{name}_{key}", value) for key, value in items)
