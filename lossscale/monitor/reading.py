"""What one look at the device gives of an optimizer, in plain Python."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional, Tuple

from lossscale.optimizer.record import BY_UPDATE, GRADIENTS, KEPT, LEFT_OUT, Record
from lossscale.plotting import scale_text
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


def _skips_in(record: Record, applied: int, in_a_row: int) -> Skips:
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


class Reading(NamedTuple):
    """The state of a `LossScaleOptimizer` at one time."""

    loss_scale: float
    skipped: int
    applied: int
    skips: Skips = Skips()
    #: The greatest magnitude of the last step's unscaled gradients, infinite if it was
    #: skipped. None: the loss scale does not keep it.
    largest: Optional[float] = None
    #: How many finite steps a `SpikeGuard` skipped. None: there is no such guard.
    spikes: Optional[int] = None
    #: How many bad losses have counted as overflows with nonfinite_loss="skip", since
    #: there were many.
    counted_losses: int = 0

    @property
    def shown(self) -> str:
        """The loss scale as text."""
        return scale_text(self.loss_scale)

    @property
    def headroom(self) -> Optional[float]:
        """Doublings of the largest scaled gradient below 65504, or None: not known."""
        if self.largest is None or not 0.0 < self.largest < math.inf:
            return None
        return math.log2(FLOAT16_MAX / self.largest) - math.log2(self.loss_scale)


def read(optimizer: Any) -> Reading:
    """Reads an optimizer's counters and its loss scale from the device."""
    loss_scale, guard = optimizer.loss_scale, optimizer.guard
    largest, ignored = loss_scale.last_largest, optimizer.engine.ignored_losses
    # With numpy(), since a mirrored variable has no int().
    in_a_row = int(loss_scale.consecutive_skipped_steps.numpy())
    applied = int(optimizer.applied_steps.numpy())
    return Reading(
        loss_scale=loss_scale._to_show(),
        skipped=int(loss_scale.skipped_steps.numpy()),
        applied=applied,
        skips=_skips_in(optimizer.engine.record, applied, in_a_row),
        largest=None if largest is None else float(largest.numpy()),
        spikes=int(guard.spikes.numpy()) if isinstance(guard, SpikeGuard) else None,
        counted_losses=0 if ignored is None else int(ignored.counted.numpy()),
    )


def backoffs(loss_scale: Any, high: float, low: float) -> float:
    """Returns how often a scale backs off from `high` to `low`, infinite if unknown."""
    multiplier = getattr(loss_scale, "multiplier", None)
    backoff = getattr(loss_scale, "backoff_factor", None) or 1 / (multiplier or 1)
    if low >= high:
        return 0
    if backoff >= 1 or low <= 0:
        return math.inf
    return math.ceil(math.log(high / low) / -math.log(backoff) - 1e-6)
