"""What optimizers that share a loss scale know of it."""

from __future__ import annotations

import gc
import weakref

import pytest
import tensorflow as tf
from models import compiled

from lossscale import DynamicLossScale
from lossscale.gradients.check import CLEAN
from lossscale.optimizer.provenance.history import History, history_of
from lossscale.units.unit import UNKNOWN

MODES = ["eager", "graph", "xla"]


def make():
    """A loss scale, and what is known of it."""
    loss_scale = DynamicLossScale(8.0)
    return loss_scale, history_of(loss_scale)


def test_one_loss_scale_has_one():
    loss_scale, history = make()
    assert history_of(loss_scale) is history
    assert loss_scale._noted_by is history
    assert history_of(DynamicLossScale()) is not history


@pytest.mark.parametrize("mode", MODES)
def test_what_was_read_is_the_unit_and_what_it_divides_is_free(mode):
    loss_scale, history = make()
    told = []

    def step(x):
        read = loss_scale()
        scaled = x * read
        told[:] = history.values.units([read, scaled, scaled / read, x, None])
        return scaled

    compiled(step, mode)(tf.constant(3.0))
    read, scaled, divided, *others = told
    assert (read.low, read.high, read.is_scale) == (1.0, 1.0, True)
    assert (scaled.low, scaled.high, scaled.is_scale) == (1.0, 1.0, False)
    assert scaled.reads == read.reads
    assert len(read.reads) == 1
    assert divided.is_free
    assert others == [UNKNOWN, UNKNOWN]


@pytest.mark.parametrize("mode", MODES)
def test_what_was_unscaled_is_known_again(mode):
    _, history = make()

    def step(x):
        y = tf.identity(x)
        assert history.unscaling_of(y) is None
        assert not history.has_unscaled
        history.note_unscaled([y, None], CLEAN, [(x, None)] * 2, [UNKNOWN] * 2)
        found = history.unscaling_of(y)
        assert found.count == 2
        assert history.unscaling_of(y * 2.0) is None
        assert history.unscaling_of(None) is None
        for unit in history.values.units([y, y * 2.0]):
            assert unit.is_free
            assert unit.unscalings == {found}
        return y

    compiled(step, mode)(tf.constant(3.0))
    assert history.has_unscaled


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_a_step_does_is_not_noted(mode):
    loss_scale, history = make()

    def step(x):
        with history.values.ignoring():
            inside = x * loss_scale()
        assert history.values.units([inside]) == [UNKNOWN]
        return inside * 1.0

    compiled(step, mode)(tf.constant(3.0))


def test_when_it_was_read_as_a_number():
    loss_scale, history = make()
    assert history.read_as_float_at == 0
    tensor = loss_scale()
    (unit,) = history.values.units([tensor])
    (read,) = unit.reads
    assert float(loss_scale) == 8.0
    assert history.read_as_float_at > read.time


def test_it_ends_with_the_loss_scale():
    loss_scale, history = make()
    kept = weakref.ref(history)
    loss_scale.scale(tf.constant(1.0))
    del loss_scale, history
    gc.collect()
    assert kept() is None


def test_of_another_loss_scale_nothing_is_known():
    loss_scale, _ = make()
    other = History(DynamicLossScale(8.0))
    assert other.values.units([loss_scale.scale(tf.constant(1.0))]) == [UNKNOWN]
