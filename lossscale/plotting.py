"""matplotlib, for what can be drawn: it need not be installed."""

from __future__ import annotations

from typing import Any


def pyplot(what: str) -> Any:
    """Returns `matplotlib.pyplot`, which `what` needs.

    Raises:
      ImportError: It is not installed.
    """
    try:
        import matplotlib.pyplot as plt  # noqa: PLC0415 - only who plots needs it
    except ImportError as error:
        raise ImportError(
            f"`{what}` needs matplotlib, which is not installed. "
            "Run `pip install matplotlib`."
        ) from error
    return plt
