"""When to warn of skipped steps: the readings of an optimizer, and the rule."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional

from lossscale.optimizer.fault_record import OwnSteps
from lossscale.scales.base import LossScale, unguarded

#: Warn after this many losses in a row that are not finite before they are scaled.
BAD_LOSSES = 3

_NEVER = -1


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
        optimizer._fault_record.own_steps(skipped, in_a_row),
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
