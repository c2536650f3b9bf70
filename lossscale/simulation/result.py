"""Simulation: what a loss scale did over a run, in arrays and in figures."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional

import numpy as np

from lossscale.simulation import picture


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Simulation:
    """What a loss scale did over a run. The arrays have one entry per step, in order.

    Attributes:
      loss_scale: A `float32` array of shape `[steps]`, the scale of each step.
      is_finite: A `bool` array of shape `[steps]`, whether the gradients were finite.
      applied: A `bool` array of shape `[steps]`, whether the step was applied. Differs
        from `is_finite` if a loss scale checks nothing, as `FixedLossScale`.
      final_loss_scale: A float, the scale after the last step.
      limit: The `limit` that `simulate` used, or None.
    """

    loss_scale: Any
    is_finite: Any
    applied: Any
    final_loss_scale: float
    limit: Optional[Any] = None

    @property
    def steps_lost(self) -> int:
        """The number of skipped steps."""
        return int(np.sum(~self.applied))

    @property
    def spikes(self) -> Any:
        """Which steps were skipped although their gradients were finite.

        A `bool` array of shape `[steps]`: the steps that a `SpikeGuard` skips.
        """
        return self.is_finite & ~self.applied

    @property
    def overflows_applied(self) -> int:
        """The number of steps applied although their gradients were not finite."""
        return int(np.sum(self.applied & ~self.is_finite))

    @property
    def longest_stall(self) -> int:
        """The largest number of steps that were skipped in a row."""
        ends = np.flatnonzero(np.concatenate([[True], self.applied, [True]]))
        return int(np.max(np.diff(ends))) - 1

    @property
    def log2_below_limit(self) -> Optional[float]:
        """How many powers of two the scale was below the limit, on average.

        The average is over applied steps with a finite and positive limit. It is None
        without such steps or without limits. The smaller it is, the less was lost to
        underflow.
        """
        if self.limit is None:
            return None
        used = self.applied & np.isfinite(self.limit) & (self.limit > 0)
        if not used.any():
            return None
        limits = self.limit[used].astype(np.float64)
        below = np.log2(limits) - np.log2(self.loss_scale[used].astype(np.float64))
        return float(np.mean(below))

    @property
    def summary(self) -> Dict[str, Any]:
        """The figures above by name, and the number of steps."""
        return {
            "steps": len(self.loss_scale),
            "steps_lost": self.steps_lost,
            "overflows_applied": self.overflows_applied,
            "longest_stall": self.longest_stall,
            "log2_below_limit": self.log2_below_limit,
        }

    def __repr__(self) -> str:
        listed = ", ".join(
            f"{name}={value:.2f}" if isinstance(value, float) else f"{name}={value}"
            for name, value in self.summary.items()
            if value is not None and (name, value) != ("overflows_applied", 0)
        )
        return f"Simulation({listed})"

    def plot(self, ax: Any = None) -> Any:
        """Draws the scale, the limit if there was one, and the lost steps.

        If many were lost, it draws the share of lost steps instead of each step.

        Args:
          ax: matplotlib `Axes` to draw on. None makes a figure.

        Returns:
          The `Axes`.

        Raises:
          ImportError: matplotlib is not installed.
        """
        scales, limit = self.loss_scale, self.limit
        return picture.draw("Simulation.plot", ax, scales, ~self.applied, limit=limit)
