"""gradient_ranges: float32's gradients, counted exactly, and a model left as it was."""

import numpy as np
import pytest
import tensorflow as tf
from installed import each_keras, families
from models import FEATURES, policy_of, regression

from lossscale import LossScaleOptimizer, gradient_ranges
from lossscale.ranges import exponents
from lossscale.runtime.keras_versions import tensor_of

ROWS = 96


@pytest.fixture
def data():
    """Returns numbers whose gradients are exact in float32, and not in float16."""
    rng = np.random.default_rng(5)
    x = rng.integers(0, 4, [ROWS, FEATURES]) / 2
    y = rng.integers(-8, 8, [ROWS, 1]) + 2.0**-7
    return x.astype(np.float32), y.astype(np.float32)


def network(family, loss_scale=1.0, policy="mixed_float16", **arguments):
    """Returns the network with weights that are few bits each."""
    inner = family.optimizers.SGD(2.0**-12)
    model = regression(
        family, LossScaleOptimizer(inner, loss_scale), policy, **arguments
    )
    rng = np.random.default_rng(6)
    model.set_weights([rng.integers(-3, 4, w.shape) / 4 for w in model.get_weights()])
    return model


def by_hand(model, x, y):
    """Returns the gradients of variables and outputs, computed by NumPy in float64."""
    kernel1, bias1, kernel2, bias2 = np.array(model.get_weights(), object)
    hidden = x.astype(np.float64) @ kernel1 + bias1
    active = np.maximum(hidden, 0)
    outer = 2 * (active @ kernel2 + bias2 - y) / len(x)
    inner = outer @ kernel2.T
    before = inner * (hidden > 0)
    return [x.T @ before, before.sum(0), active.T @ outer, outer.sum(0), inner, outer]


def test_against_numpy(family, data):
    """test_exponents.py says what is counted of an array."""
    model = network(family)
    batches = zip(*(np.split(each, 3) for each in data))
    parts = zip(*(by_hand(model, *batch) for batch in batches))
    rows = [np.concatenate([part.ravel() for part in row]) for row in parts]
    scale = 2.0**-22  # a scale at which each thing happens to some
    found = gradient_ranges(
        model, *data, activations=True, loss_scale=scale, batches=None, verbose=0
    )
    layers = [layer.name for layer in model.layers if layer.weights]
    names = [f"{name}/{kind}" for name in layers for kind in ("kernel", "bias")]
    assert [*found.names] == [*names, *(f"output of {name}" for name in layers)]
    assert found.batches == 3
    for number, row in enumerate(rows):
        assert np.float32(row).astype(np.float64).tolist() == row.tolist()  # exact
        counts, largest = exponents.count(tf.constant(row, tf.float32))
        np.testing.assert_array_equal(found.counts[1.0][number], counts)
        assert found.largest[number] == largest == np.max(np.abs(row))
        seen, real = exponents.tally(counts.numpy(), -22), np.sum(row != 0)
        assert found.zeros[number] == np.mean(row == 0)
        for kind in ("flushed", "subnormal", "overflowing"):
            assert getattr(found, kind)[number] == seen[kind] / real
        assert found.largest_exponent[number] == np.floor(np.log2(largest))
        room = np.log2(65504 / scale / largest)
        np.testing.assert_allclose(found.headroom[number], room)
    assert 0 < found.flushed.max() < 1
    assert found.subnormal.max() > 0
    safe, largest = found.largest_safe_scale, found.largest.max()
    assert safe == 2.0 ** exponents.largest_safe_power(largest)
    assert found.recommended_scale == safe / 2
    assert not found.at(safe).overflowing.any()
    assert found.at(2 * safe).overflowing.any()


def test_at_the_recommended_scale_float16_loses_what_is_said(family):
    model, rng = network(family), np.random.default_rng(8)
    model.set_weights([rng.normal(0, 0.3, w.shape) for w in model.get_weights()])
    x, errors = rng.normal(0, 2.0**-9, [2, 32, FEATURES]).astype(np.float32)
    y = model.predict(x, verbose=0) + errors[:, :1]
    found = gradient_ranges(model, x, y, verbose=0)
    assert found.flushed.max() > 0.1  # there is something to save
    best = found.at(found.recommended_scale)
    assert best.flushed.max() < 0.02
    assert not best.overflowing.any()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        loss *= found.recommended_scale
    grads = tape.gradient(loss, list(map(tensor_of, model.trainable_variables)))
    reported = np.ceil((best.zeros + best.flushed) * best.values)
    for grad, most in zip(grads, reported):
        assert np.isfinite(grad.numpy()).all()
        assert np.sum(grad.numpy() == 0) <= most


