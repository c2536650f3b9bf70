"""forward_ranges: counts are exact, and the layers that need float32 are named."""

import pickle

import numpy as np
import pytest
import tensorflow as tf
from installed import each_keras
from models import policy_of
from overflowing import made

from lossscale import LossScaleOptimizer, find_nonfinite, forward_ranges


def ranges_of(family, name, **kwargs):
    model, x, _ = made(family, name, **kwargs)
    return forward_ranges(model, x, verbose=0)


def test_float32_models_are_asked_as_well(family):
    assert not find_nonfinite(*made(family, "normalized", policy="float32"))
    found = ranges_of(family, "normalized", policy="float32")
    # Keras 2's variables of float32 stay so: it says that it does not know.
    is_keras3 = family.name == "keras3"
    assert found.is_inside_known == is_keras3
    assert found.need_float32 == (("hot",) if is_keras3 else ())
    outside = ranges_of(family, "nested", policy="float32")
    assert outside.need_float32 == ("encoder/hot", "head")


def test_outputs_and_inputs_are_counted(family):
    """Of the same figures as those of gradients: test_measuring.py has each."""
    layers = family.keras.layers
    with policy_of(family.keras, "mixed_float16"):
        parts = [layers.Dense(2, use_bias=False, name=n) for n in ("first", "second")]
        model = family.keras.Sequential([family.keras.Input((2,)), *parts])
    kernel = np.array([[2.0**10, 0.0], [0.0, 2.0**-30]])
    model.set_weights([kernel, kernel])
    x = np.array([[1.0, 1.0], [2.0**7, 0.0], [2.0**5, 2.0**14]], np.float32)
    found = forward_ranges(model, x, verbose=0, batch_size=2, batches=None)
    assert found.names == ("first, inputs", "first", "second")
    assert found.batches == 2
    assert found.values.tolist() == [6, 6, 6]
    tensors = [x, x @ kernel, x @ kernel @ kernel]
    for number, exact in enumerate(tensors):
        real = exact[exact != 0]
        assert found.largest[number] == np.max(real)
        assert found.overflowing[number] == np.mean(real >= 65520)
    assert found.summary["all"]["values"] == 18
    exponents, counts = found.histogram
    assert counts[0][exponents == 5].tolist() == [1]
    again = pickle.loads(pickle.dumps(found))  # noqa: S301 - its own
    assert again.names == found.names


def test_a_shared_layer_has_a_row_for_each_call_and_a_loop_over_time_has_one(family):
    found = ranges_of(family, "shared")
    rows = dict(zip(found.names, found.overflowing))
    assert (rows["hot"], rows["hot (call 2)"]) == (0, 1)
    assert found.need_float32.count("hot") == 1
    found = ranges_of(family, "cell")
    rows = dict(zip(found.names, found.values))
    # Batch, time and units: Keras 3 calls it once more, for the shape.
    assert rows["rnn/cell/hot"] in {8 * 4 * 4, 8 * 5 * 4}
    assert not any("call 2" in name for name in found.names)


def test_one_overflow_does_not_hide_the_next(family):
    class Sum(family.keras.layers.Layer):
        def call(self, x):
            return tf.math.rsqrt(tf.reduce_sum(tf.square(x * 2000), -1, keepdims=True))

    layers, constant = family.keras.layers, family.keras.initializers.Constant(3e4)
    with policy_of(family.keras, "mixed_float16"):
        hot = layers.Dense(4, kernel_initializer=constant, name="hot")
        norm = layers.LayerNormalization(name="norm", dtype="float32")
        given = [family.keras.Input((6,)), hot, norm, layers.Dense(4), Sum(name="sum")]
        model = family.keras.Sequential(given)
    kernels = model.get_weights()
    kernels[0][:, 0] = 1e3  # else all are equal, and the norm of them 0
    model.set_weights(kernels)
    found = forward_ranges(model, np.ones([8, 6], np.float32), verbose=0)
    assert found.inside == ("sum",)
    assert "hot" in found.need_float32


