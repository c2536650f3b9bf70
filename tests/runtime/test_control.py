"""Of two sides of a branch one runs, in a graph and under XLA."""

import inspect

import tensorflow as tf
from predicates import nodes_run

from lossscale.runtime import control
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


def test_select_takes_scalars_and_many_states():
    one, other = tf.constant(1, tf.int64), tf.constant(2, tf.int64)
    assert int(control.select(tf.constant(False), one, other)) == 2
    flags = tf.constant([True, False])
    assert control.select(flags, one, other).numpy().tolist() == [1, 2]

    @tf.function
    def traced(flag):
        return control.select(flag, one, other)

    graph = traced.get_concrete_function(tf.TensorSpec([], tf.bool)).graph
    assert "Select" in {operation.type for operation in graph.get_operations()}


def test_what_is_not_inlined_is_one_operation_and_runs_at_each_call():
    count = tf.Variable(0)

    def body():
        for _ in range(5):
            count.assign_add(1)

    @tf.function
    def traced(flag):
        return control.run_either(flag, list, lambda: control.not_inlined(body))

    # TensorFlow reports a graph when it first runs it.
    run = nodes_run(traced, tf.constant(True))
    if "experimental_attributes" in inspect.signature(tf.function).parameters:
        assert run
        assert not any(node.op == "AssignAddVariableOp" for node in run)
    for flag in (False, True, False):
        traced(tf.constant(flag))
    assert count.numpy() == 10
    control.not_inlined(body)
    assert count.numpy() == 15
