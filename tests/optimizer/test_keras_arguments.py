"""Arguments, configs and states of Keras's own wrappers are taken as they are there."""

import json

import numpy as np
import pytest
import tensorflow as tf
from models import assert_same, data, regression

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer
from lossscale.runtime import replicas

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
BATCHES = {"batch_size": 16, "verbose": 0, "shuffle": False}


def keras_own(family, name="SGD", **kwargs):
    """Returns Keras's own wrapper around an optimizer."""
    inner = getattr(family.optimizers, name)(0.25)
    return family.keras.mixed_precision.LossScaleOptimizer(inner, **kwargs)


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


def dynamic(*args, **settings):
    return DynamicLossScale(*args, **settings).get_config()


def fixed(value):
    return FixedLossScale(value).get_config()


@pytest.mark.smoke
@pytest.mark.each_keras
def test_keras_own_wrapper_and_its_config_are_taken(family):
    """Before the wrapper is built. Keras 3's has no fixed loss scale."""
    cases = [({"initial_scale": 64.0, "dynamic_growth_steps": 7}, dynamic(64, 7))]
    cases += [({"initial_scale": 0.25}, dynamic(0.25, min_loss_scale=0.25))]
    if family.name != "keras3":
        cases.append(({"dynamic": False, "initial_scale": 64.0}, fixed(64)))
    for arguments, expected in cases:
        wrapper = keras_own(family, **arguments)
        config = wrapper.get_config()
        for optimizer in (
            taken(config),
            taken(json.loads(json.dumps(config, default=float))),
            taken({**config, **OF_OLD_KERAS_3}),
            LossScaleOptimizer.from_keras(wrapper),
        ):
            assert optimizer.loss_scale.get_config() == expected
            assert float(optimizer.loss_scale) == arguments["initial_scale"]
            assert float(optimizer.learning_rate.numpy()) == 0.25
            assert_wraps_sgd(family, optimizer)
        assert optimizer.inner_optimizer is wrapper.inner_optimizer
        assert taken({**config, "name": "mine"}).name == "mine"
        held = {**config, "inner_optimizer": family.optimizers.SGD(0.25)}
        assert_wraps_sgd(family, LossScaleOptimizer.from_config(held))


def test_the_config_of_tensorflow_2_3_is_taken(family):
    # TensorFlow 2.3, LossScaleOptimizer.get_config: "optimizer" and "loss_scale".
    inner = keras_own(family).get_config()["inner_optimizer"]
    settings = {"initial_loss_scale": 64.0, "increment_period": 7, "multiplier": 4.0}
    for name, config in (
        ("DynamicLossScale", settings),
        ("FixedLossScale", {"loss_scale_value": 64.0}),
    ):
        loss_scale = {"class_name": name, "config": config}
        optimizer = taken({"optimizer": inner, "loss_scale": loss_scale})
        assert type(optimizer.loss_scale).__name__ == name
        assert config.items() <= optimizer.loss_scale.get_config().items()
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


def given(*args, **kwargs):
    """Returns arguments as a program writes them, after the inner optimizer."""
    return args, kwargs


#: What programs write, and the loss scale that they mean.
CALLS = [
    (given(dynamic=True), dynamic()),  # dreamerv2
    (given(dynamic=False, initial_scale=64), fixed(64)),  # Model Garden, DLRM
    (given(dynamic_growth_steps=7), dynamic(increment_period=7)),
    (given(dynamic=True, initial_scale=None, dynamic_growth_steps=None), dynamic()),
    (given(initial_scale=0.25), dynamic(0.25, min_loss_scale=0.25)),
    (given(use_ema=False, clipnorm=None), dynamic()),
    # Keras 2's order.
    (given(np.True_, 64), dynamic(64)),
    (given(False, 64), fixed(64)),
    (given(False, initial_scale=64), fixed(64)),
    (given(True, 64.0, 7), dynamic(64, 7)),
    (given(True, None, 7), dynamic(increment_period=7)),
    # Keras 3's, and TensorFlow 2.0's to 2.3's.
    (given(64.0, 7), dynamic(64, 7)),
    (given(64.0), fixed(64)),
    # A name is a name in any order.
    (given("dynamic", "mine"), dynamic()),
    (given(64.0, 7, "mine"), dynamic(64, 7)),
    (given(True, "mine", 7), dynamic(increment_period=7)),
    (given(True, name="mine"), dynamic()),
    (given(name="mine", initial_scale=8.0), dynamic(8)),
]


@pytest.mark.parametrize(("arguments", "expected"), CALLS, ids=repr)
def test_arguments_of_keras_own_are_taken(family, arguments, expected):
    own = type(LossScaleOptimizer(family.optimizers.SGD(0.25)))
    args, kwargs = arguments
    for cls in (LossScaleOptimizer, own):
        optimizer = cls(family.optimizers.SGD(0.25), *args, **kwargs)
        assert optimizer.loss_scale.get_config() == expected
        is_named = "mine" in (*args, *kwargs.values())
        assert optimizer.name == ("mine" if is_named else "loss_scale_optimizer")
        # The config is in our words, and says the same.
        config = json.loads(json.dumps(optimizer.get_config()))
        assert sorted(config) == ["inner_optimizer", "loss_scale", "name"]
        assert taken(config).loss_scale.get_config() == expected


