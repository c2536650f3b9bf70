"""The picture of a run: the loss scale over the steps, and the lost steps."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from lossscale.plotting import pyplot

#: Up to this many lost steps each get a mark. If there are more, the density is drawn.
_MARKS = 300
_BINS = 200
#: The share of the height that the density takes if every step was lost.
_HEIGHT = 0.4


def draw(
    what: str,
    ax: Any,
    loss_scale: Optional[Any],
    lost: Any,
    *,
    limit: Optional[Any] = None,
    limit_label: str = "limit",
) -> Any:
    """Draws a run on matplotlib's `Axes`, and returns them. None makes a figure.

    The others are arrays of shape `[steps]`. `lost`: which steps were skipped. `limit`:
    the largest scale at which each step does not overflow. `what` names the public
    method in an error.
    """
    if ax is None:
        ax = pyplot(what).subplots(figsize=(8, 3), layout="constrained")[1]
    steps = len(lost)
    if limit is not None:
        ax.plot(np.arange(steps), limit, color="0.7", label=limit_label)
    if loss_scale is not None and steps:
        # Only the corners are drawn: a million equal values in a row are one line.
        corners = np.flatnonzero(np.diff(loss_scale)) + 1
        x = np.concatenate([[0], corners, [steps]])
        y = np.append(loss_scale[x[:-1]], loss_scale[-1])
        ax.step(x, y, where="post", label="loss scale")
    which = np.flatnonzero(lost)
    label = f"{len(which)} steps lost"
    if len(which) <= _MARKS and loss_scale is not None:
        ax.plot(which, loss_scale[which], "|", color="C3", label=label)
    else:
        edges = np.linspace(0, steps, min(_BINS, max(steps, 1)) + 1)
        per_bin = np.histogram(which, edges)[0]
        share = per_bin / np.maximum(np.histogram(np.arange(steps), edges)[0], 1)
        ax.fill_between(
            edges,
            0,
            _HEIGHT * np.append(share, share[-1]),
            step="post",
            transform=ax.get_xaxis_transform(),  # measured from the bottom
            color="C3",
            alpha=0.5,
            linewidth=0,
            label=f"{label}: up to {np.max(share):.0%} of them at a time",
        )
    if loss_scale is not None or limit is not None:
        ax.set_yscale("log", base=2)
    ax.set_xlabel("step")
    ax.set_ylabel("loss scale")
    ax.legend()
    return ax
