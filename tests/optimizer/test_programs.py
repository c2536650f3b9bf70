"""Random training loops, against what they mean.

A program is drawn, run by TensorFlow, and read by plain Python: weights, loss scales
and what was logged must be equal to the last bit. One that fails is printed as Python.

The programs are the same in every run. For 1000 others of each Keras, in each mode:

    LOSSSCALE_PROGRAMS=1000 pytest -m slow -n 0 tests/optimizer/test_programs.py
"""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter

import pytest
from hypothesis import HealthCheck, assume, given, settings
from program_drawing import programs
from program_meaning import Inexact, Open, meaning
from program_run import run

from lossscale import LossScaleWarning

#: How many programs to explore. 0: those of every run.
EXPLORED = int(os.environ.get("LOSSSCALE_PROGRAMS", "0"))
PROGRAMS = EXPLORED or 12

pytestmark = pytest.mark.slow


def judge(program, family, mode):
    """Asserts that a program does what it means, and returns how it was judged."""
    try:
        states, logs = meaning(program, mode)
    except (Inexact, Open):
        return "no meaning"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found_states, found_logs = run(program, family, mode)
    has_warned = any(issubclass(w.category, LossScaleWarning) for w in caught)
    assert not has_warned, "there was a warning"
    expected = states, _comparable(logs)
    got = found_states, _comparable(found_logs)
    assert got == expected, f"{program!r}\nexpected {expected}\ngot      {got}"
    return "right"


def _comparable(logs):
    """Returns logs in which all that is not finite is the same."""
    return [[x if math.isfinite(x) else None for x in each] for each in logs]


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_every_program_does_what_it_means(family, mode):
    judged = Counter()

    @settings(
        max_examples=PROGRAMS,
        deadline=None,
        derandomize=not EXPLORED,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs())
    def each(program):
        verdict = judge(program, family, mode)
        judged[verdict] += 1
        assume(verdict != "no meaning")

    each()
    assert judged["right"] >= PROGRAMS