def test_all_is_in_float32(family, recwarn):
    layers = family.keras.layers
    with policy_of(family.keras, "mixed_float16"):
        first = layers.Dense(4, kernel_regularizer="l2")  # and no Input
        norm, last = layers.BatchNormalization(), layers.Dense(1, dtype="float32")
        model = family.keras.Sequential([first, norm, layers.Dropout(0.5), last])
    model.compile(LossScaleOptimizer(family.optimizers.SGD(), 256), loss="mse")
    rng = np.random.default_rng(9)
    # In float16 this would be infinite: in the input, and on the way back.
    x, y = 1e6 * rng.normal(size=[64, FEATURES]), 1e6 * rng.normal(size=[64, 1])
    found = gradient_ranges(model, x, y, activations=True, verbose=0)
    assert not found.nonfinite.any()
    assert found.largest.max() > 65520
    assert not [w for w in recwarn if "16 bits" in str(w.message)]
    assert found.loss_scale == 256
    assert "batch_normalization" in " ".join(found.names)


@pytest.fixture(scope="module")
def newest():
    return families()[0]


def same(first, second):
    return first.names == second.names and all(
        np.array_equal(first.counts[key], second.counts[key]) for key in first.counts
    )


def test_whatever_holds_the_data(newest, data):
    model, (x, y) = network(newest), data

    def whole(family):
        class Whole(family.keras.utils.Sequence):  # Keras 3's PyDataset
            def __len__(self):
                return 3

            def __getitem__(self, index):
                part = slice(32 * index, 32 * index + 32)
                return x[part], y[part]

        return Whole()

    by_arrays = gradient_ranges(model, x, y, verbose=0)
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(32)
    for given in (dataset, dataset.repeat(), *map(whole, each_keras())):
        assert same(gradient_ranges(model, given, batches=3, verbose=0), by_arrays)
    others, loss = (tf.constant(x), y.astype(np.float64)), "mse"
    for named in ({"batch_size": 32}, {"loss": loss}):
        assert same(gradient_ranges(model, *others, **named, verbose=0), by_arrays)
    weighted = gradient_ranges(model, x, y, np.full([ROWS], 2.0), verbose=0)
    assert (weighted.largest == 2 * by_arrays.largest).all()


def test_the_loss_scale_is_the_optimizers_or_any_other(newest, data):
    model = network(newest, 512.0, policy="float32")
    plain = gradient_ranges(model, *data, verbose=0)
    assert plain.loss_scale == 512
    found = gradient_ranges(model, *data, loss_scale=1.5 * 2.0**-19, verbose=0)
    assert found.counts.keys() == {1.0, 1.5}
    assert (plain.at(2.0**-19).flushed >= found.flushed).all()
    assert (found.flushed >= plain.at(2.0**-18).flushed).all()
    assert (found.at(3.0).headroom == found.at(1.5).headroom - 1).all()
    with pytest.raises(ValueError, match=r"`loss_scale` must be a power of two, got 3"):
        plain.at(3.0)
    keras_own = newest.keras.mixed_precision.LossScaleOptimizer
    bare = newest.optimizers.SGD()
    for optimizer, scale in ((bare, 1), (keras_own(bare, initial_scale=64), 64)):
        model.compile(optimizer, loss="mse")
        assert gradient_ranges(model, *data, verbose=0).loss_scale == scale


def test_what_is_not_finite_in_float32_is_named(newest, data):
    model = network(newest)
    x, y = data[0].copy(), data[1]
    x[-1, 2] = np.inf  # in the last batch
    found = gradient_ranges(model, x, y, verbose=0)
    assert found.nonfinite.sum() > 0
    assert found.largest_safe_scale is found.recommended_scale is None
    table = str(found)
    assert "Not finite in float32, so no loss scale helps" in table
    for name, number in zip(found.names, found.nonfinite):
        assert (f"{name} (" in table.splitlines()[-1]) == (number > 0)
    # Nor does the picture show them as healthy.
    labels = found.plot().get_yticklabels()[::-1]
    for label, number in zip(labels[1:], found.nonfinite):
        assert label.get_text().endswith("inf or NaN") == (number > 0)
        assert (label.get_color() == "tab:red") == (number > 0)
    column = table.splitlines()[2].split("inf, NaN")[0]
    every = [*found.nonfinite, sum(found.nonfinite)]
    for row, number in zip(table.splitlines()[3:], every):
        assert row[: len(column) + 8].split()[-1] == f"{number:,}"


