"""Simulation: what a loss scale did over a run, in arrays and in figures."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional

import numpy as np

from lossscale.simulation import picture


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Simulation:
    """What a loss scale did over a run. Steps are in order.

    Attributes:
      loss_scale: A `float32` array of shape `[steps]`, the scale of each step.
      is_finite: A `bool` array of shape `[steps]`, whether its gradients were finite.
      applied: A `bool` array of shape `[steps]`, whether it was applied. It differs
        from `is_finite` where a loss scale does not check, as `FixedLossScale`.
      final_loss_scale: A float, the scale after the last step.
      limit: The array that was given, or None.
    """

    loss_scale: Any
    is_finite: Any
    applied: Any
    final_loss_scale: float
    limit: Optional[Any] = None

    @property
    def steps_lost(self) -> int:
        """How many steps were skipped."""
        return int(np.sum(~self.applied))

    @property
    def spikes(self) -> Any:
        """Which steps were skipped although their gradients were finite.

        A `bool` array of shape `[steps]`: what a `SpikeGuard` would have skipped.
        """
        return self.is_finite & ~self.applied

    @property
    def overflows_applied(self) -> int:
        """How many steps were applied although their gradients were not finite."""
        return int(np.sum(self.applied & ~self.is_finite))

    @property
    def longest_stall(self) -> int:
        """The most steps that were skipped in a row."""
        ends = np.flatnonzero(np.concatenate([[True], self.applied, [True]]))
        return int(np.max(np.diff(ends))) - 1

    @property
    def log2_below_limit(self) -> Optional[float]:
        """By how many powers of two the scale was below the limit, on average.

        Over the steps that were applied and whose limit is finite and positive. None
        without a limit or without such steps. The smaller, the less was lost to
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
        """Draws the scale, the limit if there was one, and the steps that were lost.

        Where many were lost, the share of them that was, over the steps.

        Args:
          ax: matplotlib `Axes` to draw on. None makes a figure.

        Returns:
          The `Axes`.

        Raises:
          ImportError: matplotlib is not installed.
        """
        scales, limit = self.loss_scale, self.limit
        return picture.draw("Simulation.plot", ax, scales, ~self.applied, limit=limit)
