"""ScaledBlock as a layer of each Keras (base, keras2, keras3): arguments and files."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from falling import errors, falling, gradients, loss_of
from installed import families
from limits import TENSORFLOW, skip_without
from models import policy_of
from strategies import agreed, scope_of

import lossscale
from lossscale import ScaledBlock
from lossscale.runtime import kerases


def model_of_blocks(family, optimizer=None):
    """Returns a compiled model of two blocks, of layers of several kinds."""
    keras, layers = family.keras, family.keras.layers
    with policy_of(keras, "mixed_float16"):
        first = [layers.Dense(8, "relu"), layers.BatchNormalization()]
        blocks = [
            ScaledBlock(keras.Sequential(first), headroom=5, name="first"),
            ScaledBlock(layers.Dense(4), name="last"),
        ]
        ends = keras.Input((6,)), layers.Dense(1, dtype="float32")
        model = keras.Sequential([ends[0], *blocks, ends[1]])
    rng = np.random.default_rng(3)
    model.set_weights([rng.uniform(0.1, 0.5, w.shape) for w in model.get_weights()])
    loss = keras.losses.MeanSquaredError()
    model.compile(optimizer or family.optimizers.SGD(0.1), loss)
    return model


@pytest.fixture
def xy(rng):
    x = rng.normal(size=(32, 6)).astype(np.float32)
    return x, x[:, :1]


def test_bad_arguments_are_named(family):
    for other in (None, "dense", tf.keras, len):
        with pytest.raises(TypeError, match=r"`layer` must be a Keras layer .* got "):
            ScaledBlock(other)
    layer = family.keras.layers.Dense(1)
    for headroom in (-1, 25, 1.5, float("nan")):
        with pytest.raises(ValueError, match="`headroom` must be a whole number"):
            ScaledBlock(layer, headroom)
    with pytest.raises(TypeError, match="`headroom` must be a number, got 'six'"):
        ScaledBlock(layer, "six")
    with pytest.raises(TypeError, match="`recompute` must be True or False, got 1"):
        ScaledBlock(layer, recompute=1)
    with pytest.raises(ValueError, match=r"`dtype` must not be given.* layer within"):
        ScaledBlock(layer, dtype="float16")
    with pytest.raises(ValueError, match=r"`layer` must not be a ScaledBlock"):
        ScaledBlock(ScaledBlock(layer))


def test_a_layer_of_another_keras_is_refused():
    kinds = {type(ScaledBlock(f.keras.layers.Dense(1))): f for f in families()}
    for block in kinds:
        for other, family in kinds.items():
            if block is not other:
                layer = family.keras.layers.Dense(1)
                with pytest.raises(TypeError, match="`layer` must belong to the Keras"):
                    block(layer)


def test_synchronized_normalization_is_refused_on_replicas(family, mirrored):
    layer = family.keras.layers.BatchNormalization
    try:
        layer = layer(synchronized=True, dtype="mixed_float16")
    except (TypeError, ValueError):
        pytest.skip("this Keras has none")
    with mirrored.scope():
        block = ScaledBlock(layer)
        with pytest.raises(ValueError, match=r"`layer` must not hold .* replicas"):
            mirrored.run(lambda: block(tf.ones([2, 3])))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_what_does_not_compute_in_float16_is_called_as_it_is(family, policy):
    with policy_of(family.keras, policy):
        layer = family.keras.layers.Dense(3)
    block = ScaledBlock(layer)
    x = tf.ones([2, 4])
    bare, wrapped = tf.function(lambda: layer(x)), tf.function(lambda: block(x))
    assert layer(x).dtype == block(x).dtype

    def kinds(function):
        nodes = function.get_concrete_function().graph.get_operations()
        return sorted(node.type for node in nodes)

    assert kinds(bare) == kinds(wrapped)


def test_it_is_named_after_itself_and_has_its_layers_weights(family):
    layer = family.keras.layers.Dense(3)
    block = ScaledBlock(layer)
    block(tf.ones([2, 4]))
    assert block.name.startswith("scaled_block")
    assert isinstance(block, ScaledBlock)
    held, own = layer.trainable_weights, block.trainable_weights
    assert [id(variable) for variable in held] == [id(variable) for variable in own]
    block.trainable = False
    assert not block.trainable_weights


def test_a_config_makes_it_again(family):
    skip_without("its own layers from a config", family)
    layer = family.keras.layers.Dense(3, name="inner")
    block = ScaledBlock(layer, headroom=3, recompute=True, name="block")
    config = block.get_config()
    again = type(block).from_config(config)
    assert (again.headroom, again.recompute, again.name) == (3, True, "block")
    assert again.layer.name == "inner"
    assert again.layer.units == 3
    assert again.get_config() == config == block.get_config()


def test_fit_trains_and_no_step_is_skipped(family, xy):
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.Adam(0.01))
    model = model_of_blocks(family, optimizer)
    losses = model.fit(*xy, epochs=8, verbose=0, shuffle=False).history["loss"]
    assert losses[-1] < losses[0] / 2
    assert int(optimizer.loss_scale.skipped_steps.numpy()) == 0


#: The last is a SavedModel.
KINDS = ["model.keras", "model.h5", "w.weights.h5"]
KINDS.append(pytest.param("model", marks=pytest.mark.slow))


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_comes_back_equal(family, kind, xy, tmp_path):
    if kind == "model" and family.name == "keras3":
        pytest.skip("Keras 3 loads no SavedModel as a model")
    if kind == "model.keras":
        skip_without("its own layers from a config", family)
        if family.name != "keras3" and TENSORFLOW < (2, 12):
            pytest.skip("Keras 2 has this format from TensorFlow 2.12 on")
        # Under mixed_float16 Keras 2 has wrapped SGD.
        skip_without("Keras's own wrapper in a .keras file", family)
    if kind == "model.h5":
        skip_without("Keras's own wrapper in an .h5 file", family)
    model, path = model_of_blocks(family), str(tmp_path / kind)
    model.run_eagerly = True  # nothing here is about graphs, which take longer
    model.fit(*xy, verbose=0)
    expected = model.predict(xy[0], verbose=0)
    if kind == "w.weights.h5":
        model.save_weights(path)
        again = model_of_blocks(family)
        again.run_eagerly = True
        again.fit(*xy, verbose=0)  # older Kerases fail to say that it has no slots
        again.load_weights(path)
    else:
        model.save(path)
        again = family.keras.models.load_model(path)
    again.run_eagerly = True
    np.testing.assert_array_equal(again.predict(xy[0], verbose=0), expected)
    if kind != "w.weights.h5":
        first = again.get_layer("first")
        assert isinstance(first, ScaledBlock)
        assert first.headroom == 5
    # Anew, since Keras 3 builds the optimizer of an .h5 file for no variables.
    again.compile(family.optimizers.SGD(0.1), family.keras.losses.MeanSquaredError())
    again.fit(*xy, verbose=0)


@pytest.mark.slow
def test_a_saved_function_comes_back_equal(family, xy, tmp_path):
    model, path = model_of_blocks(family), str(tmp_path / "saved")
    expected = model.predict(xy[0], verbose=0)
    if family.name == "keras3":
        model.export(path)
    else:
        tf.saved_model.save(model, path)
    loaded = tf.saved_model.load(path)
    found = getattr(loaded, "serve", loaded)(xy[0])
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize(
    "recompute", [False, pytest.param(True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("eagerly", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_replicas_train_as_one_does(family, mirrored, eagerly, recompute, rng):
    skip_without("adding up over replicas", family)
    skip_without("fit over replicas", family)
    x = rng.normal(size=(32, 8)).astype(np.float32) * 2.0**-7
    found = []
    for strategy in (None, mirrored):
        with scope_of(strategy):
            # What comes in is taken 2**10 times back: the first attempt overflows.
            init = family.keras.initializers.Constant(2.0**7)
            with policy_of(family.keras, "mixed_float16"):
                dense = family.keras.layers.Dense(8, kernel_initializer=init)
                block = ScaledBlock(dense, recompute=recompute)
                model = family.keras.Sequential([family.keras.Input((8,)), block])
            optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD(1.0))
            model.compile(optimizer, "mse", run_eagerly=eagerly)
        model.fit(x, x, batch_size=8, verbose=0, shuffle=False)
        found.append([agreed(strategy, each) for each in model.weights])
        assert int(optimizer.iterations.numpy()) == 4
    assert np.abs(found[0][0] - 2.0**7).max() > 0.01
    for one, two in zip(*found):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("way", ["keras2", "keras3"])
@pytest.mark.parametrize("eagerly", [False, True])
def test_with_a_loss_scale_the_two_scales_multiply(family, way, eagerly):
    blocks = falling(family, "mixed_float16", ScaledBlock, blocks=6)
    expected = gradients(falling(family, "float32", lambda layer: layer, blocks=6))
    before = blocks.get_weights()
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD(2.0**10), 2.0**13)
    optimizer.build(blocks.trainable_variables)

    def step():
        # The loss is taken times the scale within, and not divided there.
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(loss_of(blocks))
        held = [kerases.tensor_of(each) for each in blocks.trainable_variables]
        grads = tape.gradient(loss, held)
        if way == "keras2":
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(zip(grads, blocks.trainable_variables))

    (step if eagerly else tf.function(step))()
    moved = [old - new for old, new in zip(before, blocks.get_weights())]
    # The last ones: of the others a weight of float32 takes no notice.
    found, wanted = moved[-2:], [grad * 2.0**10 for grad in expected[-2:]]
    assert max(errors(found, wanted)) < 0.05


@pytest.mark.parametrize(
    "is_wrapped", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_gradient_ranges_names_the_blocks_that_no_single_scale_serves(
    family, is_wrapped, rng
):
    def wrap(layer):
        return ScaledBlock(layer, name=layer.name) if is_wrapped else layer

    x = rng.normal(size=(16, 8)).astype(np.float32)
    few = falling(family, "float32", lambda layer: layer, blocks=5)
    ranges = lossscale.gradient_ranges(few, x, x, loss="mse", verbose=0)
    assert ranges.need_own_scale == ()
    assert "ScaledBlock" not in str(ranges)

    model = falling(family, "mixed_float16", wrap)
    ranges = lossscale.gradient_ranges(model, x, x, loss="mse", verbose=0)
    found = ranges.by_block
    assert found.names == tuple(f"dense_{number}" for number in range(20))
    np.testing.assert_array_equal(found.values, 64)
    assert ranges.need_own_scale == tuple(f"dense_{n}" for n in range(11))
    assert "Wrap each in a ScaledBlock: dense_0, dense_1, " in str(ranges)
    assert found.at(2.0**40).need_own_scale == ranges.need_own_scale
