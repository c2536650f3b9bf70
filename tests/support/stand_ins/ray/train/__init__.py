"""A stand-in for `ray.train`."""

from __future__ import annotations

from typing import NamedTuple


class ScalingConfig(NamedTuple):
    """How many workers are wanted."""

    num_workers: int = 1
    use_gpu: bool = False
