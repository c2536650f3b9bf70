"""A function as TensorFlow keeps it: the same operations as the graph it is made of."""

from __future__ import annotations

import random

import tensorflow as tf

from lossscale.runtime.bodies import (
    Definition,
    GraphBody,
    definition,
    value_of,
    width_of,
)


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
        assert value_of(tf.constant([2.0, 3.0]).op).tolist() == [2.0, 3.0]
        assert value_of(tf.cast(tf.constant(0), tf.float32).op).tolist() == 0.0
        assert value_of(tf.constant(0.5, tf.bfloat16).op).tolist() == 0.5
        assert value_of(tf.constant("word").op) is None
        assert value_of(tf.random.uniform([]).op) is None


def test_the_size_of_the_last_axis():
    assert width_of(tf.zeros([2, 3])) == 3
    assert width_of(tf.zeros([])) is None
    with tf.Graph().as_default():
        unknown = tf.compat.v1.placeholder(tf.float32, None)
        assert width_of(unknown) is None


@tf.function
def several(x):
    singular, left, _ = tf.linalg.svd(x)
    values, positions = tf.math.top_k(x)
    return singular, left, values, tf.cast(positions, tf.float32)


def test_each_result_of_an_operation_has_a_key_of_its_own():
    function = several.get_concrete_function(tf.TensorSpec([2, 2])).function_def
    outputs = {n.kind: n.outputs for n in Definition(function).nodes()}
    assert len(set(outputs["Svd"])) == 3
    assert len(set(outputs["TopKV2"])) == 2
    used = {name for n in Definition(function).nodes() for name in n.inputs}
    assert used & {*outputs["Svd"]}


def test_casts_are_told_apart():
    @tf.function
    def casts(x):
        return [tf.cast(x, dtype) for dtype in (tf.float16, tf.int32, tf.bool)]

    concrete = casts.get_concrete_function(tf.TensorSpec([2]))
    expected = {"Cast", "CastToCounts", "CastToBool"}
    for body in (GraphBody(concrete.graph), Definition(concrete.function_def)):
        assert {n.kind for n in body.nodes() if "Cast" in n.kind} == expected
