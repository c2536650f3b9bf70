"""Configs and arguments of Keras's own wrappers are taken as they are there."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
from models import data, regression

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer
from lossscale.scales import base

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


def dynamic(**settings):
    return DynamicLossScale(**settings).get_config()


def fixed(value):
    return FixedLossScale(value).get_config()


#: Positional and named arguments as programs write them, and the loss scale they mean.
CALLS = [
    ((), {"dynamic": True}, dynamic()),  # dreamerv2
    ((), {"dynamic": False, "initial_scale": 64}, fixed(64)),  # Model Garden, DLRM
    ((), {"initial_scale": 64.0}, dynamic(initial_loss_scale=64)),
    ((), {"dynamic_growth_steps": 7}, dynamic(increment_period=7)),
    (
        (),
        {"dynamic": True, "initial_scale": None, "dynamic_growth_steps": None},
        dynamic(),
    ),
    (
        (),
        {"initial_scale": 0.25},
        dynamic(initial_loss_scale=0.25, min_loss_scale=0.25),
    ),
    ((), {"use_ema": False, "clipnorm": None}, dynamic()),
    # Keras 2's order.
    ((True,), {}, dynamic()),
    ((np.True_, 64), {}, dynamic(initial_loss_scale=64)),
    ((False, 64), {}, fixed(64)),
    ((False,), {"initial_scale": 64}, fixed(64)),
    ((True, 64.0, 7), {}, dynamic(initial_loss_scale=64, increment_period=7)),
    ((True, None, 7), {}, dynamic(increment_period=7)),
    # Keras 3's, and TensorFlow 2.0's to 2.3's.
    ((64.0, 7), {}, dynamic(initial_loss_scale=64, increment_period=7)),
    ((64.0,), {}, fixed(64)),
    (("dynamic",), {}, dynamic()),
]


@pytest.mark.either_keras2
@pytest.mark.parametrize(("args", "kwargs", "expected"), CALLS, ids=repr)
def test_arguments_of_keras_own_are_taken(family, args, kwargs, expected):
    own = type(LossScaleOptimizer(family.optimizers.SGD(0.25)))
    for cls in (LossScaleOptimizer, own):
        optimizer = cls(family.optimizers.SGD(0.25), *args, **kwargs)
        assert optimizer.loss_scale.get_config() == expected
        is_dynamic = "increment_period" in expected
        assert type(optimizer.loss_scale) is (
            DynamicLossScale if is_dynamic else FixedLossScale
        )
        assert optimizer.name == "loss_scale_optimizer"
        # The config is in our words, and says the same.
        config = json.loads(json.dumps(optimizer.get_config()))
        assert sorted(config) == ["inner_optimizer", "loss_scale", "name"]
        assert taken(config).loss_scale.get_config() == expected


@pytest.mark.either_keras2
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("dynamic", "mine"), {}),
        ((64.0, 7, "mine"), {}),
        ((True, "mine", 7), {}),
        ((True,), {"name": "mine"}),
        ((), {"name": "mine", "initial_scale": 8.0}),
    ],
    ids=repr,
)
def test_a_name_is_a_name_in_any_order(family, args, kwargs):
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.25), *args, **kwargs)
    assert optimizer.name == "mine"
    assert isinstance(optimizer.loss_scale, DynamicLossScale)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((), {"dynamic": False}, ValueError, "`initial_scale` .* got None. Write Loss"),
        ((False,), {}, ValueError, "`loss_scale` must .* got False. Write"),
        (
            (False, 64, 7),
            {},
            ValueError,
            "`dynamic_growth_steps` must be None with dynamic=False, got 7. Leave",
        ),
        ((), {"dynamic": "dynamic"}, TypeError, "`dynamic` .* got 'dynamic'"),
        ((), {"dynamic": 1}, TypeError, "`dynamic` must be True or False, got 1"),
        ((), {"initial_scale": "8"}, TypeError, "`initial_scale` .* got '8'"),
        ((True, -1), {}, ValueError, "`initial_scale` must be positive.* got -1"),
        ((8.0, 0), {}, ValueError, "`dynamic_growth_steps` .* got 0"),
        ((True,), {"dynamic": False}, TypeError, "`dynamic` .* once, got True by pos"),
        (
            (),
            {"loss_scale": "fixed", "dynamic": True},
            TypeError,
            "`dynamic` must not .* `loss_scale`, got dynamic=True and .* Leave out",
        ),
        (
            (8.0,),
            {"initial_scale": 8.0},
            TypeError,
            "`initial_scale` must not .*_scale",
        ),
        ((None,), {"dynamic": True}, TypeError, "`dynamic` must not .*_scale=None"),
        (("dynamic", 5), {}, TypeError, "`name` must be a string, got 5"),
        ((), {"clipnorm": 1.0}, ValueError, "`clipnorm` must be set on .*inner.*= ..."),
        (
            (),
            {"dynamik": True},
            TypeError,
            "`dynamik` .*one of .*communication_dtype, got",
        ),
    ],
    ids=str,
)
@pytest.mark.either_keras2
def test_wrong_arguments_are_told_before_anything_exists(
    family, monkeypatch, args, kwargs, error, message
):
    inner = family.optimizers.SGD(0.25)
    own = type(LossScaleOptimizer(family.optimizers.SGD(0.25)))

    def create(*_, **__):
        raise AssertionError("a variable was created")

    monkeypatch.setattr(base, "new_variable", create)
    for cls in (LossScaleOptimizer, own):
        with pytest.raises(error, match=message):
            cls(inner, *args, **kwargs)
    monkeypatch.undo()
    LossScaleOptimizer(inner)  # nobody has marked it as wrapped


def test_programs_of_others_train(family, rng):
    """Lines of Model Garden, DLRM and dreamerv2, and their custom loops."""

    def configure_optimizer(optimizer, use_float16=False, loss_scale=None):
        if use_float16 and loss_scale in (None, "dynamic"):
            return LossScaleOptimizer(optimizer)
        return LossScaleOptimizer(optimizer, dynamic=False, initial_scale=loss_scale)

    x, y = data(rng)
    made = [
        configure_optimizer(family.optimizers.SGD(0.125), True, "dynamic"),
        configure_optimizer(family.optimizers.SGD(0.125), True, 1024),
        LossScaleOptimizer(family.optimizers.SGD(0.125), dynamic=True),
        LossScaleOptimizer(family.optimizers.SGD(0.125), 1024.0, 2000),
    ]
    weights = []
    for optimizer in made:
        model = regression(family, optimizer, run_eagerly=True)
        model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_mean((model(x) - y) ** 2))
        trained = model.trainable_variables
        grads = optimizer.get_unscaled_gradients(tape.gradient(loss, trained))
        optimizer.apply_gradients(zip(grads, trained))
        assert float(optimizer.loss_scale) in (1024.0, 2.0**15)
        weights.append(model.get_weights())
    for others in weights[1:]:
        for one, other in zip(weights[0], others):
            np.testing.assert_array_equal(one, other)
