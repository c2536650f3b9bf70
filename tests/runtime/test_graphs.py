"""Which graph is built, and which are in sight."""

import pytest
import tensorflow as tf
from version_1 import running

from lossscale.runtime import graphs


def test_a_branch_and_a_loop_see_what_is_around_them_and_a_function_does_not():
    seen = {}

    def note(name, x):
        visible = [id(each) for each in graphs.visible_graphs()]
        seen[name] = id(graphs.current_graph()), visible
        return x

    inner = tf.function(lambda x: note("inner", x), autograph=False)

    @tf.function(autograph=False)
    def outer(x):
        note("outer", x)
        tf.while_loop(lambda x: x < 2.0, lambda x: (note("loop", x) + 1.0,), (x,))
        return inner(tf.cond(x > 0.0, lambda: note("branch", x), lambda: x))

    outer(tf.constant(1.0))
    around = seen["outer"][0]
    assert seen["outer"][1] == [around]
    for name in ("branch", "loop"):
        own, found = seen[name]
        assert found == [own, around]
    own, found = seen["inner"]
    assert found == [own]


@pytest.mark.parametrize("mode", ["function", "session", "session-of-1"])
def test_what_is_in_a_loop_or_a_branch_that_has_ended_is_not_visible(mode):
    """Those of TensorFlow 1 have no graph of their own."""
    inside, told = [], []

    def double(x):
        inside.append(x * 2.0)
        told.append((graphs.is_visible(x), graphs.is_nested()))
        told.append((graphs.is_visible(inside[-1]), graphs.is_nested()))
        return inside[-1]

    def step(fed):
        around = fed + 1.0

        def body(x):
            told.append((graphs.is_visible(around), graphs.is_nested()))
            return double(x)

        (found,) = tf.while_loop(lambda x: x < 9.0, body, [around])
        tf.cond(found > 0.0, lambda: double(around), lambda: around)
        assert set(told) == {(True, True)}
        assert not any(map(graphs.is_visible, inside))
        assert graphs.is_visible(found)
        assert mode == "function" or not graphs.is_nested()
        return found

    with running(mode) as run:
        run.step(step)(1.0)
    assert len(inside) >= 2


def test_the_branches_of_one_fork_are_known_while_they_are_built():
    found = []

    def note(x):
        found.append(graphs.branches_here())
        return x

    @tf.function(autograph=False)
    def step(x):
        assert graphs.branches_here() == {}
        tf.cond(x > 0.0, lambda: note(x), lambda: note(x))
        return tf.cond(x > 0.0, lambda: note(x), lambda: note(note(x)))

    step(tf.constant(1.0))
    (one, other, first, second, again) = (next(iter(each.items())) for each in found)
    assert one[0] == other[0] != first[0] == second[0] == again[0]
    assert len({id(branch) for _, branch in (one, other, first, second)}) == 4
    assert second[1] is again[1]


def test_arguments_alone():
    variable, outside, told = tf.Variable(2.0), tf.random.uniform([1000]), []

    @tf.function(autograph=False)
    def step(x):
        for factor in (3.0, tf.convert_to_tensor(variable), outside):
            computed = x * factor
            told.append(graphs.are_arguments([None, computed, tf.exp(computed)]))
        return x

    step(tf.constant(1.0))
    assert told == [True, False, False]  # a variable is none, and what is captured
    assert not graphs.are_arguments([])
    assert not graphs.are_arguments([tf.constant(1.0)])
