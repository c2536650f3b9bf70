"""When a loss scale was read and applied: which tensor holds its value now."""

from __future__ import annotations

import pytest
import tensorflow as tf
from version_1 import running

from lossscale import DynamicLossScale
from lossscale.optimizer.provenance.events import Read
from lossscale.optimizer.provenance.history import History


@pytest.fixture
def history():
    """A history of a loss scale that nobody else reads."""
    loss_scale = DynamicLossScale(8.0)
    history = History(loss_scale)
    yield history
    del loss_scale


def read(history, tensor):
    """Notes a tensor of the loss scale, and returns the event."""
    history.note_read(tensor)
    graph = getattr(tensor, "graph", None)
    return history.events(graph)[-1]


def test_a_reading_is_the_last_one_until_an_apply(history):
    with tf.Graph().as_default():
        assert history.latest() is None
        assert not history.is_read_here()
        first, last = tf.constant(1.0), tf.constant(2.0)
        events = [read(history, each) for each in (first, last)]
        assert history.latest() is last
        assert history.is_read_here()
        assert all(map(history.is_current, events))
        history.note_apply()
        assert history.latest() is None
        assert not any(map(history.is_current, events))
        assert history.at(events[0]) is last  # as it was before the apply
        again = read(history, tf.constant(3.0))
        assert history.is_current(again)
        assert history.latest() is again.tensor


def test_an_apply_reads_the_loss_scale_if_no_tensor_holds_it(history):
    found = []

    def read_now():
        found.append(tf.constant(4.0))
        return found[-1]

    with tf.Graph().as_default():
        history.note_apply(read_now)
        history.note_apply(read_now)
        assert len(found) == 1  # before the first: the second may be of the same step


def test_graphs_know_nothing_of_each_other(history):
    with tf.Graph().as_default():
        event = read(history, tf.constant(1.0))
        assert event.is_visible()
    with tf.Graph().as_default():
        assert not event.is_visible()
        assert history.latest() is None
        assert not history.is_read_here()


@pytest.mark.parametrize("mode", ["session", "session-of-1"])
def test_what_was_read_in_a_loop_that_has_ended_is_not_the_latest(history, mode):

    def body(x):
        read(history, x * 1.0)
        history.note_loss(x, history.latest())
        assert history.latest() is history.last_that_scaled() is not None
        return x + 1.0

    with running(mode):
        tf.while_loop(lambda x: x < 2.0, body, [tf.constant(0.0)])
        assert history.latest() is None
        assert history.last_that_scaled() is None


def test_what_the_other_branch_applies_changes_nothing_here(history):
    current = []

    @tf.function(autograph=False)
    def step(x):
        event = read(history, tf.identity(x))

        def one():
            history.note_apply()
            current.append(history.is_current(event))
            return x

        def other():
            current.append(history.is_current(event))
            return x

        found = tf.cond(x > 0.0, one, other)
        current.append(history.is_current(event))
        return found

    step(tf.constant(1.0))
    assert current == [False, True, False]


def test_losses_are_those_since_the_last_apply(history):
    with tf.Graph().as_default():
        assert (history.losses(), history.last_that_scaled()) == ([], None)
        losses = [tf.constant(float(i)) for i in range(20)]
        scale = tf.constant(8.0)
        for loss in losses:
            history.note_loss(loss, scale)
        assert [id(each) for each in history.losses()] == list(map(id, losses[-8:]))
        assert history.last_that_scaled() is scale
        history.note_apply()
        history.note_loss(losses[0], scale)
        assert [id(each) for each in history.losses()] == [id(losses[0])]


def test_eager_mode_forgets_the_oldest(history):
    for number in range(1000):
        read(history, tf.constant(float(number)))
    events = [e for e in history.events(None) if isinstance(e, Read)]
    assert len(events) == 256
    assert float(history.latest()) == float(events[-1].tensor) == 999.0


def test_the_clock_never_stands(history):
    numbers = [history.now() for _ in range(3)]
    assert numbers == sorted(set(numbers))