def test_negative_numbers_alone_are_no_mask(family):
    model = family.keras.Sequential([family.keras.layers.Dense(4, name="hot")])
    model(np.ones([1, 2]))
    model.set_weights([np.full([2, 4], -1e5), np.zeros([4])])
    found = forward_ranges(model, np.ones([1, 2], np.float32), verbose=0)
    assert found.need_float32 == ("hot",)


@pytest.mark.each_version
def test_it_trains_with_the_policies_that_it_gives():
    family = each_keras()[0]
    keras = family.keras
    if not hasattr(getattr(keras, "dtype_policies", None), "DTypePolicyMap"):
        pytest.skip("this Keras has no DTypePolicyMap")
    layers = keras.layers
    with policy_of(keras, "mixed_float16"):
        constant = keras.initializers.Constant(200.0)
        attention = layers.MultiHeadAttention(2, 4, kernel_initializer=constant)
        given = keras.Input((4, 6))
        hidden = layers.Dense(8, kernel_initializer="ones")(given)
        hidden = attention(hidden, hidden)
        inside = [keras.Input((4, 8)), layers.Dense(8), layers.ReLU()]
        inner = keras.Sequential(inside, name="inner")
        pooled = layers.GlobalAveragePooling1D()(inner(hidden))
        tiny = keras.initializers.Constant(2.0**-40)  # for gradients that fit
        last = layers.Dense(1, kernel_initializer=tiny, dtype="float32")
        model = keras.Model(given, last(pooled))
    x, y = np.ones([8, 4, 6], np.float32), np.ones([8, 1], np.float32)
    policies = forward_ranges(model, x, verbose=0).policy_map

    def anew(layer):
        policy = policies[layer.path or layer.name]
        return type(layer).from_config({**layer.get_config(), "dtype": policy})

    keras.config.set_dtype_policy("float32")
    cured = keras.models.clone_model(model, clone_function=anew, recursive=True)
    cured.set_weights(model.get_weights())
    for each, trains in ((model, False), (cured, True)):
        each.compile(LossScaleOptimizer(keras.optimizers.SGD(2.0**-60)), loss="mse")
        assert bool(find_nonfinite(each, x, y)) != trains
        losses = each.fit(x, y, epochs=3, verbose=0).history["loss"]
        assert np.isfinite(losses).all() == trains
    assert cured.layers[1].compute_dtype == "float16"  # what float16 holds stays so


@pytest.mark.parametrize(("home", "named"), [("keras_hub", "block"), ("mine", "wide")])
def test_what_a_library_makes_is_configured_by_its_layer(family, home, named):
    """Of a block from KerasHub the user writes the constructor, of their own all."""
    layers = family.keras.layers

    class Block(layers.Layer):
        def build(self, shape):
            large = family.keras.initializers.Constant(1000.0)
            self.wide = layers.Dense(64, kernel_initializer=large, name="wide")
            self.narrow = layers.LayerNormalization(name="narrow")
            super().build(shape)

        def call(self, inputs):
            return self.narrow(self.wide(inputs))

    Block.__module__ = f"{home}.layers"
    with policy_of(family.keras, "mixed_float16"):
        parts = [family.keras.Input((80,)), Block(name="block")]
        model = family.keras.Sequential(parts)
        found = forward_ranges(model, np.ones([8, 80], np.float32), verbose=0)
    path = "block" if named == "block" else "block/wide"
    assert found.need_float32[0] == path
    assert f"dtype=\"float32\", name='{named}'" in str(found)


def test_keras_2_has_no_policy_map(family):
    if family.name == "keras3":
        pytest.skip("Keras 3 has one")
    with pytest.raises(NotImplementedError, match='Write dtype="float32"'):
        ranges_of(family, "gated").policy_map  # noqa: B018 - it raises


def test_the_picture(family, tmp_path):
    found = ranges_of(family, "gated")
    axes = found.plot(rows=3)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(labels) == 4
    assert any(label == "hot\n100.0% to infinity" for label in labels)
    assert "outputs of layers" in axes.get_xlabel()
    axes.figure.savefig(tmp_path / "picture.png")
    with pytest.raises(ValueError, match="`rows`"):
        found.plot(rows=0)
