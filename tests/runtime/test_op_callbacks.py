"""Who is told of eager mode's operations, and until when."""

import gc
import threading

import tensorflow as tf

from lossscale.runtime import op_callbacks


class Listener:
    """Keeps the kinds of so many operations."""

    def __init__(self, wanted=100):
        self.wanted = wanted
        self.heard = []

    def note_op(self, kind, inputs, outputs):
        del inputs, outputs
        self.heard.append(kind)
        return len(self.heard) < self.wanted


def test_it_ends_when_nobody_wants_more():
    one = tf.constant(1.0)
    many, few = Listener(), Listener(wanted=1)
    op_callbacks.add(many)
    op_callbacks.add(few)
    tf.function(tf.sin).get_concrete_function(tf.TensorSpec([]))
    tf.sqrt(one)
    assert "Sqrt" in many.heard
    assert "Sin" not in many.heard  # of which a graph was built
    assert op_callbacks.is_notifying()
    many.wanted = 0
    tf.sqrt(one)
    assert not op_callbacks.is_notifying()
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
    assert not op_callbacks.is_notifying()


def test_a_thread_is_told_for_itself():
    listener = Listener()
    op_callbacks.add(listener)
    told = []
    thread = threading.Thread(target=lambda: told.append(op_callbacks.is_notifying()))
    thread.start()
    thread.join()
    assert told == [False]
    assert op_callbacks.is_notifying()
