"""By what gradients are divided: the very loss scale that multiplied their loss."""

from __future__ import annotations

from typing import Any, Callable, List, Optional

from lossscale.optimizer.advice import MOVED
from lossscale.optimizer.origin import Found, Origin
from lossscale.optimizer.sharing import Group
from lossscale.runtime.graphs import visible_graphs
from lossscale.scales.base import LossScale


class Divisors:
    """By what one optimizer divides gradients.

    Args:
      loss_scale: Its loss scale.
      group: The optimizers that share it.
      warn: Called with what a user must know.
    """

    def __init__(
        self, loss_scale: LossScale, group: Group, warn: Callable[[str], None]
    ) -> None:
        self._loss_scale, self._group, self._warn = loss_scale, group, warn

    def of(self, found: List[Optional[Found]], last: Any) -> List[Any]:
        """Returns by what each gradient is to be divided, None if it is unscaled.

        What comes from nowhere goes as the rest of the list does.

        Args:
          found: What is known of each gradient.
          last: The loss scale that was read last, None if there is none.
        """
        told = [each for each in found if each and each.origin is not Origin.FOREIGN]
        scaled = [each for each in told if each.origin is Origin.SCALED]
        default = last if not told else self._of(scaled, last) if scaled else None
        divisors = []
        for each in found:
            if each is None or each.origin is Origin.FOREIGN:
                divisors.append(default)
            elif each.origin is Origin.SCALED:
                divisors.append(self._of([each], last))
            else:
                divisors.append(None)
        return divisors

    def read(self) -> Any:
        """Returns the loss scale as it is now, for whoever needs it later, too."""
        loss_scale = self._loss_scale()
        self._group.marks.mark_scaled(loss_scale)
        return loss_scale

    def _of(self, scaled: List[Found], last: Any) -> Any:
        """Returns the loss scale that multiplied gradients, as it can be seen here."""
        graphs = list(visible_graphs())
        for each in reversed([d for found in scaled for d in found.divisors]):
            if any(getattr(each, "graph", None) is graph for graph in graphs):
                return each
        return self._as_it_was(scaled[-1].divisors[-1], last)

    def _as_it_was(self, loss_scale: Any, last: Any) -> Any:
        """Returns what a tensor of an ended branch, loop or function held."""
        mark, readings = self._group.marks.on(loss_scale), self._group.readings
        if mark is None:
            return self.read() if last is None else last
        if not readings.is_current(mark):
            reading = readings.at(mark)
            if reading is not None:
                return reading
            self._warn(MOVED)
        reading = readings.latest()
        return self.read() if reading is None else reading
