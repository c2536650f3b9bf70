"""What a user may ask of the last skipped step."""

from __future__ import annotations

from typing import List, Optional

from lossscale.optimizer.fault_record import Entry, FaultRecord, NonfiniteGradient
from lossscale.optimizer.spike_record import Spike
from lossscale.runtime.aliases import Variable
from lossscale.scales.base import LossScale


class Reports:
    """Why the last skipped step was skipped."""

    _fault_record: FaultRecord
    _loss_scale: LossScale

    def nonfinite_gradients(self) -> List[NonfiniteGradient]:
        """Returns the gradients that were not finite at the last skipped step.

        On any replica, in this process, as they were before anybody clipped them. Reads
        the device: call it on the host, between steps.

        Returns:
          A list of `NonfiniteGradient`. Empty if no step was skipped, or if it is not
          known: a loss scale that decides by itself, a `tf.compat.v1` graph, an
          overflow that was clipped away.
        """
        return self._fault_record.gradients()

    def nonfinite_loss(self) -> Optional[str]:
        """Returns how the unscaled loss of the last skipped step was not finite.

        If it was not, no loss scale helps. Read it as `nonfinite_gradients`.

        Returns:
          `"inf"` or `"nan"`. None if it was finite, or is not known: the loss was
          scaled in another `tf.function` than the gradients were applied in.
        """
        return self._fault_record.loss()

    def last_spike(self) -> Optional[Spike]:
        """Returns the last step that a `SpikeGuard` skipped for its size.

        In this process. Read it as `nonfinite_gradients`.

        Returns:
          A `Spike`: `name`, `largest`, `limit` and `variable`. None if there was none.
        """
        return self._fault_record.spike()

    def _fault_entry(self, variables: List[Variable]) -> Optional[Entry]:
        """Returns where the faults of variables go."""
        checks = self._loss_scale.checks_gradients
        spikes = self._loss_scale.skips_spikes
        return self._fault_record.entry_of(variables, spikes) if checks else None
