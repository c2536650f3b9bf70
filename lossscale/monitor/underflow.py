"""When a loss scale is so low that float16 loses gradients, which makes no sound."""

from __future__ import annotations

import math
from typing import Optional

from lossscale.monitor.stalls import Reading
from lossscale.plotting import scale_text
from lossscale.scales.headroom import FLOAT16_MAX

#: So many are there in float16, from 2**-24 to 65504.
_DOUBLINGS = 40
#: So many may stand between the largest scaled gradient and 65504. The others hold all
#: that changes a weight.
FAR_BELOW = 16

_MESSAGE = """\
Gradients may underflow: for {epochs} epochs no step was skipped, and the largest \
scaled gradient stayed {room:.0f} doublings or more below 65504, where float16 ends. \
Of float16's 40 doublings {left} are left below it, and what is smaller is lost. The \
loss scale is {now}, and the gradients would bear {borne}. Write

    scale = lossscale.HeadroomLossScale()  # finds it by itself
    optimizer = lossscale.LossScaleOptimizer(inner_optimizer, scale)
"""


def headroom(reading: Reading) -> Optional[float]:
    """Returns how many doublings the largest gradient is below 65504 once it is scaled.

    None if it is not known: nobody looked, the step was skipped, or all were zero.
    """
    largest = reading.largest
    if largest is None or not 0.0 < largest < math.inf:
        return None
    return math.log2(FLOAT16_MAX) - math.log2(largest) - math.log2(reading.loss_scale)


class Underflow:
    """Tells once of a loss scale that stays far too low.

    ```
    see(reading):              # at the end of each epoch
      if the epoch skipped a step, or headroom <= FAR_BELOW: epochs = 0
      elif headroom is known: epochs += 1
      return epochs == patience, and never again
    ```

    An overflow says that the scale is not too low for all: activations have gradients,
    too.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._epochs = 0
        self._least = math.inf
        self._skipped: Optional[int] = None
        self._told = False

    def see(self, reading: Reading) -> Optional[str]:
        """Returns what to say of underflow now, None if there is nothing."""
        room = headroom(reading)
        skipped, self._skipped = self._skipped, reading.skipped
        if skipped not in (None, reading.skipped) or (room or math.inf) <= FAR_BELOW:
            self._epochs, self._least = 0, math.inf
        elif room is not None:
            self._epochs, self._least = self._epochs + 1, min(self._least, room)
        if self._told or self._epochs < self.patience:
            return None
        self._told = True
        borne = 2.0 ** (math.floor(math.log2(reading.loss_scale) + self._least) - 1)
        return _MESSAGE.format(
            epochs=self._epochs,
            room=math.floor(self._least),
            left=max(_DOUBLINGS - math.floor(self._least), 0),
            now=scale_text(reading.loss_scale),
            borne=scale_text(borne),
        )
