"""What optimizers that share a loss scale know of it."""

from __future__ import annotations

import gc
import weakref

import pytest
import tensorflow as tf
from models import compiled

from lossscale import DynamicLossScale
from lossscale.gradients.check import CLEAN
from lossscale.optimizer.provenance.ledger import Ledger, ledger_of
from lossscale.units.unit import UNKNOWN

MODES = ["eager", "graph", "xla"]


def make():
    """A loss scale, and what is known of it."""
    loss_scale = DynamicLossScale(8.0)
    return loss_scale, ledger_of(loss_scale)


def test_one_loss_scale_has_one():
    loss_scale, ledger = make()
    assert ledger_of(loss_scale) is ledger
    assert loss_scale._noted_by is ledger
    assert ledger_of(DynamicLossScale()) is not ledger


@pytest.mark.parametrize("mode", MODES)
def test_what_was_read_is_the_unit_and_what_it_divides_is_free(mode):
    loss_scale, ledger = make()
    told = []

    def step(x):
        read = loss_scale()
        scaled = x * read
        told[:] = ledger.units([read, scaled, scaled / read, x, None])
        return scaled

    compiled(step, mode)(tf.constant(3.0))
    read, scaled, divided, *others = told
    assert (read.low, read.high, read.is_scale) == (1.0, 1.0, True)
    assert (scaled.low, scaled.high, scaled.is_scale) == (1.0, 1.0, False)
    assert scaled.readings == read.readings
    assert len(read.readings) == 1
    assert divided.is_free
    assert others == [UNKNOWN, UNKNOWN]


@pytest.mark.parametrize("mode", MODES)
def test_what_was_unscaled_is_known_again(mode):
    _, ledger = make()

    def step(x):
        y = tf.identity(x)
        assert ledger.unscaling_of(y) is None
        assert not ledger.has_unscaled
        ledger.note_unscaled([y, None], CLEAN, [(x, None)] * 2, [UNKNOWN] * 2)
        found = ledger.unscaling_of(y)
        assert len(found) == 2
        assert ledger.unscaling_of(y * 2.0) is None
        assert ledger.unscaling_of(None) is None
        for unit in ledger.units([y, y * 2.0]):
            assert unit.is_free
            assert unit.checks == {found}
        return y

    compiled(step, mode)(tf.constant(3.0))
    assert ledger.has_unscaled


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_a_step_does_is_not_noted(mode):
    loss_scale, ledger = make()

    def step(x):
        with ledger.step():
            inside = x * loss_scale()
        assert ledger.units([inside]) == [UNKNOWN]
        return inside * 1.0

    compiled(step, mode)(tf.constant(3.0))


def test_when_it_was_read_as_a_number():
    loss_scale, ledger = make()
    assert ledger.number_read == 0
    reading = ledger.timeline.note_reading(loss_scale())
    assert float(loss_scale) == 8.0
    assert ledger.number_read > reading.number


def test_it_ends_with_the_loss_scale():
    loss_scale, ledger = make()
    kept = weakref.ref(ledger)
    loss_scale.scale(tf.constant(1.0))
    del loss_scale, ledger
    gc.collect()
    assert kept() is None


def test_of_another_loss_scale_nothing_is_known():
    loss_scale, _ = make()
    other = Ledger(DynamicLossScale(8.0))
    assert other.units([loss_scale.scale(tf.constant(1.0))]) == [UNKNOWN]
