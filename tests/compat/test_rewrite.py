"""TensorFlow's rewrite of graphs to float16, with a loss scale of ours."""

from __future__ import annotations

import pytest
import tensorflow as tf
from installed import families
from version_1 import running, v1, variable

import lossscale
from lossscale.compat.v1 import (
    MixedPrecisionLossScaleOptimizer,
    enable_mixed_precision_graph_rewrite,
)


@pytest.fixture
def turned_off():
    yield
    v1.mixed_precision.disable_mixed_precision_graph_rewrite()


def is_on():
    return tf.config.optimizer.get_experimental_options().get("auto_mixed_precision")


@pytest.mark.usefixtures("turned_off")
def test_it_turns_the_rewrite_on_and_scales_the_loss():
    assert not is_on()
    with running("session") as run:
        weight = variable(1.0)
        loss_scale = lossscale.DynamicLossScale(16)
        inner = v1.train.GradientDescentOptimizer(1.0)
        optimizer = enable_mixed_precision_graph_rewrite(inner, loss_scale)
        assert is_on()
        assert isinstance(optimizer, MixedPrecisionLossScaleOptimizer)
        names = {each.name for each in v1.global_variables()}
        assert names == {weight.name, *(each.name for each in loss_scale.variables)}
        step = run.step(lambda fed: optimizer.minimize(weight * fed))
        for fed, expected in ((float("inf"), 1.0), (0.5, 0.5)):
            step(fed)
            assert run.value(weight) == expected


@pytest.mark.parametrize(
    ("opt", "loss_scale", "error"),
    [
        (families()[0].optimizers.SGD, "dynamic", TypeError),
        (v1.train.AdamOptimizer, None, TypeError),
        (v1.train.AdamOptimizer, 0, ValueError),
    ],
)
def test_with_bad_arguments_it_stays_off(opt, loss_scale, error):
    with pytest.raises(error):
        enable_mixed_precision_graph_rewrite(opt(), loss_scale)
    assert not is_on()


def test_a_tensorflow_without_it_is_told_of(monkeypatch):
    monkeypatch.setattr(v1, "mixed_precision", None)
    with pytest.raises(NotImplementedError, match="Cast in the model"):
        enable_mixed_precision_graph_rewrite(v1.train.AdamOptimizer())
