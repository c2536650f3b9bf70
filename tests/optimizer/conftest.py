"""Fixtures of the tests of optimizers."""

import pytest
from exact import Trained, sharing


@pytest.fixture
def trained(family):
    """Returns an optimizer and its variable."""
    return Trained(family)


@pytest.fixture
def pair(family):
    """Returns two of them that share a loss scale."""
    return sharing(family)
