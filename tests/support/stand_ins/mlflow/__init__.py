"""A stand-in for `mlflow`."""

from __future__ import annotations

import contextlib


def set_tracking_uri(uri):
    """Keeps nothing."""
    del uri


def start_run():
    """Begins a run, of which nothing is kept."""
    return contextlib.nullcontext()
