"""What is saved comes back whole, and the next step is what it would have been."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import warnings

import pytest
import tensorflow as tf
from every_loss_scale import PAGE
from limits import skip_without
from models import (
    assert_same,
    checkpoint_of,
    data,
    regression,
    scale_state,
    training_state,
    whole_state,
    with_infinity,
)

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer


def with_other_arguments(family):
    scale = DynamicLossScale(
        initial_loss_scale=2.0**12,
        increment_period=3,
        multiplier=4.0,
        backoff_factor=0.5,
        hysteresis=2,
        hysteresis_reset=["good"],
    )
    return LossScaleOptimizer(family.optimizers.Adam(0.05), scale, name="mine")


def adam_model(family, wrap=True):
    """Returns a model with Adam, wrapped with what is the default or bare."""
    optimizer = family.optimizers.Adam(0.05)
    optimizer = LossScaleOptimizer(optimizer) if wrap else optimizer
    return regression(family, optimizer, run_eagerly=True)


def train(model, x, y, run="TTTFTFTTTFTF"):
    for letter in run:
        model.train_on_batch(x if letter == "T" else with_infinity(x), y)


def assert_goes_on_equally(first, second, x, y):
    """Asserts that two models have equal states, and have after more steps."""
    for _ in range(2):
        assert_same(whole_state(first), whole_state(second))
        train(first, x, y, "FTFTT")
        train(second, x, y, "FTFTT")


@pytest.fixture
def trained(family, rng):
    x, y = data(rng, 16)
    model = regression(family, with_other_arguments(family))
    train(model, x, y)
    return model, x, y


@pytest.mark.smoke
@pytest.mark.peer_defect(6)
@pytest.mark.parametrize("built", [False, True], ids=["before-build", "after-build"])
def test_a_checkpoint(family, trained, tmp_path, built):
    model, x, y = trained
    path = checkpoint_of(model).write(str(tmp_path / "checkpoint"))
    other = regression(family, with_other_arguments(family))
    if built:
        train(other, x, y, "TF")
    status = checkpoint_of(other).read(path)
    # The slots of an optimizer that is not built yet are restored when it is.
    status.assert_existing_objects_matched()
    assert scale_state(other.optimizer) == scale_state(model.optimizer)
    train(other, x, y, "FTFTT")
    train(model, x, y, "FTFTT")
    status.assert_consumed()
    assert_goes_on_equally(model, other, x, y)


@pytest.mark.peer_defect(11)
@pytest.mark.parametrize("wraps", [(False, True), (True, False)], ids=str)
def test_a_checkpoint_between_bare_and_wrapped(family, rng, tmp_path, wraps):
    """Through `inner_optimizer` where it is Keras 3's."""
    x, y = data(rng, 16)
    models = [adam_model(family, wrap) for wrap in wraps]
    for model, run in zip(models, ("TT", "T")):
        train(model, x, y, run)
    # A wrapper of Keras 2 is saved as if it were the inner optimizer.
    name = "inner_optimizer" if family.name == "keras3" else ""
    first, second = (
        tf.train.Checkpoint(
            model=model, optimizer=getattr(model.optimizer, name, model.optimizer)
        )
        for model in models
    )
    path = first.write(str(tmp_path / "checkpoint"))
    second.read(path).expect_partial()
    for _ in range(2):
        assert_same(training_state(models[0]), training_state(models[1]))
        for model in models:
            train(model, x, y, "TT")


@pytest.mark.smoke
def test_a_config_through_json(family):
    first, optimizers = with_other_arguments(family), family.keras.optimizers
    written = json.dumps(first.get_config())
    config = json.loads(written)
    by_keras = json.dumps(optimizers.serialize(first), default=float)
    for second in (
        LossScaleOptimizer.from_config(config),
        type(first).from_config(config),
        optimizers.deserialize(json.loads(by_keras)),
    ):
        assert config == json.loads(written)  # Keras 2 writes into what it reads
        assert type(second) is type(first)
        assert second.name == "mine"
        scale = second.loss_scale
        assert scale.get_config() == first.loss_scale.get_config()
        # TensorFlow 2.10 has two classes of one name, one derived from the other.
        assert issubclass(type(first.inner_optimizer), type(second.inner_optimizer))
        assert json.loads(json.dumps(second.get_config())) == config


def test_an_own_class_needs_its_name_once(family):
    class Mine(PAGE.Halving):
        """A user's loss scale."""

    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.1), Mine(4.0))
    config = optimizer.get_config()
    with pytest.raises(ValueError, match="custom_objects"):
        type(optimizer).from_config(config)
    other = type(optimizer).from_config(config, custom_objects={"Mine": Mine})
    assert type(other.loss_scale) is Mine
    with family.keras.utils.custom_object_scope({"Mine": Mine}):
        assert type(type(optimizer).from_config(config).loss_scale) is Mine


def test_a_registered_class_needs_none(family):
    keras = family.keras
    home = keras.saving if family.name == "keras3" else keras.utils

    @home.register_keras_serializable(f"test-{family.name}")
    class Registered(PAGE.Halving):
        """A user's loss scale, registered."""

    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.1), Registered(4.0))
    config = json.loads(json.dumps(optimizer.get_config()))
    assert type(type(optimizer).from_config(config).loss_scale) is Registered
    for cls in (FixedLossScale, DynamicLossScale):
        assert home.get_registered_name(cls) == f"lossscale>{cls.__name__}"


