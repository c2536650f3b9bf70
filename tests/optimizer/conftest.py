"""Fixtures of the tests of optimizers."""

from __future__ import annotations

import pytest
from exact import Trained, sharing


@pytest.fixture
def trained(family):
    """Returns an optimizer that is built, with its variable."""
    trained = Trained(family)
    trained.build()
    return trained


@pytest.fixture
def pair(family):
    """Returns two of them that share a loss scale."""
    both = sharing(family)
    for each in both:
        each.build()
    return both
