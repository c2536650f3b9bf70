"""Gradients that were unscaled: what is known of them when they are applied."""

from __future__ import annotations

import tensorflow as tf

from lossscale.gradients.check import CLEAN, Check
from lossscale.optimizer.provenance.events import (
    Unscale,
    before_division,
    earlier_check,
)

INF = float("inf")


def check(is_finite, *worst, largest=None):
    return Check(tf.constant(is_finite), None, lambda: tf.constant(worst), largest)


def unscaled(*values, is_finite=True, known=None):
    """Returns gradients, what they were, and their unscaling."""
    grads = [None if value is None else tf.constant(value) for value in values]
    pairs = [(None if g is None else g * 8.0, tf.constant(8.0)) for g in grads]
    found = known or check(is_finite, *[0.0 if is_finite else INF] * len(grads))
    return grads, pairs, Unscale(1, grads, found, pairs)


def test_in_a_graph_it_is_known_what_they_were():
    with tf.Graph().as_default():
        grads, pairs, unscaling = unscaled(1.0, None, 2.0)
        assert unscaling.count == 3
        assert unscaling.are_all_in(grads)
        assert not unscaling.are_all_in(grads[:2])
        scaled, divisors = before_division([unscaling], grads)
        assert scaled[1] is divisors[1] is None
        assert [id(each) for each in scaled[::2]] == [id(x) for x, _ in pairs[::2]]
        assert [id(each) for each in divisors[::2]] == [id(by) for _, by in pairs[::2]]
        assert before_division([unscaling], [*grads, tf.constant(1.0)]) is None
    with tf.Graph().as_default():  # out of sight
        assert not unscaling.is_visible()
        assert before_division([unscaling], grads) is None


def test_eagerly_nothing_is_kept():
    grads, _, unscaling = unscaled(1.0, 2.0)
    assert unscaling.is_visible()
    assert before_division([unscaling], grads) is None


def test_of_no_list_nothing_is_known():
    assert earlier_check([], [tf.constant(1.0)]) is CLEAN


def test_of_one_list_it_is_its_check():
    grads, _, unscaling = unscaled(1.0, 2.0, is_finite=False)
    found = earlier_check([unscaling], grads)
    assert not bool(found.exact())
    assert found.worst_of(2).numpy().tolist() == [INF, INF]


def test_of_several_lists_all_must_be_finite():
    (grad,), _, good = unscaled(1.0, known=check(True, 0.0, largest=tf.constant(2.0)))
    _, _, bad = unscaled(1.0, known=check(False, INF, largest=tf.constant(5.0)))
    for unscalings, exact in (([good, good], True), ([good, bad], False)):
        found = earlier_check(unscalings, [grad, grad, grad])
        assert bool(found.exact()) is exact
        assert float(found.largest) == (2.0 if exact else 5.0)
        # Which of these three is at fault is not known.
        assert found.worst_of(3).numpy().tolist() == [0.0, 0.0, 0.0]


def test_divided_and_not_checked():
    grads, _, unscaling = unscaled(1.0, known=CLEAN)
    assert not unscaling.was_checked
    assert earlier_check([unscaling], grads).is_clean
    assert earlier_check([unscaling] * 2, grads) == CLEAN
    assert unscaled(1.0)[2].was_checked