@pytest.mark.slow
def test_a_keras_file_loads_where_only_lossscale_was_imported(
    family, trained, tmp_path
):
    skip_without("an optimizer in a .keras file", family)
    model, _, _ = trained
    path = str(tmp_path / "model.keras")
    model.save(path)
    model.save_weights(path.replace(".keras", ".weights.h5"))
    config = json.dumps(model.optimizer.get_config())
    script = f"""
        import json
        import lossscale
        import {family.keras.__name__.split(".")[0]} as keras
        config = json.loads({config!r})
        optimizer = lossscale.LossScaleOptimizer.from_config(config)
        # safe_mode is on: nothing in the file needs code that it brings along.
        model = keras.models.load_model({path!r})
        assert optimizer.get_config() == model.optimizer.get_config() == config
        model.optimizer.loss_scale.adjust(False)
        model.optimizer.loss_scale.adjust(False)
        model.load_weights({path.replace(".keras", ".weights.h5")!r})
        print(type(model.optimizer).__name__, float(model.optimizer.loss_scale))
    """
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    optimizer = model.optimizer
    expected = f"{type(optimizer).__name__} {float(optimizer.loss_scale)}"
    assert answer.stdout.split("\n")[-2] == expected


@pytest.fixture
def written_bare(family, rng, tmp_path):
    if family.name != "keras3":
        pytest.skip("in Keras 2's files a wrapper looks like the inner optimizer")
    x, y = data(rng, 16)
    bare = adam_model(family, wrap=False)
    train(bare, x, y, "TTT")
    path = str(tmp_path / "model.weights.h5")
    bare.save_weights(path)
    return bare, path, x, y


def test_a_bare_optimizers_weights_load_whole_and_in_silence(family, written_bare):
    bare, path, x, y = written_bare
    model = adam_model(family)
    train(model, x, y, "T")
    before = scale_state(model.optimizer)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.load_weights(path)
        assert_same(training_state(model), training_state(bare))
        assert scale_state(model.optimizer) == before
    train(model, x, y, "TT")
    train(bare, x, y, "TT")
    assert_same(training_state(model), training_state(bare))


def test_a_true_warning_of_weights_stays(family, written_bare, tmp_path):
    _, path, x, y = written_bare
    unbuilt, built = adam_model(family), adam_model(family)
    with pytest.warns(UserWarning, match="has 2 variables whereas the saved") as w:
        unbuilt.load_weights(path)
    assert len(w) == 1
    train(built, x, y, "T")
    own = str(tmp_path / "own.weights.h5")
    built.save_weights(own)
    built.load_weights(path)
    # A file of a wrapped optimizer, saved before it was built.
    empty = str(tmp_path / "empty.weights.h5")
    adam_model(family).save_weights(empty)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        built.load_weights(empty)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built.load_weights(own)
    assert built.optimizer.iterations.numpy() == 1


def schedule_of(family):
    """Returns a registered learning rate schedule of the user's."""
    schedules, utils = family.keras.optimizers.schedules, family.keras.utils
    home = f"test-{family.name}-schedule"
    utils.get_custom_objects().pop(f"{home}>Mine", None)  # 2.4 registers it once

    @utils.register_keras_serializable(home)
    class Mine(schedules.LearningRateSchedule):
        """A user's schedule."""

        def __init__(self, first):
            self.first = first

        def __call__(self, step):
            return self.first / (1.0 + tf.cast(step, tf.float32))

        def get_config(self):
            return {"first": self.first}

    return Mine(0.05)


@pytest.mark.parametrize("writer", ["save", "ModelCheckpoint"])
def test_a_saved_model_of_a_schedule(family, rng, tmp_path, writer):
    """Keras 2's folders: the inner optimizer's config holds another Keras object."""
    skip_without("weights in TensorFlow's format", family)
    x, y = data(rng, 16)
    inner = family.optimizers.Adam(schedule_of(family))
    model = regression(family, LossScaleOptimizer(inner))
    path = str(tmp_path / "saved")
    if writer == "save":
        train(model, x, y, "TT")
        model.save(path, save_format="tf")
    else:
        written = family.keras.callbacks.ModelCheckpoint(path)
        model.fit(x, y, 16, epochs=2, callbacks=[written], verbose=0, shuffle=False)
    other = family.keras.models.load_model(path)
    other.load_weights(f"{path}/variables/variables").expect_partial()
    assert type(other.optimizer) is type(model.optimizer)
    config = other.optimizer.get_config()
    assert config == model.optimizer.get_config()
    rate = json.loads(json.dumps(config))["inner_optimizer"]["config"]
    assert rate["learning_rate"]["class_name"].endswith("Mine")
    assert scale_state(other.optimizer) == scale_state(model.optimizer)
    for each in (model, other):  # Keras builds a new optimizer at its first step
        train(each, x, y, "T")
    assert_goes_on_equally(model, other, x, y)


def test_a_variable_that_a_loss_scale_creates_later_is_saved(family, rng, tmp_path):
    if family.name != "keras3":
        pytest.skip("Keras 2 lists the variables when it saves")

    def made(value):
        model = regression(family, LossScaleOptimizer(family.optimizers.SGD(), 2.0))
        model.train_on_batch(*data(rng, 16))
        scale = model.optimizer.loss_scale
        scale.later = scale._add_weight("later", value, tf.float32)
        return model

    first, second = made(3.0), made(0.0)
    path = str(tmp_path / "model.weights.h5")
    first.save_weights(path)
    second.load_weights(path)
    assert second.optimizer.loss_scale.later.numpy() == 3.0


def test_a_loss_scale_made_in_a_scope_is_checkpointed(mirrored, tmp_path):
    with mirrored.scope():
        first, second = DynamicLossScale(64.0), DynamicLossScale(8.0)
    first.adjust(False)
    path = tf.train.Checkpoint(scale=first).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(scale=second).read(path).assert_consumed()
    for copy in mirrored.experimental_local_results(second.current_loss_scale):
        assert copy.numpy() == 32.0
