"""What float16 does to counted values: in figures, a table and a picture."""

from __future__ import annotations

import abc
import math
from typing import Any, Callable, ClassVar, Dict, List, Mapping, NamedTuple, Tuple

import numpy as np

from lossscale import arguments
from lossscale.plotting import pyplot, scale_text
from lossscale.ranges import exponents

#: What a number becomes in float16, from which exponent on, and how to draw that.
_REGIONS = (
    ("zero in float16", -np.inf, "tab:red", 0.22),
    ("subnormal: fewer digits", exponents.ZERO, "gold", 0.25),
    ("normal", exponents.NORMAL, "tab:green", 0.12),
    ("infinite in float16", exponents.TOP + 1, "black", 0.22),
)
#: The height of a histogram in inches.
_ROW = 0.45
#: A longer name is cut.
_LONGEST = 40


class Column(NamedTuple):
    """One column of the table.

    Attributes:
      as_text: Returns the text of a value that is not NaN.
      title: The heading of the column.
    """

    as_text: Callable[[float], str]
    title: str

    def cell(self, value: float) -> str:
        """Returns the text of a value, "-" for NaN: all of the row is zero."""
        return "-" if np.isnan(value) else self.as_text(value)


def _percent(value: float) -> str:
    return "<0.1%" if 0 < value < 5e-4 else f"{value:.1%}"


#: The attribute of `Ranges` that a column shows -> `Column`. The table and `summary`
#: have this order. To add a column, add a line here and an attribute of that name.
COLUMNS: Mapping[str, Column] = {
    "values": Column("{:,}".format, "values"),
    "zeros": Column(_percent, "zero"),
    "nonfinite": Column("{:,}".format, "inf, NaN"),
    "flushed": Column(_percent, "flushed"),
    "subnormal": Column(_percent, "subnormal"),
    "overflowing": Column(_percent, "overflow"),
    "largest_exponent": Column("2**{:.0f}".format, "largest"),
    "headroom": Column("{:+.1f}".format, "headroom"),
}


