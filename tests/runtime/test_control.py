"""Of two sides of a branch one runs, in a graph and under XLA."""

from __future__ import annotations

import tensorflow as tf

from lossscale.runtime.control import group_ops


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
