"""What float16 does to counted values: in figures, a table and a picture."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, Callable, ClassVar, Dict, List, Mapping, Sequence, Tuple

import numpy as np
import tensorflow as tf

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


def _percent(value: float) -> str:
    return "<0.1%" if 0 < value < 5e-4 else f"{value:.1%}"


#: The attribute of `Ranges` that a column shows -> the column's title, and the text of
#: a value. The table and `summary` have this order.
COLUMNS: Mapping[str, Tuple[str, Callable[[float], str]]] = {
    "values": ("values", "{:,}".format),
    "zeros": ("zero", _percent),
    "nonfinite": ("inf, NaN", "{:,}".format),
    "flushed": ("flushed", _percent),
    "subnormal": ("subnormal", _percent),
    "overflowing": ("overflow", _percent),
    "largest_exponent": ("largest", "2**{:.0f}".format),
    "headroom": ("headroom", "{:+.1f}".format),
}


def cell(column: str, value: float) -> str:
    """Returns the text of a value in a column, "-" for NaN: all of the row is zero."""
    return "-" if np.isnan(value) else COLUMNS[column][1](value)


def _figure(name: str, doc: str) -> Any:
    return property(lambda self: self._figures[name], doc=doc)


class Row:
    """What was counted of some values, by significand of the loss scale."""

    def __init__(self) -> None:
        self.name, self.largest = "", 0.0
        self.counts: Dict[float, Any] = {}

    def add(self, values: Any, significands: Sequence[float] = (1.0,)) -> None:
        for significand in significands:
            counts, largest = exponents.count(values, significand)
            before = self.counts.get(significand, 0)
            self.counts[significand] = before + counts.numpy().astype(np.int64)
            self.largest = max(self.largest, float(largest.numpy()))


class Ranges(abc.ABC):
    """Figures, a histogram, a table and a picture for each row of counted values.

    Subclasses are dataclasses with these fields, in an order of their own.
    """

    names: Tuple[str, ...]
    counts: Any
    largest: Any
    batches: int
    loss_scale: float
    _title: ClassVar[str]  # what the table begins with
    _what: ClassVar[str]  # the name of the values in plural
    _is_scaled: ClassVar[bool]  # whether a loss scale multiplies them
    _in_repr: ClassVar[Tuple[str, ...]]  # what `repr` shows besides rows and batches

    @property
    @abc.abstractmethod
    def _notes(self) -> List[str]:
        """The conclusions, which the table ends with."""

    @property
    def _figures(self) -> Dict[str, Any]:
        significand, exponent = math.frexp(self.loss_scale)
        counts = self._by_significand[significand * 2]
        figures = exponents.tally(counts, exponent - 1)
        with np.errstate(invalid="ignore"):  # 0 of 0 is NaN
            figures["zeros"] = figures["zeros"] / figures["values"]
            for kind in ("flushed", "subnormal", "overflowing"):
                figures[kind] = figures[kind] / figures["numbers"]
        figures["nonfinite"] = figures["infinities"] + figures["nans"]
        largest = np.where(self.largest > 0, self.largest, np.nan).astype(np.float64)
        figures["largest_exponent"] = np.floor(np.log2(largest))
        top = math.log2(exponents.LARGEST) - math.log2(self.loss_scale)
        figures["headroom"] = top - np.log2(largest)
        return figures

    @property
    def _by_significand(self) -> Dict[float, Any]:
        """The counts, of shape `[rows, BINS]`, by significand of the loss scale."""
        return self.counts if isinstance(self.counts, dict) else {1.0: self.counts}

    def _joined(self, rows: Mapping[str, Sequence[int]]) -> Any:
        """Returns a report with these rows, each made of several rows of this one."""
        this: Any = self
        groups = list(map(list, rows.values()))
        counts = tf.nest.map_structure(
            lambda array: np.stack([array[numbers].sum(0) for numbers in groups]),
            self.counts,
        )
        largest = np.stack([self.largest[numbers].max() for numbers in groups])
        changes = {"names": tuple(rows), "counts": counts, "largest": largest}
        return dataclasses.replace(this, **changes)

    values = _figure("values", "The number of values.")
    infinities = _figure("infinities", "How many values are infinite in float32.")
    nans = _figure("nans", "How many values are NaN in float32.")
    nonfinite = _figure("nonfinite", "How many are inf or NaN: no loss scale helps.")
    zeros = _figure("zeros", "The share of values that are zero in float32 already.")
    flushed = _figure("flushed", "The share that float16 makes zero: up to 2**-25.")
    subnormal = _figure("subnormal", "The share that loses digits: above, to 2**-14.")
    overflowing = _figure("overflowing", "The share that is infinite: from 65520 on.")
    largest_exponent = _figure(
        "largest_exponent",
        "The exponent of the largest unscaled magnitude. NaN if all are zero.",
    )
    headroom = _figure(
        "headroom", "How many doublings the largest scaled magnitude is below 65504."
    )

    @property
    def summary(self) -> Dict[str, Dict[str, float]]:
        """The figures above by row name. `"all"` has those of all rows together."""
        rows = {name: [number] for number, name in enumerate(self.names)}
        joined = self._joined({**rows, "all": range(len(self.names))})
        figures = joined._figures
        columns = [figures[name].tolist() for name in COLUMNS]
        of_rows = (dict(zip(COLUMNS, row)) for row in zip(*columns))
        return dict(zip(joined.names, of_rows))

    @property
    def histogram(self) -> Tuple[Any, Any]:
        """The histogram of the unscaled magnitudes: `(exponents, counts)`.

        Two `int64` arrays: the exponents from -127, which stands for float32's
        subnormals, to 127, and the counts, of shape `[rows, 255]`.
        """
        return exponents.by_exponent(self._by_significand[1.0])

    def __repr__(self) -> str:
        shown = {"rows": len(self.names), "batches": self.batches}
        shown.update((name, getattr(self, name)) for name in self._in_repr)
        listed = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"{type(self).__name__}({listed})"

    def __str__(self) -> str:
        summary = self.summary
        width = max(map(len, summary))
        any_bad = self.nonfinite.any()
        shown = [name for name in COLUMNS if any_bad or name != "nonfinite"]
        number = f"{self.batches} {'batches' if self.batches > 1 else 'batch'}"
        at = f" at loss scale {scale_text(self.loss_scale)}" if self._is_scaled else ""
        lines = [
            f"{self._title} {number} in float32, and what float16 makes of them{at}:",
            "",
            " " * width + "".join(f"{COLUMNS[name][0]:>10}" for name in shown),
        ]
        for row, figures in summary.items():
            cells = [f"{cell(name, figures[name]):>10}" for name in shown]
            lines.append(f"{row:{width}}" + "".join(cells))
        return "\n".join([*lines, "", *self._notes])

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
        summary, (powers, counts) = self.summary, self.histogram
        # The rows that float16 would hurt most, in their order.
        hurt = np.nan_to_num(self.flushed + self.overflowing, nan=-1.0)
        hurt = np.where(self.nonfinite > 0, 2.0, hurt)
        worst = np.sort(np.argsort(-hurt, kind="stable")[:rows])
        shown = {"all": counts.sum(0), **{self.names[i]: counts[i] for i in worst}}
        beside, where = ax, {}
        if ax is None:
            heights = [1.1 + 0.45 * len(shown), 0.6]  # in inches
            grid = {"height_ratios": heights}
            size = {"figsize": (9, sum(heights)), "gridspec_kw": grid}
            _, (ax, beside) = pyplot().subplots(2, layout="constrained", **size)
            beside.axis("off")  # for the legend: the layout has no other place
            where = {"loc": "center", "ncol": 3}
        shift, used = float(np.log2(self.loss_scale)), powers[shown["all"] > 0]
        # The axis shows all values, and the range of float16.
        zero, top = exponents.ZERO, exponents.TOP
        low = min([zero - shift, zero, *used[:1]]) - 3
        high = max([top - shift, *used[-1:]]) + 4
        starts = [region[1] - shift for region in _REGIONS]
        edges = np.clip([*starts, np.inf], low, high)
        for (label, _, color, alpha), start, end in zip(_REGIONS, edges, edges[1:]):
            ax.axvspan(start, end, color=color, alpha=alpha, linewidth=0, label=label)
        ax.set_xlim(low, high)
        if shift:
            label = "without loss scaling, zero from here down"
            ax.axvline(zero, color="tab:red", linestyle="--", label=label)
        _draw_histograms(ax, powers, shown, summary)
        if len(shown) <= len(self.names):
            ax.set_ylabel(f"the {len(shown) - 1} worst of {len(self.names)} rows")
        ax.set_xlabel(f"log2 of the {self._what}, in float32")
        if self._is_scaled:
            by_scale = (lambda x: x + shift, lambda x: x - shift)
            scaled = ax.secondary_xaxis("top", functions=by_scale)
            scale = scale_text(self.loss_scale)
            scaled.set_xlabel(f"log2 of the {self._what} times {scale}")
        beside.legend(*ax.get_legend_handles_labels(), fontsize="small", **where)
        return ax


def _draw_histograms(ax: Any, powers: Any, shown: Any, summary: Any) -> None:
    """Draws one above the other, the first at the top, with what becomes of it."""
    # A bin of exponent e holds the magnitudes from 2**e to below 2**(e + 1).
    edges = [*powers, powers[-1] + 1]
    labels = []
    for floor, (name, counts) in enumerate(reversed(shown.items())):
        row, color = summary[name], "black" if name == "all" else "tab:blue"
        fate = f"{cell('flushed', row['flushed'])} to zero"
        if row["overflowing"] > 0:
            fate = f"{cell('overflowing', row['overflowing'])} to infinity"
        if row["nonfinite"]:
            fate, color = f"{row['nonfinite']:,} inf or NaN", "tab:red"
        tops = floor + 0.85 * counts / max(counts.max(), 1)
        tops = [*tops, tops[-1]]
        ax.fill_between(edges, floor, tops, step="post", color=color, linewidth=0)
        # Long names leave no space for the picture. Their ends differ.
        short = name if len(name) <= 40 else f"...{name[-37:]}"
        labels.append(f"{short}\n{fate}")
    ax.set_ylim(0, len(shown))
    ax.set_yticks(np.arange(len(shown)) + 0.4)
    ticks = ax.set_yticklabels(labels, fontsize="small")
    for tick, name in zip(ticks, reversed(shown)):
        if summary[name]["nonfinite"]:
            tick.set_color("tab:red")
