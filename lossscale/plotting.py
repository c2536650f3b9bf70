"""For display: matplotlib, if it is installed, and a loss scale as text."""

from __future__ import annotations

import math
from typing import Any


def pyplot() -> Any:
    """Returns `matplotlib.pyplot`, or an ImportError says what to install."""
    try:
        import matplotlib.pyplot as plt  # noqa: PLC0415 - only plots need it
    except ImportError as error:
        raise ImportError(
            "A picture needs matplotlib, which is not installed. "
            "Run `pip install matplotlib`."
        ) from error
    return plt


def scale_text(loss_scale: float) -> str:
    """Returns a loss scale as readable text: "2**15" rather than "32768.0".

    >>> [scale_text(scale) for scale in (2.0**15, 1000.0, 8.0, 0.25)]
    ['2**15', '1000', '8', '2**-2']
    """
    significand, exponent = math.frexp(loss_scale)
    is_easily_read = 0 <= exponent - 1 < 10
    if significand != 0.5 or is_easily_read:
        return f"{loss_scale:g}"
    return f"2**{exponent - 1}"


def power_text(largest: float) -> str:
    """Returns a magnitude as a power of two with one digit.

    >>> power_text(61000.0), power_text(0.0)
    ('2**15.9', '0')
    """
    return f"2**{math.log2(largest):.1f}" if largest > 0 else "0"
