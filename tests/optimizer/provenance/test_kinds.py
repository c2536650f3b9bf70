"""What a gradient is, by the exponents that it may have."""

from __future__ import annotations

import pytest
import tensorflow as tf

from lossscale.optimizer.provenance.kinds import (
    Kind,
    inf_may_be_replaced,
    is_all_zero,
    kind_of,
    overflow_may_be_lost,
)
from lossscale.units.unit import FREE, KEPT, UNKNOWN, ZERO, Unit


class Unscaling:
    """Gradients that were unscaled somewhere."""

    def __init__(self, poisons, visible):
        self.poisons, self.visible = poisons, visible
        self.is_read, self.was_checked = False, True

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
    unscaled = KEPT._replace(sources=frozenset([Unscaling(True, True)]))
    assert kind_of(unscaled, is_read_here=False) is Kind.UNSCALED


def test_zeros():
    assert is_all_zero(None, UNKNOWN)
    assert is_all_zero(tf.ones([2]), ZERO)
    assert is_all_zero(tf.zeros([2]), UNKNOWN)
    assert not is_all_zero(tf.constant([0.0, 1.0]), UNKNOWN)
    with tf.Graph().as_default():
        assert not is_all_zero(tf.random.uniform([2]), UNKNOWN)


def test_an_overflow_is_hidden_where_no_flag_is_in_sight():
    for poisons, visible, expected in (
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ):
        checks = frozenset([Unscaling(poisons, visible), Unscaling(True, True)])
        unit = Unit(0.0, 0.0, sources=checks)
        bounded = unit._replace(hides_inf=True)
        assert overflow_may_be_lost(bounded, checks) is expected
        assert not overflow_may_be_lost(bounded, [])  # a step was decided with them
        assert not overflow_may_be_lost(unit, checks)  # an infinity is seen in it
    assert not overflow_may_be_lost(FREE, [])


def test_what_a_finite_number_replaced_was_seen_if_it_was_unscaled_before():
    checked, unchecked = Unscaling(True, True), Unscaling(True, True)
    unchecked.was_checked = False
    patched = Unit(1.0, 1.0, replaces_inf=True)
    for checks, expected in (([], True), ([unchecked], True), ([checked], False)):
        assert (
            inf_may_be_replaced(patched._replace(sources=frozenset(checks))) is expected
        )
    assert not inf_may_be_replaced(FREE)
