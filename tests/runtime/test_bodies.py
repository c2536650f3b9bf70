"""A function as TensorFlow keeps it: the same operations as the graph it is made of."""

from __future__ import annotations

import random

import tensorflow as tf

from lossscale.runtime.bodies import Definition, GraphBody, constant_of, definition


@tf.function
def outer(x):
    def body(i, y):
        return i + 1, y * 2.0

    _, y = tf.while_loop(lambda i, _: i < 2, body, (0, x))
    y, z = tf.identity_n([y, y + 1.0])
    return tf.exp(y) * y + tf.function(tf.sin)(z)


def traced():
    concrete = outer.get_concrete_function(tf.TensorSpec([2]))
    return concrete.graph, concrete.function_def


def order_of(body):
    """Returns the keys of the operations' results and inputs, in their order."""
    return [(list(node.outputs), list(node.inputs)) for node in body.nodes()]


def test_each_operation_comes_after_its_inputs_in_whatever_order_they_are_kept():
    _, function = traced()
    for seed in range(20):
        nodes = list(function.node_def)
        random.Random(seed).shuffle(nodes)  # noqa: S311 - nothing secret
        shuffled = type(function)()
        shuffled.CopyFrom(function)
        del shuffled.node_def[:]
        shuffled.node_def.extend(nodes)
        body = Definition(shuffled)
        known = set(body.inputs)
        for outputs, inputs in order_of(body):
            assert set(inputs) <= known
            known.update(outputs)
        assert set(body.outputs) <= known


def test_both_views_have_the_same_operations():
    graph, function = traced()
    in_graph = sorted(
        node.kind for node in GraphBody(graph).nodes() if node.kind != "Placeholder"
    )
    kept = sorted(n.kind for n in Definition(function).nodes() if n.kind != "NoOp")
    assert in_graph == kept


def test_results_of_one_operation_are_told_apart_where_they_may_differ():
    _, function = traced()
    outputs = {n.kind: n.outputs for n in Definition(function).nodes()}
    assert len(outputs["IdentityN"]) == 2
    assert len(outputs["Exp"]) == 1
    loop = outputs.get("StatelessWhile", outputs.get("While"))
    (body,) = [n for n in Definition(function).nodes() if "While" in n.kind]
    assert len(loop) == len(body.inputs)


def test_a_function_that_nobody_knows_is_none():
    assert definition("__inference_of_nobody_1") is None


def test_constants():
    with tf.Graph().as_default():
        assert constant_of(tf.constant([2.0, 2.0]).op) == 2.0
        assert constant_of(tf.constant([2.0, 3.0]).op) is None
        assert constant_of(tf.cast(tf.constant(0), tf.float32).op) == 0.0
        assert constant_of(tf.constant("word").op) is None
        assert constant_of(tf.random.uniform([]).op) is None
