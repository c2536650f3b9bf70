"""Random programs of two optimizers that share a loss scale: right, or told."""

from __future__ import annotations

import pytest
from installed import families
from interleaved import offence


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 38), marks=pytest.mark.slow)]
)
def test_weights_are_right_or_a_warning_says_that_they_are_not(seeds):
    every = families()
    found = [offence(every[seed % len(every)], seed) for seed in seeds]
    assert not any(found), "\n".join(filter(None, found))
