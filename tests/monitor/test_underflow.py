"""LossScaleMonitor tells of a loss scale that is far too low, which is silent else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf
from faulty import told_of
from lossscale.monitor.skips import Skips
from models import data, regression, variable_of

from lossscale import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScaleMonitor,
    LossScaleOptimizer,
)
from lossscale.monitor.reading import Reading, read
from lossscale.monitor.watched import Watched

pytestmark = pytest.mark.slow

#: The weight of the loss, which makes gradients small.
TINY = 2.0**-40
#: How many steps were skipped before training begins.
BEFORE = 3


def tiny(family, optimizer):
    """Returns a model whose loss is the mean square times `TINY`.

    Its last layer is in float32, and has the largest gradient.
    """
    model = regression(family, optimizer, "mixed_float16")

    def loss(expected, predicted):
        return TINY * tf.reduce_mean((expected - predicted) ** 2, axis=-1)

    model.compile(optimizer, loss=loss)
    return model


def fit_tiny(family, rng, loss_scale, monitor, epochs=4):
    """Returns the history of a model whose gradients are tiny, and the warnings."""
    x, y = data(rng)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.0), loss_scale)
    messages, history = told_of(
        tiny(family, optimizer), x, y, monitor, 16, epochs=epochs
    )
    return history, messages


def reading(log2_scale, log2_largest, skipped=0):
    largest = None if log2_largest is None else 2.0**log2_largest
    return Reading(2.0**log2_scale, skipped, 100, Skips(skipped), largest)


@pytest.mark.parametrize(
    ("readings", "told_at"),
    [
        ([(15, -20)] * 5, 2),
        ([(15, -15)] * 5, None),  # not far enough
        ([(15, -20), (15, -20), (30, -20), (15, -20), (15, -20), (15, -20)], 5),
        ([(15, -20), *[(15, -20, BEFORE + 1)] * 3], None),
        ([(15, -20, BEFORE)] * 3, 2),
        ([(15, -20, BEFORE + 1)] * 3, None),  # the first epoch skipped a step
        ([(15, -20, BEFORE + 1)] * 4, 3),
        ([(15, -20), (15, None), (15, -20), (15, -20)], 3),
        ([(15, -20), (15, -np.inf), (15, -20), (15, -20)], 3),  # all gradients are zero
        ([(15, -20), (0, math.log2(65504)), (15, -20), (15, -20)], None),  # no room
    ],
)
def test_after_so_many_epochs_once(readings, told_at):
    watched, told = Watched(None, 3), []
    watched.begin(reading(0, None, BEFORE))
    for log2_scale, log2_largest, *skipped in readings:
        watched.see(reading(log2_scale, log2_largest, *skipped or [BEFORE]))
        told.append(watched.underflow() is not None)
    assert [i for i, each in enumerate(told) if each] == (
        [] if told_at is None else [told_at]
    )


def test_a_dynamic_loss_scale_is_told_of_where_it_is_asked_for(family, rng):
    monitor = LossScaleMonitor(patience=3, check_underflow=True, verbose=0)
    scale = DynamicLossScale()
    history, messages = fit_tiny(family, rng, scale, monitor)
    (message,) = messages
    assert "Gradients may underflow: for 3 epochs" in message
    assert "The loss scale is 2**15" in message
    assert "scale = lossscale.HeadroomLossScale()" in message
    rooms = history["headroom"]
    largest = float(scale.last_largest.numpy())
    assert history["largest_gradient"][-1] == pytest.approx(largest)
    assert rooms[-1] == pytest.approx(np.log2(65504 / largest) - 15)
    # The loss scale that it names does not overflow, and is hardly too low. It was said
    # after the third epoch, and another may have larger ones.
    borne = int(message.split("could be 2**")[1].split(".")[0])
    assert borne < 15 + min(rooms[:3]) <= borne + 2
    for room in rooms:
        assert 16 < room < 60


def test_nothing_is_said_unasked(family, rng):
    scale = DynamicLossScale()
    monitor = LossScaleMonitor(patience=1, verbose=0)
    history, messages = fit_tiny(family, rng, scale, monitor)
    assert messages == []
    assert scale.last_largest is None
    assert "headroom" not in history
    assert "largest_gradient" not in history


def test_the_largest_gradient_is_a_good_steps_and_true(family):
    scale = DynamicLossScale(8.0)
    scale.keep_largest()
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.5), scale)
    variable, logged = variable_of(family, [1.0]), []
    watched = Watched(optimizer, 10)
    watched.name = "mine"
    watched.begin(read(optimizer))
    for grad in (None, 0.25, np.inf, -3.0, np.inf):
        if grad is not None:
            grads = [optimizer.scale_loss(tf.constant([grad]))]
            grads = optimizer.get_unscaled_gradients(grads)
            grads = [tf.clip_by_value(each, -0.125, 0.125) for each in grads]
            optimizer.apply_gradients(zip(grads, [variable]))
            scale.current_loss_scale.assign(8.0)
            watched.see(read(optimizer))
        logs = {}
        watched.add_to(logs)
        logged.append(logs["mine_largest_gradient"])
    assert np.isnan(logged[0])
    assert logged[1:] == [0.25, 0.25, 3.0, 3.0]


def test_a_loss_scale_that_looks_is_told_of_unasked(family, rng, capsys):
    low = HeadroomLossScale(2.0**10, max_loss_scale=2.0**10)
    _, messages = fit_tiny(family, rng, low, LossScaleMonitor(patience=2))
    assert len(messages) == 1
    assert "Headroom: " in capsys.readouterr().out
    right = HeadroomLossScale()
    monitor = LossScaleMonitor(patience=2)
    history, messages = fit_tiny(family, rng, right, monitor)
    assert messages == []
    assert all(3.9 < room < 8 for room in history["headroom"])
    assert "doublings." in capsys.readouterr().out


def test_what_was_traced_before_is_traced_anew(family, rng):
    x, y = data(rng)
    scale = DynamicLossScale()
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.0), scale)
    model = tiny(family, optimizer)
    model.fit(x, y, verbose=0)
    monitor = LossScaleMonitor(check_underflow=True, verbose=0)
    found = model.fit(x, y, verbose=0, callbacks=[monitor])
    assert np.isfinite(found.history["headroom"]).all()
    again = model.fit(x, y, verbose=0, callbacks=[monitor])
    assert np.isfinite(again.history["headroom"]).all()
