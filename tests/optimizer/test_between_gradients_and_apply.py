"""What users do to gradients before they apply them: a function at a time.

Each is called with gradients that are still scaled, that were unscaled, and that were
divided by the loss scale by hand. What is applied must be what it makes of the true
gradient, or one warning says that it is not.
"""

from __future__ import annotations

import pytest
from between import FUNCTIONS, degree, names
from between.limits import (
    BESIDE,
    BODIES,
    BOUNDS,
    BRANCHES,
    CHOICES,
    FLAGS,
    MATRICES,
    NUMBERS,
    OPAQUE,
    TAKES_INFINITIES_OUT,
    known_to_be_missed,
)
from between.run import STATES, applied, hiding, missed_together, one_by_one
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


def offenders(outcomes, state, mode):
    """Returns a line for each broken promise, with the functions that break it."""
    free = NUMBERS | (BRANCHES if mode == "eager" else set())
    if state != "unscaled":
        free = free | BODIES | MATRICES | BESIDE
    each = {name: one for name, one in outcomes.items() if name not in free}
    told = [name for name, one in each.items() if one.warnings]
    wrong = [name for name, one in each.items() if not (one.is_right or one.warnings)]
    needless = [name for name in told if is_needless(name, state)]
    twice = [name for name in told if len(each[name].warnings) > 1]
    lines = {
        "wrong in silence": wrong,
        "warned of without need": needless,
        "warned of more than once": twice,
    }
    return "\n".join(f"{what}: {listed(who)}" for what, who in lines.items() if who)


def listed(every):
    return ", ".join(sorted(every))


def is_needless(name, state):
    """Tells whether nothing is to be said of a function."""
    if state == "unscaled":
        return True
    if name in OPAQUE:
        return False
    return state == "by hand" or degree(name) in (0.0, 1.0)


def test_every_function_is_there():
    missing = sorted(set(FUNCTIONS) - set(names()))
    assert not missing or TENSORFLOW < (2, 21), missing


@slow
@pytest.mark.parametrize(
    ("state", "mode"), [*((state, "graph") for state in STATES), ("scaled", "eager")]
)
def test_what_is_applied_is_right_or_told(state, mode):
    found = offenders(applied(FIRST, state, mode), state, mode)
    assert not found, found


def test_some_of_what_is_applied_is_right_or_told(family):
    for state in STATES:
        found = offenders(applied(family, state, "graph", SOME), state, "graph")
        assert not found, found


@slow
def test_no_overflow_is_missed_once_unscaled():
    missed = {*missed_together(FIRST, "graph", hiding())}
    missed -= known_to_be_missed("unscaled", "graph")
    assert not missed, listed(missed)


@slow
def test_which_overflows_are_missed_in_silence():
    every = sorted({*hiding(), *TAKES_INFINITIES_OUT} & {*names()})
    outcomes = one_by_one(FIRST, "scaled", "eager", every)
    missed = {n for n, each in outcomes.items() if each.missed and not each.warnings}
    missed -= known_to_be_missed("scaled", "eager")
    assert not missed, listed(missed)


def test_what_is_known_to_be_missed_has_its_reason():
    """A list that names too much would say nothing."""
    assert {degree(name) for name in FLAGS & set(names())} == {0.0}
    assert {degree(name) for name in CHOICES & set(names())} == {1.0}
    missing = {*FUNCTIONS} - {*names()}
    assert {*hiding()} | missing >= FLAGS | CHOICES | BOUNDS
