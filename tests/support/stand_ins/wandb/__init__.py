"""A stand-in for `wandb`."""

from __future__ import annotations

import contextlib


def init(mode):
    """Begins a run, of which nothing is kept."""
    assert mode == "offline"
    return contextlib.nullcontext()
