"""The state of a step, on the device, and who moves it."""

from __future__ import annotations

import gc

import pytest
import tensorflow as tf
from exact import S, sharing

pytestmark = pytest.mark.smoke


def test_each_call_of_ours_moves_it(trained):
    state = trained.optimizer.engine.division.state

    def number():
        return float(state.read())

    assert number() == 0.0
    grads = trained.scaled(1.0)
    assert number() == S
    grads = trained.optimizer.get_unscaled_gradients(grads)
    assert number() == -S
    trained.apply(grads)
    assert number() == -S
    trained.optimizer.loss_scale.scale(tf.constant(1.0))
    assert number() == S


def test_an_optimizer_that_was_deleted_no_longer_counts(family):
    """Whether it waits is written only while another one shares the loss scale."""
    first, second = sharing(family)
    first.build()
    grads = first.scaled(0.5)
    del second
    gc.collect()
    first.apply(grads)
    division = first.optimizer.engine.division
    assert not division.uses.has_several
    assert float(division.state.waiting) == 1.0
    first.optimizer.loss_scale.scale(tf.constant(1.0))
    assert float(division.state.read()) > 0.0
    assert first.subtracted() == 0.5
