"""Figures: what float16 does to counted values, in arrays of a number for each row."""

from __future__ import annotations

import abc
import math
from typing import Any, Callable, Dict, Tuple

import numpy as np

from lossscale.ranges import exponents
from lossscale.ranges.table import COLUMNS


class Figures(abc.ABC):
    """What a result computes from the counts of its rows.

    Attributes:
      names: The rows.
      largest: A `float32` array, the largest finite magnitude of each row.
      loss_scale: What the values are multiplied with before float16 holds them.
    """

    names: Tuple[str, ...]
    largest: Any
    loss_scale: float

    @property
    @abc.abstractmethod
    def _counts(self) -> Tuple[Any, int]:
        """The counts by exponent, and the power of two that the values come with."""

    @property
    @abc.abstractmethod
    def _all(self) -> Figures:
        """The same values, in one row."""

    @property
    def values(self) -> Any:
        """How many values there are."""
        return exponents.total(self._counts[0])

    @property
    def nonfinite(self) -> Any:
        """How many are infinite or NaN in float32: no loss scale helps these."""
        return self.infinities + self.nans

    @property
    def infinities(self) -> Any:
        """How many are infinite in float32."""
        return exponents.infinities(self._counts[0])

    @property
    def nans(self) -> Any:
        """How many are NaN in float32."""
        return exponents.nans(self._counts[0])

    @property
    def zeros(self) -> Any:
        """The share of all values that is zero in float32 already."""
        return _ratio(exponents.zeros(self._counts[0]), self.values)

    @property
    def flushed(self) -> Any:
        """The share that float16 rounds to zero: at most 2**-25, times the scale."""
        return self._share_of(exponents.flushed)

    @property
    def subnormal(self) -> Any:
        """The share that keeps some digits only: below 2**-14, times the scale."""
        return self._share_of(exponents.subnormal)

    @property
    def overflowing(self) -> Any:
        """The share that is infinite in float16: from 65520 on, times the scale."""
        return self._share_of(exponents.overflowing)

    @property
    def largest_exponent(self) -> Any:
        """The exponent of the largest magnitude, unscaled. NaN where all is zero."""
        return np.floor(_log2(self.largest))

    @property
    def headroom(self) -> Any:
        """By how many factors of two the largest, times the scale, is below 65504."""
        top = math.log2(exponents.LARGEST) - math.log2(self.loss_scale)
        return top - _log2(self.largest)

    @property
    def summary(self) -> Dict[str, Dict[str, float]]:
        """The figures above by name of row, and of all rows together as `"all"`."""
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