#: Calls that are refused, the error and its words.
REFUSED = [
    (given(dynamic=False), ValueError, "`initial_scale` .* got None. Write Loss"),
    (given(False), ValueError, "`loss_scale` must .* got False. Write"),
    (
        given(False, 64, 7),
        ValueError,
        "`dynamic_growth_steps` must be None with dynamic=False, got 7. Leave",
    ),
    (given(dynamic=1), TypeError, "`dynamic` must be True or False, got 1"),
    (given(initial_scale="8"), TypeError, "`initial_scale` .* got '8'"),
    (given(True, -1), ValueError, "`initial_scale` must be positive.* got -1"),
    (given(8.0, 0), ValueError, "`dynamic_growth_steps` .* got 0"),
    (given(True, dynamic=False), TypeError, "`dynamic` .* once, got True by pos"),
    (
        given("fixed", dynamic=True),
        TypeError,
        "`dynamic` must not .*=True and .* Leave",
    ),
    (given(8.0, initial_scale=8.0), TypeError, "`initial_scale` must not .*_scale"),
    (given(None, dynamic=True), TypeError, "`dynamic` must not .*_scale=None"),
    (given(True, True), TypeError, "`initial_scale` must be a number, got True"),
    (given(True, name=64.0), TypeError, "`name` must be a string, got 64.0"),
    (given(64.0, name=7), TypeError, "`name` must be a string, got 7"),
    (
        given(clipnorm=1.0),
        ValueError,
        r"`clipnorm` must be set on .*inner.*SGD\(..., clipnorm=1.0\)",
    ),
    (given(dynamik=True), TypeError, "`dynamik` .*one of .*_dtype, guard.*, got"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED, ids=str)
def test_wrong_arguments_are_told_before_anything_exists(
    family, monkeypatch, arguments, error, message
):
    args, kwargs = arguments
    inner = family.optimizers.SGD(0.25)
    own = type(LossScaleOptimizer(family.optimizers.SGD(0.25)))

    def create(*_, **__):
        raise AssertionError("a variable was created")

    monkeypatch.setattr(replicas, "new_variable", create)
    for cls in (LossScaleOptimizer, own):
        with pytest.raises(error, match=message):
            cls(inner, *args, **kwargs)
    monkeypatch.undo()
    LossScaleOptimizer(inner)  # nobody has marked it as wrapped


@pytest.mark.each_version
def test_it_goes_on_as_if_keras_own_had_gone_on(family, rng):
    x, y = data(rng)
    arguments = {"initial_scale": 64.0, "dynamic_growth_steps": 6}
    own, twin = (keras_own(family, "Adam", **arguments) for _ in range(2))
    model, twin = regression(family, own), regression(family, twin)
    for each in (model, twin):
        each.fit(x, y, **BATCHES)  # four steps
    assert_same(model.get_weights(), twin.get_weights())

    optimizer = LossScaleOptimizer.from_keras(own)
    assert optimizer.inner_optimizer is own.inner_optimizer
    scale = optimizer.loss_scale
    assert (float(scale), int(scale.good_steps.numpy())) == (64.0, 4)
    assert (scale.initial_loss_scale, scale.increment_period) == (64.0, 6)
    assert int(optimizer.iterations.numpy()) == 4
    model.compile(optimizer, "mse")
    for each in (model, twin):
        each.fit(x, y, **BATCHES)
    assert model.optimizer is optimizer
    assert (float(scale), int(scale.good_steps.numpy())) == (128.0, 2)
    assert int(optimizer.iterations.numpy()) == 8
    assert_same(model.get_weights(), twin.get_weights())


def test_a_scale_below_the_floor_stays(family):
    if family.name != "keras3":
        pytest.skip("Keras 2's own wrapper has a floor")
    low, zero = keras_own(family), keras_own(family)
    for own, value in ((low, 0.5), (zero, 0.0)):
        own.build([family.keras.Variable([1.0])])
        own.dynamic_scale.assign(value)
    scale = LossScaleOptimizer.from_keras(low).loss_scale
    assert float(scale) == scale.min_loss_scale == 0.5
    with pytest.raises(ValueError, match=r"`dynamic_scale` must be positive.* got 0.0"):
        LossScaleOptimizer.from_keras(zero)


@pytest.mark.each_keras
def test_from_keras_tells_what_it_does_not_take(family):
    ours = LossScaleOptimizer(family.optimizers.SGD(0.25))
    with pytest.raises(TypeError, match=r"`optimizer` must be .*lossscale's as it is"):
        LossScaleOptimizer.from_keras(ours)
    for other in (family.optimizers.SGD(0.25), None, 8.0):
        with pytest.raises(TypeError, match=r"`optimizer` must be .* got .*Wrap an"):
            LossScaleOptimizer.from_keras(other)
    if family.name == "keras2-legacy":  # other optimizers are of no use in a graph
        with tf.Graph().as_default():
            own = keras_own(family)
            with pytest.raises(RuntimeError, match=r"`from_keras` must be called eag"):
                LossScaleOptimizer.from_keras(own)
