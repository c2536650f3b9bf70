"""Of two sides of a branch one runs, in a graph and under XLA."""

from __future__ import annotations

import pytest
import tensorflow as tf

from lossscale.runtime.control import either, group_ops
from lossscale.runtime.mode import COMPILED_BY_XLA


def test_a_group_runs_what_each_replica_did():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        counts = [tf.compat.v1.Variable(0.0) for _ in range(2)]

        def on_replica():
            context = tf.distribute.get_replica_context()
            number = int(tf.get_static_value(context.replica_id_in_sync_group))
            return counts[number].assign_add(1.0).op

        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            op = group_ops([strategy.run(on_replica)])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(op)
        assert session.run(counts) == [1.0, 1.0]


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
