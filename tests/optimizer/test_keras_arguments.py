"""Configs and arguments of Keras's own wrappers: taken, or told what to write."""

from __future__ import annotations

import json
import re

import pytest

import lossscale
from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer

#: What Keras 3.0 to 3.4 wrote with every optimizer.
OF_OLD_KERAS_3 = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}


def keras_own(family, **kwargs):
    """Returns Keras's own wrapper around an optimizer."""
    return family.keras.mixed_precision.LossScaleOptimizer(
        family.optimizers.SGD(0.25), **kwargs
    )


def taken(config):
    """Returns the optimizer of a config, which is as it was then."""
    before = json.dumps(config, default=float)  # TensorFlow 2.10 writes np.float32
    optimizer = LossScaleOptimizer.from_config(config)
    assert json.dumps(config, default=float) == before
    return optimizer


def assert_wraps_sgd(family, optimizer):
    same = LossScaleOptimizer(family.optimizers.SGD(0.25))
    assert type(optimizer) is type(same)
    # Keras 2.10 has two classes for one legacy optimizer.
    assert type(optimizer.inner_optimizer).__name__ == "SGD"


def test_the_config_of_keras_own_wrapper_is_taken(family):
    wrapper = keras_own(family, initial_scale=64.0, dynamic_growth_steps=7)
    optimizer = taken(json.loads(json.dumps(wrapper.get_config(), default=float)))
    scale = optimizer.loss_scale
    assert isinstance(scale, DynamicLossScale)
    assert (float(scale), scale.increment_period, scale.multiplier) == (64.0, 7, 2.0)
    assert_wraps_sgd(family, optimizer)
    assert float(optimizer.learning_rate.numpy()) == 0.25
    again = taken({**wrapper.get_config(), **OF_OLD_KERAS_3})
    assert again.loss_scale.get_config() == scale.get_config()


def test_a_fixed_scale_of_keras_2s_is_taken(family):
    if family.name == "keras3":
        pytest.skip("Keras 3's own wrapper has no fixed loss scale")
    wrapper = keras_own(family, dynamic=False, initial_scale=64.0)
    optimizer = taken(wrapper.get_config())
    assert isinstance(optimizer.loss_scale, FixedLossScale)
    assert float(optimizer.loss_scale) == 64.0


def test_a_scale_below_one_is_taken(family):
    scale = taken(keras_own(family, initial_scale=0.25).get_config()).loss_scale
    assert float(scale) == scale.min_loss_scale == 0.25


@pytest.mark.parametrize(
    "loss_scale",
    [
        {
            "class_name": "DynamicLossScale",
            "config": {
                "initial_loss_scale": 64.0,
                "increment_period": 7,
                "multiplier": 4.0,
            },
        },
        {"class_name": "FixedLossScale", "config": {"loss_scale_value": 64.0}},
    ],
    ids=lambda config: config["class_name"],
)
def test_the_config_of_tensorflow_2_3_is_taken(family, loss_scale):
    # TensorFlow 2.3, LossScaleOptimizer.get_config: "optimizer" and "loss_scale".
    inner = keras_own(family).get_config()["inner_optimizer"]
    optimizer = taken({"optimizer": inner, "loss_scale": loss_scale})
    found = optimizer.loss_scale
    assert type(found).__name__ == loss_scale["class_name"]
    assert loss_scale["config"].items() <= found.get_config().items()
    assert_wraps_sgd(family, optimizer)


@pytest.mark.parametrize(
    "config",
    [{}, None, "dynamic", {"loss_scale": 8}, {"class_name": "x", "config": {}}],
    ids=repr,
)
def test_what_is_no_config_is_told(family, config):
    own = type(LossScaleOptimizer(family.optimizers.SGD(0.25)))
    for cls in (LossScaleOptimizer, own):
        with pytest.raises(TypeError, match=r'`config` must .*"inner_optimizer", got'):
            cls.from_config(config)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"initial_scale": 64.0}, "DynamicLossScale(64.0)"),
        ({"dynamic_growth_steps": 7}, "DynamicLossScale(2.0**15, 7)"),
        ({"initial_scale": 64, "dynamic_growth_steps": 7}, "DynamicLossScale(64, 7)"),
        ({"dynamic": True}, "DynamicLossScale()"),
        ({"dynamic": True, "initial_scale": None}, "DynamicLossScale()"),
        ({"dynamic": False, "initial_scale": 64.0}, "FixedLossScale(64.0)"),
    ],
    ids=str,
)
def test_arguments_of_keras_own_are_answered_with_what_to_write(
    family, given, expected
):
    inner = family.optimizers.SGD(0.25)
    own = type(LossScaleOptimizer(family.optimizers.SGD(0.25)))
    for cls in (LossScaleOptimizer, own):
        with pytest.raises(TypeError) as caught:
            cls(inner, **given)
        message = str(caught.value)
        assert message.startswith(f"`{next(iter(given))}` must be an argument of the")
        for name, value in given.items():
            assert f"{name}={value!r}" in message
        line = re.search(r"Write (LossScaleOptimizer\(.*\))\.$", message)[1]
        names = {**vars(lossscale), "lossscale": lossscale, "inner_optimizer": inner}
        written, wanted = (eval(text, names) for text in (line, expected))  # noqa: S307
        assert written.loss_scale.get_config() == wanted.get_config()
        inner = family.optimizers.SGD(0.25)