class Ranges(abc.ABC):
    """A result with figures, a histogram, a table and a picture for each of its rows.

    Attributes:
      names: The names of the rows.
      largest: A `float32` array, the largest finite magnitude of each row.
      batches: How many batches were counted.
      loss_scale: The number that multiplies the values before they are cast to float16.
    """

    names: Tuple[str, ...]
    largest: Any
    batches: int
    loss_scale: float
    #: The name of the values in plural, and whether a loss scale multiplies them.
    _what: ClassVar[str]
    _is_scaled: ClassVar[bool]

    @property
    @abc.abstractmethod
    def _counts(self) -> Tuple[Any, int]:
        """The counts by exponent, and the power of two that multiplies the values."""

    @property
    @abc.abstractmethod
    def _unscaled(self) -> Any:
        """The counts by exponent of the values themselves."""

    @property
    @abc.abstractmethod
    def _all(self) -> Ranges:
        """The same values, all in one row."""

    @property
    @abc.abstractmethod
    def _notes(self) -> List[str]:
        """The conclusions, which the table ends with."""

    @property
    @abc.abstractmethod
    def _heading(self) -> str:
        """The first line of the table."""

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

    @property
    def histogram(self) -> Tuple[Any, Any]:
        """The histogram of the unscaled magnitudes: `(exponents, counts)`.

        Two `int64` arrays: the exponents from -127, which stands for float32's
        subnormals, to 127, and the counts, of shape `[rows, 255]`.
        """
        return exponents.by_exponent(self._unscaled)

    def plot(self, ax: Any = None, *, rows: int = 24) -> Any:
        """Draws the exponents of the values over the range of float16.

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
        rows = arguments.count("rows", rows)
        return _draw(self, ax, rows)

    def __str__(self) -> str:
        summary = self.summary
        width = max(map(len, summary))
        # "inf, NaN" only if there are such values.
        any_bad = self.nonfinite.any()
        shown = {n: c for n, c in COLUMNS.items() if any_bad or n != "nonfinite"}
        titles = "".join(f"{column.title:>10}" for column in shown.values())
        lines = [self._heading, "", f"{'':{width}}{titles}"]
        for name, row in summary.items():
            cells = (column.cell(row[key]) for key, column in shown.items())
            lines.append(f"{name:{width}}" + "".join(f"{cell:>10}" for cell in cells))
        return "\n".join([*lines, "", *self._notes])

    @property
    def _batches_text(self) -> str:
        return f"{self.batches} {'batches' if self.batches > 1 else 'batch'}"

    def _share_of(self, count: Callable[[Any, int], Any]) -> Any:
        counts, power = self._counts
        return _ratio(count(counts, power), exponents.numbers(counts))


def _ratio(part: Any, whole: Any) -> Any:
    with np.errstate(invalid="ignore"):  # 0 of 0 is NaN
        return np.true_divide(part, whole)


def _log2(largest: Any) -> Any:
    positive = np.where(largest > 0, largest, np.nan).astype(np.float64)
    return np.log2(positive)


def _draw(ranges: Ranges, ax: Any, rows: int) -> Any:
    """Draws a histogram of exponents for each row, over the range of float16."""
    powers, counts = ranges.histogram
    # The rows that float16 would hurt most, in their order.
    hurt = np.nan_to_num(ranges.flushed + ranges.overflowing, nan=-1.0)
    hurt = np.where(ranges.nonfinite > 0, 2.0, hurt)
    chosen = np.sort(np.argsort(-hurt, kind="stable")[:rows])
    shown = {"all": counts.sum(0), **{ranges.names[i]: counts[i] for i in chosen}}
    beside, where = ax, {}
    if ax is None:
        ax, beside = _new_axes(len(shown))
        where = {"loc": "center", "ncol": 3}
    shift = float(np.log2(ranges.loss_scale))
    _draw_regions(ax, shift, powers[shown["all"] > 0])
    summary = ranges.summary
    _draw_histograms(ax, powers, shown, summary)
    _label(ax, ranges, list(shown), summary)
    ax.set_xlabel(f"log2 of the {ranges._what}, in float32")
    if ranges._is_scaled:
        by_scale = (lambda x: x + shift, lambda x: x - shift)
        scaled = ax.secondary_xaxis("top", functions=by_scale)
        scale = scale_text(ranges.loss_scale)
        scaled.set_xlabel(f"log2 of the {ranges._what} times {scale}")
    beside.legend(*ax.get_legend_handles_labels(), fontsize="small", **where)
    return ax


def _draw_regions(ax: Any, shift: float, used: Any) -> None:
    # The axis shows all values, and the range of float16.
    zero, top = exponents.ZERO, exponents.TOP
    limits = (
        min([zero - shift, zero, *used[:1]]) - 3,
        max([top - shift, *used[-1:]]) + 4,
    )
    starts = [region[1] - shift for region in _REGIONS] + [np.inf]
    edges = np.clip(starts, *limits)
    for (label, _, color, alpha), start, end in zip(_REGIONS, edges, edges[1:]):
        ax.axvspan(start, end, color=color, alpha=alpha, linewidth=0, label=label)
    ax.set_xlim(*limits)
    if shift:
        label = "without loss scaling, zero from here down"
        ax.axvline(zero, color="tab:red", linestyle="--", label=label)


def _draw_histograms(
    ax: Any, powers: Any, shown: Dict[str, Any], summary: Dict[str, Any]
) -> None:
    # A bin of exponent e holds the magnitudes from 2**e to below 2**(e + 1).
    edges = [*powers, powers[-1] + 1]
    for number, (name, row) in enumerate(shown.items()):
        floor = len(shown) - 1 - number
        tops = floor + 0.85 * row / max(row.max(), 1)
        color = "black" if name == "all" else "tab:blue"
        color = "tab:red" if summary[name]["nonfinite"] else color
        ax.fill_between(
            edges, floor, [*tops, tops[-1]], step="post", color=color, linewidth=0
        )
    ax.set_ylim(0, len(shown))


def _label(ax: Any, ranges: Any, names: List[str], summary: Dict[str, Any]) -> None:
    # Long names leave no room for the picture. Their ends tell them apart.
    short = [n if len(n) <= _LONGEST else f"...{n[3 - _LONGEST :]}" for n in names]
    fates = [_fate(summary[name]) for name in names]
    labels = [f"{name}\n{fate}" for name, fate in zip(short, fates)]
    ax.set_yticks(np.arange(len(names)) + 0.4)
    ticks = ax.set_yticklabels(labels[::-1], fontsize="small")
    for tick, name in zip(ticks, names[::-1]):
        if summary[name]["nonfinite"]:
            tick.set_color("tab:red")
    if len(names) <= len(ranges.names):
        ax.set_ylabel(f"the {len(names) - 1} worst of {len(ranges.names)} rows")


def _fate(row: Dict[str, Any]) -> str:
    """Returns the worst that happens to a row's values, as text."""
    if row["nonfinite"]:
        return f"{row['nonfinite']:,} inf or NaN"
    if row["overflowing"] > 0:
        return f"{COLUMNS['overflowing'].cell(row['overflowing'])} to infinity"
    return f"{COLUMNS['flushed'].cell(row['flushed'])} to zero"


def _new_axes(rows: int) -> Any:
    heights = [1.1 + _ROW * rows, 0.6]
    _, axes = pyplot("plot").subplots(
        2,
        figsize=(9, sum(heights)),
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    axes[1].axis("off")  # for the legend: the layout leaves no room outside of axes
    return axes