def test_layers_too_far_apart_for_one_scale(newest):
    dense = newest.keras.layers.Dense
    names = ("near", "far")
    given = newest.keras.Input((1,))
    layers = [dense(1, use_bias=False, name=name) for name in names]
    model = newest.keras.Model(given, [layer(given) for layer in layers])
    model.set_weights([np.zeros([1, 1])] * 2)

    def loss(expected, predicted):
        return expected * predicted

    x = np.ones([8, 1], np.float32)
    for factor in (2.0**-10, 2.0**-45):
        losses = {"loss": [loss, loss]}
        model.compile(**losses)
        found = gradient_ranges(model, x, [x, x * factor], verbose=0)
        is_apart = "The layers are too far apart for one loss scale" in str(found)
        assert is_apart == (factor < 2.0**-40)
    assert "of far/kernel to zero" in str(found)
    assert "HeadroomLossScale() keeps the scale as high" in str(found)


def test_gradients_that_are_all_zero(newest):
    model = network(newest)
    zeros = np.zeros([8, FEATURES], np.float32)
    model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
    found = gradient_ranges(model, zeros, np.zeros([8, 1]), verbose=0)
    assert found.zeros.tolist() == [1.0] * 4
    assert np.isnan(found.flushed).all()
    assert found.largest_safe_scale is None
    assert "All gradients are zero." in str(found)
    assert found.plot() is not None


def test_layers_shared_sparse_recurrent_and_unused(family):
    layers = family.keras.layers

    class Shared(family.keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = layers.Embedding(10, 4, name="embedding")
            self.loop = layers.SimpleRNN(4, name="loop")
            self.dense = layers.Dense(4, name="twice")
            self.last = layers.Dense(1, name="last")
            self.unused = layers.Dense(2, name="unused")

        def build(self, _=None):
            self.unused.build([None, 2])
            self.built = True

        def call(self, x):
            inner = self.loop(self.embedding(x))
            return self.last(self.dense(self.dense(inner)))

    x = np.array([[1, 1, 2], [3, 1, 1]])
    y = np.ones([2, 1], np.float32)
    found = gradient_ranges(Shared(), x, y, loss="mse", activations=True, verbose=0)
    values = dict(zip(found.names, found.values.tolist()))
    named = {name.split("/", 1)[-1]: n for name, n in values.items()}
    assert named["embeddings"] == 6 * 4 or named["embedding/embeddings"] == 6 * 4
    assert values["output of twice"] == 2 * (2 * 4)
    assert values["output of loop"] == 2 * 4
    assert not found.nonfinite.any()
    assert not any("unused" in name for name in found.names)


def test_a_model_that_casts_by_itself_is_reported(newest):
    def casting(x):
        return tf.cast(tf.cast(x, tf.float16), tf.float32)

    layers = newest.keras.layers
    parts = [layers.Dense(2), layers.Activation(casting), layers.Dense(1)]
    model = newest.keras.Sequential(parts)
    x, y = np.ones([4, 3], np.float32), np.ones([4, 1], np.float32)
    with pytest.warns(UserWarning, match="compute gradients in 16 bits"):
        gradient_ranges(model, x, y, loss="mse", verbose=0)


def test_the_table_and_the_bar(newest, data, capsys):
    model = network(newest, 2.0**15)
    found = gradient_ranges(model, *data)
    assert "3/3" in capsys.readouterr().out
    lines = str(found).splitlines()
    assert "Gradients of 3 batches in float32" in lines[0]
    assert lines[0].endswith("at loss scale 2**15:")
    assert [line.split()[0] for line in lines[3:8]] == [*found.names, "all"]
    assert lines[3].split()[1] == f"{found.values[0]:,}"
    safe = int(np.log2(found.largest_safe_scale))
    assert f"Largest safe scale: 2**{safe}. Recommended: 2**{safe - 1}," in lines[-1]
    summary = found.summary
    assert summary["all"]["values"] == found.values.sum()
    assert summary[found.names[0]]["headroom"] == found.headroom[0]
    assert "rows=4, batches=3" in repr(found)
