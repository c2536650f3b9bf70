"""What tensors are computed from: through operations, branches and functions."""

from __future__ import annotations

import pytest
import tensorflow as tf
from version_1 import running, v1, variable

from lossscale.runtime.ancestry import ancestors_among


@pytest.fixture(params=["session", "session-of-1"])
def a(request):
    """Returns a tensor of a graph that is built."""
    with running(request.param):
        yield tf.constant([1.0, 2.0], name="a")


def test_what_is_computed_from_a_tensor_is_found(a):
    b = tf.constant(3.0)
    branch = tf.cond(b > 2.0, lambda: a + 1.0, lambda: a * 2.0)
    loop = tf.while_loop(lambda i: tf.reduce_sum(i) < 9.0, lambda i: i + a, [a])[0]
    for tensor in (a, tf.reduce_sum(a) * b, branch, loop):
        assert ancestors_among([tensor], [a]) == [a]
        assert ancestors_among([b], [a]) == []
    assert ancestors_among([tf.stack([b, b])], [a, b, b]) == [b]


def test_the_first_on_a_way_is_found_alone(a):
    b = a + 1.0
    assert ancestors_among([b * 2.0], [a, b]) == [b]
    assert ancestors_among([b * 2.0 + a], [a, b]) == [a, b]


def test_a_variable_ends_the_way(a):
    kept = variable([0.0, 0.0])
    with tf.control_dependencies([v1.assign(kept, a)]):
        assert ancestors_among([tf.identity(kept)], [a]) == []


def test_it_is_followed_out_of_a_branch_that_is_built(a):
    found = []

    def inner():
        found.append(ancestors_among([a * 2.0], [a]))
        return a

    def branch():
        found.append(ancestors_among([a + 1.0], [a]))
        return tf.cond(tf.reduce_sum(a) > 1.0, inner, lambda: a)

    tf.cond(tf.reduce_sum(a) > 0.0, branch, lambda: a)
    assert [[each.name for each in one] for one in found] == [[a.name]] * 2


def test_what_is_in_a_loop_that_has_ended_is_not_found(a):
    within = []

    def body(i):
        within.append(i * 2.0)
        assert ancestors_among([within[0] + 1.0], within) == within
        return within[0]

    (out,) = tf.while_loop(lambda i: tf.reduce_sum(i) < 9.0, body, [a])
    if within[0].graph is out.graph:  # as in TensorFlow 1
        assert ancestors_among([out], within) == []
