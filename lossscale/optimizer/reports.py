"""Reports on the last skipped step, for users."""

from __future__ import annotations

from typing import List, Optional

from lossscale.optimizer.fault_record import Entry, FaultRecord, NonfiniteGradient
from lossscale.optimizer.spike_record import Spike
from lossscale.runtime.aliases import Variable
from lossscale.scales.base import LossScale


class Reports:
    """Methods that say why the last skipped step was skipped."""

    _fault_record: FaultRecord
    _loss_scale: LossScale

    def nonfinite_gradients(self) -> List[NonfiniteGradient]:
        """Returns the gradients that were not finite at the last skipped step.

        It covers all replicas of this process, and the gradients as they were before
        you clipped them. With `communication_dtype` it covers their sum as well. It
        reads the device, so call it on the host, between steps.

        Returns:
          A list of `NonfiniteGradient`. The list is empty if no step was skipped, or if
          nothing is known: the loss scale decides by itself, the graph is a
          `tf.compat.v1` graph, or the overflow was clipped away.
        """
        return self._fault_record.gradients()

    def nonfinite_loss(self) -> Optional[str]:
        """Returns whether the unscaled loss of the last skipped step was inf or NaN.

        If it was, no loss scale helps. Call this where you would call
        `nonfinite_gradients`.

        Returns:
          `"inf"` or `"nan"`. None if the loss was finite, or if it is not known, since
          one `tf.function` scaled the loss and another one applied the gradients.
        """
        return self._fault_record.loss()

    def last_spike(self) -> Optional[Spike]:
        """Returns the last spike: a step that a `SpikeGuard` skipped for its size.

        It covers this process. Call this where you would call `nonfinite_gradients`.

        Returns:
          A `Spike` with `name`, `largest`, `limit` and `variable`. None if no step was
          skipped for its size.
        """
        return self._fault_record.spike()

    def _fault_entry(self, variables: List[Variable]) -> Optional[Entry]:
        """Returns the record for the faults of these variables. None: not checked."""
        checks = self._loss_scale.checks_gradients
        spikes = self._loss_scale.skips_spikes
        return self._fault_record.entry_of(variables, spikes) if checks else None
