"""The table that GradientRanges and ForwardRanges print, and its columns."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, NamedTuple

import numpy as np

from lossscale.plotting import scale_text


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


#: The attribute of `Figures` that a column shows -> `Column`. The table and `summary`
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


def _shown(ranges: Any) -> Dict[str, Column]:
    """Returns the columns to print: "inf, NaN" only if there are such values."""
    any_bad = ranges.nonfinite.any()
    return {n: column for n, column in COLUMNS.items() if any_bad or n != "nonfinite"}


def table(ranges: Any) -> str:
    """Returns the table, and below it the conclusions."""
    lines = [
        f"Gradients of {ranges.batches} {'batches' if ranges.batches > 1 else 'batch'} "
        f"in float32, and what float16 makes of them at loss scale "
        f"{scale_text(ranges.loss_scale)}:",
        "",
        *row_lines(ranges),
        "",
        *_notes(ranges),
    ]
    return "\n".join(lines)


def row_lines(ranges: Any) -> List[str]:
    """Returns the header, a line for each row, and a line for all rows together."""
    summary = ranges.summary
    width, columns = max(map(len, summary)), _shown(ranges)
    header = "".join(f"{column.title:>10}" for column in columns.values())
    return [
        f"{'':{width}}{header}",
        *(f"{name:{width}}{_cells(columns, row)}" for name, row in summary.items()),
    ]


def _notes(ranges: Any) -> List[str]:
    bad = [
        f"{name} ({infinities:,} infinite, {nans:,} NaN)"
        for name, infinities, nans in zip(ranges.names, ranges.infinities, ranges.nans)
        if infinities + nans
    ]
    if bad:
        return [
            "Not finite in float32, so no loss scale helps: " + ", ".join(bad) + "."
        ]
    if ranges.largest_safe_scale is None:
        return ["All gradients are zero."]
    lost = ranges.at(ranges.recommended_scale).summary["all"]["flushed"]
    notes = [
        f"Largest safe scale: {scale_text(ranges.largest_safe_scale)}. "
        f"Recommended: {scale_text(ranges.recommended_scale)}, at which "
        f"{COLUMNS['flushed'].cell(lost)} are flushed to zero."
    ]
    blocks = ranges.need_own_scale
    if blocks:
        notes.append(
            "No single scale serves these blocks. Wrap each in a ScaledBlock: "
            + ", ".join(blocks)
            + "."
        )
    return notes


def _cells(columns: Dict[str, Column], row: Dict[str, float]) -> str:
    texts = (column.cell(row[name]) for name, column in columns.items())
    return "".join(f"{text:>10}" for text in texts)
