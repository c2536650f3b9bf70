"""The kinds of what loops, branches and functions return, as a walk over a graph says.

`test_kinds.py` has straight-line programs, in graphs and in eager mode.
"""

from __future__ import annotations

import pytest
import tensorflow as tf

from lossscale.provenance.kinds import CHANGED, SCALED, UNKNOWN, UNSCALED, Kind
from lossscale.provenance.walk import Kinds

pytestmark = pytest.mark.smoke


def turns(body, first):
    """Returns what a value is after a few turns of a loop."""
    _, value = tf.while_loop(
        lambda i, _: i < 3, lambda i, value: (i + 1, body(value)), (0, first)
    )
    return value


def last_but(gradient):
    """Returns a gradient after a loop that ends by what it is compared with."""
    return tf.while_loop(
        lambda g: tf.reduce_max(g) > 1.0, lambda g: (g * 0.5,), (gradient,)
    )[0]


@pytest.mark.parametrize(
    ("make", "of_scaled", "of_unscaled"),
    [
        (lambda g: turns(lambda v: v * 0.5, g), SCALED, UNSCALED),
        (lambda g: turns(lambda v: v + g, tf.zeros_like(g)), SCALED, UNSCALED),
        (lambda g: turns(lambda v: tf.minimum(v, 1.0), g), CHANGED, UNSCALED),
        (last_but, CHANGED, UNSCALED),
        (
            lambda g: tf.cond(g[0] > 0.0, lambda: g, lambda: g * 2.0),
            SCALED,
            UNSCALED,
        ),
        (tf.function(lambda g: g * 2.0), SCALED, UNSCALED),
        (lambda g: tf.py_function(lambda v: v, [g], g.dtype), UNKNOWN, UNKNOWN),
    ],
    ids=["halved", "added up", "bounded", "compared", "cond", "call", "py"],
)
def test_what_a_body_returns_has_the_kind_that_its_operations_make(
    make, of_scaled, of_unscaled
):
    found = []

    @tf.function(autograph=False)
    def program(value):
        for name in (SCALED, UNSCALED):
            kinds, gradient = Kinds(None), tf.identity(value)
            kinds.note(gradient, Kind(name))
            (kind,) = kinds.of([make(gradient)])
            found.append(kind.name)

    program(tf.constant([0.5, 2.0]))
    assert found == [of_scaled, of_unscaled]
