"""The state of a step: its stages, and who moves it. `test_pending.py` has the laws."""

from __future__ import annotations

import gc

import pytest
import tensorflow as tf
from exact import S, sharing
from lossscale.optimizer.state import Stage

pytestmark = pytest.mark.smoke


def test_each_call_of_ours_moves_it_to_a_stage(trained):
    state = trained.optimizer.engine.division.state

    def stages():
        now = state.read()
        return [stage for stage in Stage if bool(now.is_at(stage))], float(
            now.loss_scale
        )

    assert stages() == ([Stage.NOTHING], 0.0)
    grads = trained.scaled(1.0)
    assert stages() == ([Stage.SCALED], S)
    grads = trained.optimizer.get_unscaled_gradients(grads)
    assert stages() == ([Stage.UNSCALED], S)
    trained.apply(grads)
    assert stages() == ([Stage.UNSCALED], S)
    trained.optimizer.loss_scale.scale(tf.constant(1.0))
    assert stages() == ([Stage.SCALED], S)


def test_what_an_optimizer_that_is_gone_has_left_moves_nothing(family):
    """Whether it waits is read only while another one shares the loss scale."""
    first, second = sharing(family)
    first.build()
    grads = first.scaled(0.5)  # it waits
    del second
    gc.collect()
    first.apply(grads)
    state = first.optimizer.engine.division.state
    assert not first.optimizer.engine.division.observer.has_several
    assert float(state.waiting) == 1.0  # nobody has written it
    first.optimizer.loss_scale.scale(tf.constant(1.0))
    assert bool(state.read().is_at(Stage.SCALED))
    assert first.subtracted() == 0.5
