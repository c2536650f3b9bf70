"""Which graph is built, which are in sight, and what is noted of one."""

from __future__ import annotations

import gc
import weakref

import pytest
import tensorflow as tf
from version_1 import running

from lossscale.runtime import graphs


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


def test_notes_end_with_their_graph_and_with_their_owner():
    class Owner:
        """Whoever notes something."""

    owner, other, graph = Owner(), Owner(), tf.Graph()
    notes = graphs.notes_of(graph, owner, set)
    notes.add("something")
    assert graphs.notes_of(graph, owner, set) is notes
    assert graphs.notes_of(graph, other, set) == set()
    assert graphs.notes_of(tf.Graph(), owner, set) == set()
    kept = weakref.ref(notes)
    del notes, owner
    gc.collect()
    assert kept() is None
