"""Where a monitor is tested: on one device, and on two."""

import functools

import pytest
from faulty import Faulty
from installed import each_keras, families

#: Every kind of optimizer alone, and one of each Keras on two devices. Quick tests have
#: the first on two.
PLACES = [
    pytest.param(
        (family, where),
        id=f"{family.name}-{where}",
        marks=[pytest.mark.slow] * (number > 0 or where == "alone"),
    )
    for where, every in (("alone", families()), ("mirrored", each_keras()))
    for number, family in enumerate(every)
]


@functools.lru_cache(maxsize=None)
def made(name, strategy=None):
    """Returns one model for all tests: to trace its step is what takes long."""
    family = next(family for family in families() if family.name == name)
    return Faulty(family, strategy)


@pytest.fixture
def faulty(family):
    """A model in which the data decide what goes wrong."""
    return made(family.name).reset()


@pytest.fixture
def anywhere(place):
    """The same on one device, and on two with the fault on the last."""
    family, strategy = place
    return made(family.name, strategy).reset()


@pytest.fixture(params=PLACES)
def place(request):
    family, where = request.param
    return family, request.getfixturevalue(where) if where == "mirrored" else None
