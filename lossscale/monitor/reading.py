"""What a monitor reads of an optimizer, and in which batches it skipped steps."""

from __future__ import annotations

import bisect
import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from lossscale.monitor.skips import Skips, skips_in
from lossscale.runtime import keras_versions
from lossscale.scales.headroom import FLOAT16_MAX
from lossscale.scales.uses import guard_of, shown_value

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
    largest, guard = loss_scale.last_largest, guard_of(loss_scale)
    # With numpy(), since a mirrored variable has no int().
    skipped = int(loss_scale.skipped_steps.numpy())
    in_a_row = int(loss_scale.consecutive_skipped_steps.numpy())
    applied = int(optimizer.applied_steps.numpy())
    ignored_losses = optimizer.engine.division.ignored_losses
    return Reading(
        shown_value(loss_scale),
        skipped,
        applied,
        skips_in(optimizer.engine.record, applied, in_a_row),
        None if largest is None else float(largest.numpy()),
        None if guard is None else int(guard.spikes.numpy()),
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
