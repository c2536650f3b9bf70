"""GradientRanges: what float16 would do to gradients, in arrays, a table, a picture."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from lossscale import arguments
from lossscale.ranges import exponents, picture
from lossscale.ranges.figures import Figures
from lossscale.ranges.table import table


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GradientRanges(Figures):
    """What float16 would do to a model's gradients at a loss scale.

    Shares are of the values that are finite and not zero in float32. A share is NaN if
    there are no such values. All arrays have shape `[rows]`, in the order of `names`.

    Attributes:
      names: The names of the rows: variables, and with `activations=True` layers'
        outputs. Only those with a gradient have a row.
      counts: A dict: significand of the loss scale -> `int64` array of shape
        `[rows, lossscale.ranges.exponents.BINS]`.
      largest: A `float32` array, the largest finite magnitude of each row.
      loss_scale: A float, the scale of this report.
      batches: How many batches were counted.
      blocks: For each row the layer of the model, a `ScaledBlock` or any, it is in.
    """

    names: Tuple[str, ...]
    counts: Dict[float, Any]
    largest: Any
    loss_scale: float
    batches: int
    blocks: Tuple[str, ...] = ()

    def at(self, loss_scale: float) -> GradientRanges:
        """Returns the report of the same gradients at another loss scale.

        Args:
          loss_scale: A power of two, or the scale that `gradient_ranges` was given
            times a power of two. For these the counts are exact.
        """
        scale = arguments.loss_scale("loss_scale", loss_scale)
        if math.frexp(scale)[0] * 2 not in self.counts:
            raise ValueError(
                f"`loss_scale` must be a power of two, got {loss_scale!r}. "
                "For another scale, pass it to `gradient_ranges`."
            )
        return dataclasses.replace(self, loss_scale=scale)

    @property
    def largest_safe_scale(self) -> Optional[float]:
        """The largest power of two at which none of these gradients overflows.

        It is within float32's range. None if all gradients are zero, or if some are not
        finite in float32: then no scale is safe.
        """
        largest = float(np.max(self.largest))
        if self.nonfinite.any() or not largest:
            return None
        return 2.0 ** min(max(exponents.largest_safe_power(largest), -126), 127)

    @property
    def recommended_scale(self) -> Optional[float]:
        """Half the largest safe scale.

        Gradients computed in float16 are rounded on the way, and can be larger than
        these. Gradients of other batches, and later in training, can be larger still.
        `DynamicLossScale` adapts to them.
        """
        largest = self.largest_safe_scale
        return None if largest is None else max(largest / 2, 2.0**-126)

    @property
    def histogram(self) -> Tuple[Any, Any]:
        """The histogram of the unscaled magnitudes: `(exponents, counts)`.

        Two `int64` arrays: the exponents from -127, which stands for float32's
        subnormals, to 127, and the counts, of shape `[rows, 255]`.
        """
        return exponents.by_exponent(self.counts[1.0])

    @property
    def by_block(self) -> GradientRanges:
        """The same gradients with a row for each block: print it, or `plot` it."""
        rows: Dict[str, List[int]] = {}
        for number, block in enumerate(self.blocks or self.names):
            rows.setdefault(block, []).append(number)
        return self._joined(rows)

    @property
    def need_own_scale(self) -> Tuple[str, ...]:
        """The blocks that no single loss scale serves: wrap each in a `ScaledBlock`.

        At the recommended scale float16 rounds more than a tenth of their gradients to
        zero. At a scale of their own it would be less than half as many.
        """
        scale = self.recommended_scale
        if scale is None:
            return ()
        found = self.by_block
        lost = found.at(scale).flushed
        return tuple(
            name
            for number, name in enumerate(found.names)
            if lost[number] > 0.1 and 2 * found._own(number) < lost[number]
        )

    def __str__(self) -> str:
        return table(self)

    def __repr__(self) -> str:
        return (
            f"GradientRanges(rows={len(self.names)}, batches={self.batches}, "
            f"loss_scale={self.loss_scale:g}, "
            f"recommended_scale={self.recommended_scale})"
        )

    def plot(self, ax: Any = None, *, rows: int = 24) -> Any:
        """Draws the gradients' exponents, over the range of float16 at the loss scale.

        It draws a histogram of all values, and one for each row. If there are many
        rows, it draws those with the largest shares flushed to zero or overflowing.

        Args:
          ax: matplotlib `Axes` to draw on. None makes a figure.
          rows: The most rows to draw.

        Returns:
          The `Axes`.

        Raises:
          ImportError: matplotlib is not installed.
        """
        return picture.draw(self, ax, arguments.count("rows", rows))

    @property
    def _all(self) -> GradientRanges:
        return self._joined({"all": list(range(len(self.names)))})

    def _joined(self, rows: Dict[str, List[int]]) -> GradientRanges:
        """Returns a report with these rows, each made of several rows of this one."""
        counts = {
            key: np.stack([counts[numbers].sum(0) for numbers in rows.values()])
            for key, counts in self.counts.items()
        }
        largest = np.stack([self.largest[numbers].max() for numbers in rows.values()])
        names = tuple(rows)
        return dataclasses.replace(
            self, names=names, counts=counts, largest=largest, blocks=names
        )

    def _own(self, number: int) -> float:
        """Returns the share of a row flushed to zero at a scale for that row only."""
        row = self._joined({self.names[number]: [number]})
        return float(row.at(row.recommended_scale or 1.0).flushed[0])

    @property
    def _counts(self) -> Tuple[Any, int]:
        significand, exponent = math.frexp(self.loss_scale)
        return self.counts[significand * 2], exponent - 1
