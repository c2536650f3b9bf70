"""Figures: what float16 does to counted values, in arrays with a number per row."""

from __future__ import annotations

import abc
import math
from typing import Any, Callable, Dict, Tuple

import numpy as np

from lossscale.ranges import exponents
from lossscale.ranges.table import COLUMNS


class Figures(abc.ABC):
    """The figures that a result computes from the counts of its rows.

    Attributes:
      names: The names of the rows.
      largest: A `float32` array, the largest finite magnitude of each row.
      loss_scale: The number that multiplies the values before they are cast to float16.
    """

    names: Tuple[str, ...]
    largest: Any
    loss_scale: float

    @property
    @abc.abstractmethod
    def _counts(self) -> Tuple[Any, int]:
        """The counts by exponent, and the power of two that multiplies the values."""

    @property
    @abc.abstractmethod
    def _all(self) -> Figures:
        """The same values, all in one row."""

    @property
    def values(self) -> Any:
        """The number of values."""
        return exponents.total(self._counts[0])

    @property
    def nonfinite(self) -> Any:
        """How many values are inf or NaN in float32. No loss scale helps these."""
        return self.infinities + self.nans

    @property
    def infinities(self) -> Any:
        """The number of values that are infinite in float32."""
        return exponents.infinities(self._counts[0])

    @property
    def nans(self) -> Any:
        """The number of values that are NaN in float32."""
        return exponents.nans(self._counts[0])

    @property
    def zeros(self) -> Any:
        """The share of all values that are zero in float32 already."""
        return _ratio(exponents.zeros(self._counts[0]), self.values)

    @property
    def flushed(self) -> Any:
        """The share that float16 rounds to zero: at most 2**-25 when scaled."""
        return self._share_of(exponents.flushed)

    @property
    def subnormal(self) -> Any:
        """The share that loses digits in float16: below 2**-14 when scaled."""
        return self._share_of(exponents.subnormal)

    @property
    def overflowing(self) -> Any:
        """The share that is infinite in float16: 65520 or more when scaled."""
        return self._share_of(exponents.overflowing)

    @property
    def largest_exponent(self) -> Any:
        """The exponent of the largest unscaled magnitude. NaN if all are zero."""
        return np.floor(_log2(self.largest))

    @property
    def headroom(self) -> Any:
        """How many doublings the largest scaled magnitude is below 65504."""
        top = math.log2(exponents.LARGEST) - math.log2(self.loss_scale)
        return top - _log2(self.largest)

    @property
    def summary(self) -> Dict[str, Dict[str, float]]:
        """The figures above by row name. `"all"` has those of all rows together."""
        whole = self._all
        columns = {
            name: np.append(getattr(self, name), getattr(whole, name))
            for name in COLUMNS
        }
        return {
            row: {name: columns[name][number].item() for name in COLUMNS}
            for number, row in enumerate((*self.names, "all"))
        }

    def _share_of(self, count: Callable[[Any, int], Any]) -> Any:
        counts, power = self._counts
        return _ratio(count(counts, power), exponents.numbers(counts))


def _ratio(part: Any, whole: Any) -> Any:
    with np.errstate(invalid="ignore"):  # 0 of 0 is NaN
        return np.true_divide(part, whole)


def _log2(largest: Any) -> Any:
    positive = np.where(largest > 0, largest, np.nan).astype(np.float64)
    return np.log2(positive)
