"""What one look at the device gives of an optimizer, in plain Python."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional, Tuple

from lossscale.optimizer.record import BY_UPDATE, GRADIENTS, KEPT, LEFT_OUT
from lossscale.plotting import scale_text
from lossscale.scales.headroom import FLOAT16_MAX
from lossscale.scales.spike_guard import SpikeGuard


class Reading(NamedTuple):
    """The state of a `LossScaleOptimizer` at one time.

    Attributes:
      skipped: The steps that the loss scale has skipped, for all that share it.
      own: Those that the optimizer itself has skipped since this process began.
      nonfinite, losses, left_out: How many of these were not finite, had an unscaled
        loss that was not, and were finite and left out by the guard.
      in_a_row: How many in a row, up to the last step, were not finite.
      bad_losses: The last ones of these for which the unscaled loss was at fault.
      last: Of the last few which of `own` they were, from 0 on, and the reason.
      largest: The greatest magnitude of the last step's unscaled gradients, infinite if
        it was skipped. None: the loss scale does not keep it.
      spikes: How many finite steps a `SpikeGuard` skipped. None: there is none.
      counted_losses: How many bad losses counted as overflows in spite of "skip".
    """

    loss_scale: float
    skipped: int
    applied: int
    own: int = 0
    nonfinite: int = 0
    losses: int = 0
    left_out: int = 0
    in_a_row: int = 0
    bad_losses: int = 0
    last: Tuple[Tuple[int, str], ...] = ()
    largest: Optional[float] = None
    spikes: Optional[int] = None
    counted_losses: int = 0

    @property
    def shown(self) -> str:
        """The loss scale as text."""
        return scale_text(self.loss_scale)

    @property
    def headroom(self) -> Optional[float]:
        """Doublings of the largest scaled gradient below 65504, or None: not known."""
        if self.largest is None or not math.isfinite(self.largest):
            return None
        if self.largest == 0.0:
            return math.inf
        return math.log2(FLOAT16_MAX / self.largest) - math.log2(self.loss_scale)


def read(optimizer: Any) -> Reading:
    """Reads an optimizer's counters and its loss scale from the device."""
    loss_scale, guard = optimizer.loss_scale, optimizer.guard
    largest, ignored = loss_scale.last_largest, optimizer.engine.ignored_losses
    counts, last = optimizer.engine.record.skipped()
    gradients, inf, nan, left_out, _ = counts
    # With numpy(), since a mirrored variable has no int().
    applied = int(optimizer.applied_steps.numpy())
    in_a_row = int(loss_scale.consecutive_skipped_steps.numpy())
    row = losses = 0  # the last steps that were not finite, and those with a bad loss
    for number, reason in reversed(last):
        is_last = number == applied + sum(counts) - 1 - row
        if not is_last or reason in (LEFT_OUT, BY_UPDATE):
            break
        losses += losses == row and reason != GRADIENTS
        row += 1
    return Reading(
        loss_scale=loss_scale._to_show(),
        skipped=int(loss_scale.skipped_steps.numpy()),
        applied=applied,
        own=sum(counts),
        nonfinite=gradients + inf + nan,
        losses=inf + nan,
        left_out=left_out,
        # The record has only the last steps. Of more, the loss scale's count is used.
        in_a_row=in_a_row if row == KEPT else min(row, in_a_row),
        bad_losses=in_a_row if losses == KEPT else min(losses, in_a_row),
        last=tuple(enumerate((why for _, why in last), sum(counts) - len(last))),
        largest=None if largest is None else float(largest.numpy()),
        spikes=int(guard.spikes.numpy()) if isinstance(guard, SpikeGuard) else None,
        counted_losses=0 if ignored is None else int(ignored.counted.numpy()),
    )
