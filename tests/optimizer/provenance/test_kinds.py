"""What a gradient is, by the exponents that it may have."""

from __future__ import annotations

import pytest
import tensorflow as tf

from lossscale.optimizer.provenance.kinds import (
    Kind,
    hides,
    is_free,
    is_unseen,
    is_zero,
    kind_of,
)
from lossscale.units.unit import FREE, KEPT, UNKNOWN, ZERO, Unit


class Unscaling:
    """Gradients that were unscaled somewhere."""

    def __init__(self, shows, visible):
        self.shows, self.visible = shows, visible
        self.was_checked = True

    def is_visible(self):
        return self.visible


@pytest.mark.parametrize(
    ("low", "high", "kind"),
    [
        (1.0, 1.0, Kind.SCALED),
        (0.0, 0.0, Kind.UNSCALED),
        (0.0, 1.0, Kind.UNSURE),
        (-8.0, 8.0, Kind.UNSURE),
        (0.5, 1.5, Kind.SCALED),
        (-1.0, 0.5, Kind.UNSCALED),
        (2.0, 2.0, Kind.WRONG),
        (-1.0, -1.0, Kind.WRONG),
        (0.5, 0.5, Kind.WRONG),
    ],
)
def test_by_exponents(low, high, kind):
    for is_read_here in (False, True):
        assert kind_of(Unit(low, high), is_read_here) is kind


def test_nothing_is_known_of_a_zero_or_of_what_came_from_elsewhere():
    for is_read_here in (False, True):
        assert kind_of(UNKNOWN, is_read_here) is Kind.UNKNOWN
        assert kind_of(ZERO, is_read_here) is Kind.UNKNOWN


def test_weights_alone_tell_only_where_the_loss_scale_was_read():
    assert kind_of(KEPT, is_read_here=False) is Kind.UNKNOWN
    assert kind_of(KEPT, is_read_here=True) is Kind.UNSCALED
    unscaled = KEPT._replace(checks=frozenset(["an unscaling"]))
    assert kind_of(unscaled, is_read_here=False) is Kind.UNSCALED


def test_what_needs_no_division():
    assert is_free(FREE)
    assert not is_free(KEPT)  # the loss of weights' gradients may have been scaled
    assert not is_free(Unit(1.0, 1.0))
    assert not is_free(UNKNOWN)


def test_zeros():
    assert is_zero(None, UNKNOWN)
    assert is_zero(tf.ones([2]), ZERO)
    assert is_zero(tf.zeros([2]), UNKNOWN)
    assert not is_zero(tf.constant([0.0, 1.0]), UNKNOWN)
    with tf.Graph().as_default():
        assert not is_zero(tf.random.uniform([2]), UNKNOWN)


def test_an_overflow_is_hidden_where_no_flag_is_in_sight():
    for shows, visible, expected in (
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ):
        checks = frozenset([Unscaling(shows, visible), Unscaling(True, True)])
        unit = Unit(0.0, 0.0, checks=checks)
        bounded = unit._replace(is_bounded=True)
        assert hides(bounded, checks) is expected
        assert not hides(bounded, [])  # a step was decided with them
        assert not hides(unit, checks)  # an infinity is seen in it
    assert not hides(FREE, [])


def test_what_a_finite_number_replaced_was_seen_if_it_was_unscaled_before():
    checked, unchecked = Unscaling(True, True), Unscaling(True, True)
    unchecked.was_checked = False
    patched = Unit(1.0, 1.0, is_patched=True)
    for checks, expected in (([], True), ([unchecked], True), ([checked], False)):
        assert is_unseen(patched._replace(checks=frozenset(checks))) is expected
    assert not is_unseen(FREE)
