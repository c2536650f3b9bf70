"""The picture of ranges: histograms of exponents, over the range of float16."""

from __future__ import annotations

from typing import Any, Dict, List

import numpy as np

from lossscale.plotting import pyplot, scale_text
from lossscale.ranges.exponents import NORMAL, TOP, ZERO
from lossscale.ranges.table import COLUMNS

#: What a number becomes in float16, from which exponent on, and how to draw that.
_REGIONS = (
    ("zero in float16", -np.inf, "tab:red", 0.22),
    ("subnormal: fewer digits", ZERO, "gold", 0.25),
    ("normal", NORMAL, "tab:green", 0.12),
    ("infinite in float16", TOP + 1, "black", 0.22),
)
#: The height of a histogram in inches.
_ROW = 0.45
#: A longer name is cut.
_LONGEST = 40


def draw(ranges: Any, ax: Any, rows: int, what: str = "gradients") -> Any:
    """Draws a histogram of exponents for each row, over the range of float16.

    Args:
      ranges: `GradientRanges` or `ForwardRanges`.
      ax: matplotlib `Axes` to draw on. None makes a figure.
      rows: The most rows to draw.
      what: The name of the values, in plural.
    """
    exponents, counts = ranges.histogram
    chosen = _worst(ranges, rows)
    shown = {"all": counts.sum(0), **{ranges.names[i]: counts[i] for i in chosen}}
    beside, where = ax, {}
    if ax is None:
        ax, beside = _new_axes(len(shown))
        where = {"loc": "center", "ncol": 3}
    shift = float(np.log2(ranges.loss_scale))
    _draw_regions(ax, shift, _limits(exponents[shown["all"] > 0], shift))
    summary = ranges.summary
    _draw_histograms(ax, exponents, shown, summary)
    _label(ax, ranges, list(shown), summary)
    _label_x(ax, ranges, shift, what)
    beside.legend(*ax.get_legend_handles_labels(), fontsize="small", **where)
    return ax


def _worst(ranges: Any, rows: int) -> Any:
    """Returns the rows that float16 would hurt most, in their order."""
    hurt = np.nan_to_num(ranges.flushed + ranges.overflowing, nan=-1.0)
    hurt = np.where(ranges.nonfinite > 0, 2.0, hurt)
    return np.sort(np.argsort(-hurt, kind="stable")[:rows])


def _limits(used: Any, shift: float) -> Any:
    """Returns the ends of the axis: it shows all values, and the range of float16."""
    return (
        min([ZERO - shift, ZERO, *used[:1]]) - 3,
        max([TOP - shift, *used[-1:]]) + 4,
    )


def _draw_regions(ax: Any, shift: float, limits: Any) -> None:
    starts = [region[1] - shift for region in _REGIONS] + [np.inf]
    edges = np.clip(starts, *limits)
    for (label, _, color, alpha), start, end in zip(_REGIONS, edges, edges[1:]):
        ax.axvspan(start, end, color=color, alpha=alpha, linewidth=0, label=label)
    ax.set_xlim(*limits)
    if shift:
        label = "without loss scaling, zero from here down"
        ax.axvline(ZERO, color="tab:red", linestyle="--", label=label)


def _draw_histograms(
    ax: Any, exponents: Any, shown: Dict[str, Any], summary: Dict[str, Any]
) -> None:
    # A bin of exponent e holds the magnitudes from 2**e to below 2**(e + 1).
    edges = [*exponents, exponents[-1] + 1]
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
    labels = [f"{_short(name)}\n{_fate(summary[name])}" for name in names]
    ax.set_yticks(np.arange(len(names)) + 0.4)
    ticks = ax.set_yticklabels(labels[::-1], fontsize="small")
    for tick, name in zip(ticks, names[::-1]):
        if summary[name]["nonfinite"]:
            tick.set_color("tab:red")
    if len(names) <= len(ranges.names):
        ax.set_ylabel(f"the {len(names) - 1} worst of {len(ranges.names)} rows")


def _short(name: str) -> str:
    """Returns a name cut to leave room for the picture: its end tells names apart."""
    return name if len(name) <= _LONGEST else f"...{name[3 - _LONGEST :]}"


def _fate(row: Dict[str, Any]) -> str:
    """Returns the worst that happens to a row's values, as text."""
    if row["nonfinite"]:
        return f"{row['nonfinite']:,} inf or NaN"
    if row["overflowing"] > 0:
        return f"{COLUMNS['overflowing'].cell(row['overflowing'])} to infinity"
    return f"{COLUMNS['flushed'].cell(row['flushed'])} to zero"


def _label_x(ax: Any, ranges: Any, shift: float, what: str) -> None:
    ax.set_xlabel(f"log2 of the {what}, in float32")
    if what != "gradients":  # only gradients are scaled
        return
    scaled = ax.secondary_xaxis(
        "top", functions=(lambda x: x + shift, lambda x: x - shift)
    )
    scaled.set_xlabel(f"log2 of the gradients times {scale_text(ranges.loss_scale)}")


def _new_axes(rows: int) -> Any:
    heights = [1.1 + _ROW * rows, 0.6]
    _, axes = pyplot("GradientRanges.plot").subplots(
        2,
        figsize=(9, sum(heights)),
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    axes[1].axis("off")  # for the legend: the layout leaves no room outside of axes
    return axes
