"""Of two sides of a branch one runs, in a graph and under XLA."""

from __future__ import annotations

import pytest
import tensorflow as tf

from lossscale.runtime.control import either
from lossscale.runtime.mode import COMPILED_BY_XLA


@pytest.mark.parametrize("jit_compile", [False, True])
def test_one_side_of_the_branch_runs_once(jit_compile):
    count, other = tf.Variable(0.0), tf.Variable(0.0)

    def add(variable):
        variable.assign_add(1.0)
        return tf.constant(True)

    @tf.function(autograph=False, **(COMPILED_BY_XLA if jit_compile else {}))
    def step(condition):
        either(condition, lambda: add(count), lambda: add(other))

    step(tf.constant(True))
    assert (float(count), float(other)) == (1.0, 0.0)
    step(tf.constant(False))
    assert (float(count), float(other)) == (1.0, 1.0)
