"""What users do to gradients before they apply them: a function at a time.

Each is called with gradients that are still scaled, that were unscaled, and that were
divided by the loss scale by hand. What is applied must be what it makes of the true
gradient, or one warning says that it is not.
"""

from __future__ import annotations

import pytest
from between import FUNCTIONS, degree, names
from between.limits import is_open, needs_no_warning
from between.run import STATES, applied, broken_once_unscaled
from installed import families
from limits import TENSORFLOW

pytestmark = pytest.mark.either_keras2
slow = pytest.mark.slow
#: What is between belongs to TensorFlow: one Keras tries all of it.
FIRST = families()[0]
#: What quick tests try.
SOME = [
    "where(g > 0, 1, -1)",
    "where(g > 0.1, g, 0)",
    "round",
    "g + 0.1 * w",
    "argsort",
]


def offenders(family, state, mode, every):
    """Returns a line for each broken promise, with the functions that break it."""
    outcomes = applied(family, state, mode, every)
    each = {n: one for n, one in outcomes.items() if not is_open(n, state, mode)}
    told = [name for name, one in each.items() if one.warnings]
    lines = {
        "wrong in silence": [
            name for name, one in each.items() if not (one.is_right or one.warnings)
        ],
        "warned of without need": [
            name for name in told if needs_no_warning(name, state, degree(name))
        ],
        "warned of more than once": [n for n in told if each[n].warnings > 1],
    }
    return "\n".join(f"{what}: {', '.join(who)}" for what, who in lines.items() if who)


def test_every_function_is_there():
    missing = sorted(set(FUNCTIONS) - set(names()))
    assert not missing or TENSORFLOW < (2, 21), missing


@slow
@pytest.mark.parametrize(
    ("state", "mode"),
    [("scaled", "graph"), ("by hand", "graph"), ("scaled", "eager")],
)
def test_what_is_applied_is_right_or_told(state, mode):
    found = offenders(FIRST, state, mode, names())
    assert not found, found


def test_some_of_what_is_applied_is_right_or_told(family):
    for state in STATES:
        found = offenders(family, state, "graph", SOME)
        assert not found, found


@slow
def test_unscaled_all_come_out_right_and_no_overflow_is_missed():
    every = [name for name in names() if not is_open(name, "unscaled", "graph")]
    found = broken_once_unscaled(FIRST, every)
    assert not found, found
