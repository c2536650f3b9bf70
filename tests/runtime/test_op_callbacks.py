"""Who is told of eager mode's operations, and until when."""

from __future__ import annotations

import gc
import threading

import pytest
import tensorflow as tf

from lossscale.runtime import op_callbacks


@pytest.fixture(autouse=True)
def _nobody_else(monkeypatch):
    """Leaves out the listeners of tests before, and ends what they were told by."""
    monkeypatch.setattr(op_callbacks, "_listening", [])
    tf.sqrt(tf.constant(1.0))


class Listener:
    """Keeps the kinds of so many operations."""

    def __init__(self, wanted=100):
        self.wanted = wanted
        self.heard = []

    def note_op(self, kind, inputs, outputs):
        self.heard.append((kind, len(inputs), len(outputs)))
        return len(self.heard) < self.wanted


def kinds(listener):
    return [kind for kind, *_ in listener.heard if kind not in ("Const", "Cast")]


def test_operations_and_functions_are_told():
    one = tf.constant(1.0)
    function = tf.function(tf.exp).get_concrete_function(tf.TensorSpec([]))
    listener = Listener()
    op_callbacks.add(listener)
    op_callbacks.add(listener)  # once is enough
    tf.multiply(one, tf.sqrt(one))
    function(one)
    names = kinds(listener)
    assert names[:2] == ["Sqrt", "Mul"]
    assert names[2].startswith("__inference_exp")
    assert ("Mul", 2, 1) in listener.heard


def test_what_a_graph_is_built_of_is_not_told():
    listener = Listener()
    op_callbacks.add(listener)
    tf.function(tf.sin).get_concrete_function(tf.TensorSpec([]))
    assert "Sin" not in kinds(listener)


def test_it_ends_when_nobody_wants_more():
    one = tf.constant(1.0)
    many, few = Listener(), Listener(wanted=1)
    op_callbacks.add(many)
    op_callbacks.add(few)
    tf.sqrt(one)
    assert op_callbacks.is_telling()
    many.wanted = 0
    tf.sqrt(one)
    assert not op_callbacks.is_telling()
    told = len(many.heard)
    tf.sqrt(one)
    assert len(many.heard) == told
    op_callbacks.add(many)
    tf.sqrt(one)
    assert len(many.heard) == told + 1


def test_who_is_gone_is_told_of_nothing():
    listener = Listener()
    op_callbacks.add(listener)
    del listener
    gc.collect()
    tf.sqrt(tf.constant(1.0))
    tf.sqrt(tf.constant(1.0))
    assert not op_callbacks.is_telling()


def test_a_thread_is_told_for_itself():
    listener = Listener()
    op_callbacks.add(listener)
    told = []
    thread = threading.Thread(target=lambda: told.append(op_callbacks.is_telling()))
    thread.start()
    thread.join()
    assert told == [False]
    assert op_callbacks.is_telling()
