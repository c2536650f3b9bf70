"""Random programs of two optimizers that share a loss scale: right, or told."""

from __future__ import annotations

import pytest
from installed import families
from interleaved import outcome


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 38), marks=pytest.mark.slow)]
)
def test_weights_are_right_or_a_warning_says_that_they_are_not(seeds):
    """If it cannot be known whose gradients were unscaled, that is told: seldom."""
    every = families()
    found = [outcome(every[seed % len(every)], seed) for seed in seeds]
    wrong = [program for what, program in found if what == "wrong, in silence"]
    assert not wrong, "\n".join(wrong)
    needless = [program for what, program in found if what == "right, told"]
    assert len(needless) <= len(seeds) // 15, "\n".join(needless)
