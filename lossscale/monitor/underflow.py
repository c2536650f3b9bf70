"""When a loss scale is so low that float16 loses gradients, without any sign."""

from __future__ import annotations

import math
from typing import Optional

from lossscale.monitor.stalls import Reading
from lossscale.plotting import scale_text
from lossscale.scales.headroom import FLOAT16_MAX

#: The doublings in float16's range, from 2**-24 to 65504.
_DOUBLINGS = 40
#: The largest scaled gradient may be this many doublings below 65504. The doublings
#: that remain suffice for all gradients that change a weight.
FAR_BELOW = 16

_MESSAGE = """\
Gradients may underflow: for {epochs} epochs no step was skipped, and the largest \
scaled gradient stayed {room:.0f} doublings or more below 65504, where float16 ends. \
Only {left} of float16's 40 doublings are left below it, and smaller gradients become \
zero. The loss scale is {now}, and could be {borne}. Write

    scale = lossscale.HeadroomLossScale()  # finds it by itself
    optimizer = lossscale.LossScaleOptimizer(inner_optimizer, scale)
"""


def headroom(reading: Reading) -> Optional[float]:
    """Returns how many doublings the largest scaled gradient is below 65504.

    None if unknown: nobody looked, the step was skipped, or all gradients were zero.
    """
    largest = reading.largest
    if largest is None or not 0.0 < largest < math.inf:
        return None
    return math.log2(FLOAT16_MAX) - math.log2(largest) - math.log2(reading.loss_scale)


class Underflow:
    """Reports once that a loss scale stays far too low.

    ```
    see(reading):              # at the end of each epoch
      if the epoch skipped a step, or headroom <= FAR_BELOW: epochs = 0
      elif headroom is known: epochs += 1
      return epochs == patience, and never again
    ```

    After an overflow the scale is not too low for all gradients: those of activations
    count, too.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._epochs = 0
        self._least = math.inf
        self._skipped: Optional[int] = None
        self._told = False

    def see(self, reading: Reading) -> Optional[str]:
        """Returns the message about underflow, None if there is none now."""
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
