"""When a loss scale was read and applied: which tensor holds its value now."""

from __future__ import annotations

import pytest
import tensorflow as tf
from version_1 import running

from lossscale.optimizer.provenance.timeline import Timeline


def test_a_reading_is_the_last_one_until_an_apply():
    timeline = Timeline()
    with tf.Graph().as_default():
        assert timeline.latest() is None
        assert not timeline.is_read_here()
        first, last = tf.constant(1.0), tf.constant(2.0)
        readings = [timeline.note_reading(each) for each in (first, last)]
        assert timeline.latest() is last
        assert timeline.is_read_here()
        assert all(map(timeline.is_current, readings))
        timeline.note_apply()
        assert timeline.latest() is None
        assert not any(map(timeline.is_current, readings))
        assert timeline.at(readings[0]) is last  # as it was before the apply
        again = timeline.note_reading(tf.constant(3.0))
        assert timeline.is_current(again)
        assert timeline.latest() is again.tensor


def test_an_apply_reads_the_loss_scale_if_no_tensor_holds_it():
    timeline, read = Timeline(), []

    def read_now():
        read.append(tf.constant(4.0))
        return read[-1]

    with tf.Graph().as_default():
        timeline.note_apply(read_now)
        timeline.note_apply(read_now)
        assert len(read) == 1  # before the first: the second may be of the same step


def test_graphs_know_nothing_of_each_other():
    timeline = Timeline()
    with tf.Graph().as_default():
        reading = timeline.note_reading(tf.constant(1.0))
        assert reading.is_visible()
    with tf.Graph().as_default():
        assert not reading.is_visible()
        assert timeline.latest() is None
        assert not timeline.is_read_here()


@pytest.mark.parametrize("mode", ["session", "session-of-1"])
def test_what_was_read_in_a_loop_that_has_ended_is_not_the_latest(mode):
    timeline = Timeline()

    def body(x):
        timeline.note_reading(x * 1.0)
        timeline.note_loss(x, timeline.latest())
        assert timeline.latest() is timeline.last_that_scaled() is not None
        return x + 1.0

    with running(mode):
        tf.while_loop(lambda x: x < 2.0, body, [tf.constant(0.0)])
        assert timeline.latest() is None
        assert timeline.last_that_scaled() is None


def test_what_the_other_branch_applies_changes_nothing_here():
    timeline, current = Timeline(), []

    @tf.function(autograph=False)
    def step(x):
        reading = timeline.note_reading(tf.identity(x))

        def one():
            timeline.note_apply()
            current.append(timeline.is_current(reading))
            return x

        def other():
            current.append(timeline.is_current(reading))
            return x

        found = tf.cond(x > 0.0, one, other)
        current.append(timeline.is_current(reading))
        return found

    step(tf.constant(1.0))
    assert current == [False, True, False]


def test_losses_are_those_since_the_last_apply():
    timeline = Timeline()
    with tf.Graph().as_default():
        assert (timeline.losses(), timeline.last_that_scaled()) == ([], None)
        losses = [tf.constant(float(i)) for i in range(20)]
        scale = tf.constant(8.0)
        for loss in losses:
            timeline.note_loss(loss, scale)
        assert [id(each) for each in timeline.losses()] == list(map(id, losses[-8:]))
        assert timeline.last_that_scaled() is scale
        timeline.note_apply()
        timeline.note_loss(losses[0], scale)
        assert [id(each) for each in timeline.losses()] == [id(losses[0])]


def test_eager_mode_forgets_the_oldest():
    timeline = Timeline()
    for number in range(100):
        timeline.note_reading(tf.constant(float(number)))
    readings = timeline.of(None).readings
    assert len(readings) == 64
    assert float(timeline.latest()) == float(readings[-1].tensor) == 99.0


def test_the_clock_never_stands():
    timeline = Timeline()
    numbers = [timeline.now() for _ in range(3)]
    assert numbers == sorted(set(numbers))
