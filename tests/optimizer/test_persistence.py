"""Configs, bare optimizers' files, and what a file asks of who reads it.

That every route keeps the whole state is in test_routes.py.
"""

import copy
import json
import warnings

import pytest
import tensorflow as tf
from every_loss_scale import PAGE
from limits import skip_without
from models import assert_same, data, regression, scale_state, training_state
from processes import printed

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer


def with_other_arguments(family):
    rule = {"multiplier": 4.0, "backoff_factor": 0.5, "hysteresis": 2}
    scale = DynamicLossScale(2.0**12, 3, hysteresis_reset=["good"], **rule)
    return LossScaleOptimizer(family.optimizers.Adam(0.05), scale, name="mine")


def adam_model(family, wrap=True):
    """Returns a model with Adam, wrapped with what is the default or bare."""
    optimizer = family.optimizers.Adam(0.05)
    optimizer = LossScaleOptimizer(optimizer) if wrap else optimizer
    return regression(family, optimizer, run_eagerly=True)


def train(model, batch, steps):
    for _ in range(steps):
        model.train_on_batch(*batch)


@pytest.mark.peer_defect(11)
@pytest.mark.parametrize("wraps", [(False, True), (True, False)], ids=str)
def test_a_checkpoint_is_read_by_a_bare_optimizer_and_by_a_wrapped_one(
    family, rng, tmp_path, wraps
):
    """Through `inner_optimizer` where it is Keras 3's."""
    batch, checkpoints = data(rng, 16), []
    models = [adam_model(family, wrap) for wrap in wraps]
    for model, steps in zip(models, (2, 1)):
        train(model, batch, steps)
        # A wrapper of Keras 2 is saved as if it were the inner optimizer.
        name = "inner_optimizer" if family.name == "keras3" else ""
        optimizer = getattr(model.optimizer, name, model.optimizer)
        checkpoints.append(tf.train.Checkpoint(model=model, optimizer=optimizer))
    path = checkpoints[0].write(str(tmp_path / "checkpoint"))
    checkpoints[1].read(path).expect_partial()
    for _ in range(2):
        assert_same(*map(training_state, models))
        for model in models:
            train(model, batch, 2)


