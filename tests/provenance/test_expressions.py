"""The kind of each expression that users write between gradients and apply.

The table in `between.py` says it. That the table is right is seen by the numbers: a
scaled value of a gradient that is S times larger is S times larger, and so on.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from between import GRADIENT, NOT_SEEN, TABLE, WEIGHT, bare, call, rows

from lossscale.provenance.kinds import SCALED, UNSCALED, Kind
from lossscale.provenance.walk import Kinds

S = 2.0**10
#: What a gradient that is S times larger makes a value of these kinds larger by.
TIMES = {"scaled": S, "unscaled": 1.0, "squared": S**2, "inverse": 1 / S, "number": 1.0}


def kinds_of(expressions, made_of):
    """Returns the kinds of values of a gradient, as a walk over one graph says them."""
    found = {}

    @tf.function(autograph=False)
    def program(gradient, weight):
        for expression in expressions:
            kinds, g = Kinds(None), tf.identity(gradient)
            kinds.note(g, Kind(made_of))
            (kind,) = kinds.of([call(expression, g, weight)])
            found[expression] = "number" if kind is None else kind.name

    program.get_concrete_function(tf.constant(GRADIENT), tf.constant(WEIGHT))
    return found


def test_each_expression_makes_of_a_scaled_gradient_what_the_table_says():
    table = {**rows(TABLE), **rows(NOT_SEEN)}
    assert kinds_of(table, SCALED) == table


def test_of_an_unscaled_gradient_nothing_is_scaled_or_changed():
    table = rows(TABLE)
    kinds = set(kinds_of(table, UNSCALED).values())
    assert kinds == {"unscaled", "unknown", "number"}


@pytest.mark.parametrize("kind", TIMES)
def test_the_table_says_what_is_so(kind):
    for expression, its_kind in rows(TABLE).items():
        if its_kind == kind:
            once, larger = bare(expression, GRADIENT), bare(expression, GRADIENT * S)
            wanted = once * np.float32(TIMES[kind])
            np.testing.assert_allclose(larger, wanted, 2e-3, err_msg=expression)
