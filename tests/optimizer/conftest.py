"""Fixtures of the tests of optimizers."""

from __future__ import annotations

import pytest
from exact import Trained


@pytest.fixture
def trained(family):
    """Returns an optimizer that is built, with its variable."""
    trained = Trained(family)
    trained.build()
    return trained
