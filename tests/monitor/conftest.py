"""Where a monitor is tested: on one device, and on two."""

from __future__ import annotations

import pytest
from installed import each_keras, families

#: Every kind of optimizer alone, and one of each Keras on two devices.
PLACES = [(family, "alone") for family in families()]
PLACES += [(family, "mirrored") for family in each_keras()]


@pytest.fixture(params=PLACES, ids=[f"{each.name}-{where}" for each, where in PLACES])
def place(request):
    """A Keras, and no strategy or two replicas."""
    family, where = request.param
    return family, request.getfixturevalue(where) if where == "mirrored" else None
