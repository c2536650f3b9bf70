"""Of two sides of a branch one runs, in a graph and under XLA."""

from __future__ import annotations

import pytest
import tensorflow as tf
from predicates import nodes_run

from lossscale.runtime.control import either, rarely
from lossscale.runtime.mode import COMPILED_BY_XLA, NOT_INLINED


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


@pytest.mark.skipif(NOT_INLINED is None, reason="this TensorFlow inlines all")
def test_the_side_that_is_seldom_taken_is_one_node():
    count = tf.Variable(0.0)

    def good():
        return tf.constant(True)

    def bad():
        for _ in range(50):
            count.assign_add(1.0)
        return tf.constant(False)

    def nodes(side):
        step = tf.function(lambda ok: either(ok, good, side()), autograph=False)
        found = nodes_run(step, tf.constant(True))
        assert bool(step(tf.constant(True)))
        assert not bool(step(tf.constant(False)))
        return len(found)

    assert nodes(lambda: rarely(bad)) < 50 < nodes(lambda: bad)
    assert float(count) == 100.0