@pytest.mark.smoke
@pytest.mark.each_keras
def test_a_config_through_json(family):
    first, optimizers = with_other_arguments(family), family.keras.optimizers
    written = json.dumps(first.get_config())
    config = json.loads(written)
    by_keras = json.dumps(optimizers.serialize(first), default=float)
    configs = [config]
    if family.name != "keras3":  # older files of Keras 2 do not name a module
        old = {k: config["inner_optimizer"][k] for k in ("class_name", "config")}
        configs.append({**config, "inner_optimizer": old})
    for second in (
        *map(LossScaleOptimizer.from_config, configs),
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


#: An option, its value, and what a config holds of it: nothing of a function.
OPTIONS = [
    ("nonfinite_loss", "skip", "skip"),
    ("communication_dtype", tf.float16, "float16"),
    ("gather", tf.identity, None),
]


@pytest.mark.every
@pytest.mark.parametrize(("name", "value", "written"), OPTIONS)
def test_an_option_is_in_a_config_only_if_it_is_set_and_always_in_copies(
    family, name, value, written
):
    keras = family.keras

    def made(**options):
        return LossScaleOptimizer(family.optimizers.SGD(0.25), "dynamic", **options)

    def option_of(optimizer):
        return optimizer.engine._options().get(name)

    optimizer, kept = made(**{name: value}), written or value
    assert name not in made().get_config()
    assert name not in repr(made())
    assert f"{name}={kept!r}" in repr(optimizer)
    config = json.loads(json.dumps(optimizer.get_config()))
    assert config.get(name) == written
    by_keras = keras.optimizers.serialize(optimizer)
    for again in (
        LossScaleOptimizer.from_config(config),
        keras.optimizers.deserialize(by_keras),
    ):
        assert option_of(again) == written
        assert again.get_config() == optimizer.get_config()
    if name != "gather":
        own = keras.mixed_precision.LossScaleOptimizer(family.optimizers.SGD(0.25))
        assert option_of(LossScaleOptimizer.from_keras(own, **{name: value})) == kept
    assert option_of(optimizer.with_loss_scale("dynamic")) == kept
    skip_without("copying", family)
    assert option_of(copy.deepcopy(made(**{name: value}))) == kept


def test_a_class_of_the_users_is_found_by_its_name_or_if_it_is_registered(family):
    keras = family.keras
    home = keras.saving if family.name == "keras3" else keras.utils

    class Mine(PAGE.Halving):
        """A user's loss scale."""

    @home.register_keras_serializable(f"test-{family.name}")
    class Registered(PAGE.Halving):
        """A user's loss scale, registered."""

    def config_of(cls):
        optimizer = LossScaleOptimizer(family.optimizers.SGD(0.1), cls(4.0))
        return json.loads(json.dumps(optimizer.get_config()))

    read = LossScaleOptimizer.from_config
    with pytest.raises(ValueError, match="custom_objects"):
        read(config_of(Mine))
    found = [read(config_of(Mine), custom_objects={"Mine": Mine})]
    with keras.utils.custom_object_scope({"Mine": Mine}):
        found.append(read(config_of(Mine)))
    found.append(read(config_of(Registered)))
    assert [type(each.loss_scale) for each in found] == [Mine, Mine, Registered]
    for cls in (FixedLossScale, DynamicLossScale):
        assert home.get_registered_name(cls) == f"lossscale>{cls.__name__}"


@pytest.mark.slow
def test_a_keras_file_loads_where_only_lossscale_was_imported(family, rng, tmp_path):
    skip_without("an optimizer in a .keras file", family)
    model = regression(family, with_other_arguments(family))
    train(model, data(rng, 16), 4)
    path, optimizer = str(tmp_path / "model.keras"), model.optimizer
    model.save(path)
    script = f"""
import json
import lossscale
import {family.keras.__name__.split(".")[0]} as keras
config = json.loads({json.dumps(optimizer.get_config())!r})
# safe_mode is on: nothing in the file needs code that it brings along.
found = keras.models.load_model({path!r}).optimizer
optimizer = lossscale.LossScaleOptimizer.from_config(config)
assert optimizer.get_config() == found.get_config() == config
print(type(found).__name__, float(found.loss_scale))
"""
    expected = f"{type(optimizer).__name__} {float(optimizer.loss_scale)}"
    assert printed("-c", script).split("\n")[-2] == expected


def test_weights_of_a_bare_optimizer_load_whole_and_in_silence(family, rng, tmp_path):
    """And what really is amiss is warned of."""
    if family.name != "keras3":
        pytest.skip("in Keras 2's files a wrapper looks like the inner optimizer")
    batch, bare, model = data(rng, 16), adam_model(family, False), adam_model(family)
    of_bare, own, of_unbuilt = (
        str(tmp_path / f"{name}.weights.h5") for name in ("bare", "own", "unbuilt")
    )
    train(bare, batch, 3)
    train(model, batch, 1)
    bare.save_weights(of_bare)
    model.save_weights(own)
    adam_model(family).save_weights(of_unbuilt)
    before = scale_state(model.optimizer)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.load_weights(of_bare)
        assert_same(training_state(model), training_state(bare))
        assert scale_state(model.optimizer) == before
    for each in (bare, model):
        train(each, batch, 2)
    assert_same(training_state(model), training_state(bare))
    with pytest.warns(UserWarning, match="has 2 variables whereas the saved") as told:
        adam_model(family).load_weights(of_bare)
    assert len(told) == 1
    model.load_weights(of_bare)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        model.load_weights(of_unbuilt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_weights(own)
    assert model.optimizer.iterations.numpy() == 1
