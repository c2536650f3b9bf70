"""Variables in float16: one warning, and none where float16 does no harm to them."""

import numpy as np
import pytest
import tensorflow as tf
from exact import heard
from models import compiled_by, policy_of, variable_of

import lossscale
from lossscale import LossScaleOptimizer
from lossscale.runtime import float16_weights

TOLD = "Trainable variables are float16"
X = np.random.default_rng(0).normal(size=[8, 4]).astype("float32")
Y = X[:, :1]


def said_in(act):
    with heard() as messages:
        act()
    return messages


def fit(model, optimizer, mode="eager"):
    model.compile(LossScaleOptimizer(optimizer), "mse", **compiled_by(mode))
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    model.fit(X, Y, batch_size=8, verbose=0)


def network(family, policy, *layers):
    dense = family.keras.layers.Dense
    with policy_of(family.keras, policy):
        made = [family.keras.Input((4,)), *layers, dense(4), dense(1)]
        return family.keras.Sequential(made)


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
@pytest.mark.parametrize("policy", ["float16", "set_floatx"])
@pytest.mark.parametrize("run_as", ["eager", "graph"])
def test_weights_in_float16_are_told_once(family, policy, optimizer, run_as):
    backend = family.keras.backend
    if policy == "set_floatx":
        backend.set_floatx("float16")
    try:
        with policy_of(family.keras, "float16"):
            model = network(family, "float16")
        inner = getattr(family.optimizers, optimizer)(1e-3)
        (text,) = said_in(lambda: fit(model, inner, run_as))
    finally:
        backend.set_floatx("float32")
    assert text.startswith(TOLD)
    for words in ("/kernel, ", "and 1 more", "is lost", '"mixed_float16"'):
        assert words in text


def test_only_what_is_trained_is_told(family):
    base = family.keras.layers.Dense(4, dtype="float16")
    for is_trainable in (False, True):
        model = network(family, "mixed_float16", base)
        base.trainable = is_trainable
        told = said_in(lambda m=model: fit(m, family.optimizers.Adam(1e-3)))
        assert len(told) == is_trainable
    frozen = variable_of(family, [1.0, 2.0], "float16", "frozen")
    weight = variable_of(family, [1.0, 2.0], "float32", "weight")
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.1), 1.0)
    optimizer.build([frozen, weight])
    optimizer.scale_loss(1.0)
    pairs = [(None, frozen), (tf.constant([1.0, 1.0]), weight)]
    assert not said_in(lambda: optimizer.apply_gradients(pairs))


def test_an_optimizer_with_float32_copies_is_not_told(family):
    model, inner = network(family, "float16"), family.optimizers.SGD(0.1)
    inner.copies = [tf.Variable(tf.zeros(v.shape)) for v in model.trainable_variables]
    assert not said_in(lambda: fit(model, inner))


def test_float32_slots_of_float32_variables_are_no_copies(family):
    """Adafactor's slots of a kernel have the shape of the other layer's bias."""
    kind = getattr(family.optimizers, "Adafactor", family.optimizers.Adam)
    dense = family.keras.layers.Dense
    wide, narrow = dense(4, dtype="float32"), dense(4, dtype="float16")
    model = network(family, "float32", wide, narrow)
    (text,) = said_in(lambda: fit(model, kind(1e-3)))
    assert narrow.name in text
    assert wide.name + "/" not in text


@pytest.mark.parametrize("holds", [list, lambda copies: dict(enumerate(copies))])
def test_copies_of_some_leave_the_others_named(family, holds):
    narrow = [
        variable_of(family, [1.0, 2.0], "float16", name) for name in ("one", "two")
    ]
    inner = family.optimizers.SGD(0.1)
    inner.copies = holds([tf.Variable([1.0, 2.0]), tf.Variable(0.0)])
    assert float16_weights.float16_names(inner, narrow) == "two"


def test_slots_that_are_looked_up_by_name_are_found():
    optimizer = tf.compat.v1.train.MomentumOptimizer(1.0, 0.9)
    narrow = tf.Variable([1.0, 2.0], dtype=tf.float16, name="narrow")
    assert float16_weights.float16_names(optimizer, [narrow]) == "narrow"
    optimizer.apply_gradients([(tf.constant([0.0, 0.0], tf.float16), narrow)])
    assert float16_weights.float16_names(optimizer, [narrow]) == "narrow"
    optimizer.copies = [tf.Variable([1.0, 2.0])]
    assert float16_weights.float16_names(optimizer, [narrow]) == ""


def test_the_dtype_counts_in_which_a_variable_is_kept(family):
    """Within a layer's `call` Keras 3 says float16 of variables in float32."""
    seen = []

    class Looks(family.keras.layers.Dense):
        def call(self, x):
            seen.append(float16_weights.float16_names(None, [self.kernel]))
            return super().call(x)

    others = ["float32", "mixed_float16", "bfloat16", "mixed_bfloat16"]
    for policy in (*others, "float16"):
        with policy_of(family.keras, policy):
            layer = Looks(4)
        layer.build((2, 4))
        layer(tf.ones([2, 4]))
    assert seen[:-1] == [""] * len(others)
    assert seen[-1].endswith("kernel")


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
def test_find_nonfinite_says_the_same(family, policy):
    model = network(family, policy)
    model.compile(LossScaleOptimizer(family.optimizers.SGD(1e-3), 1.0), "mse")
    found = lossscale.find_nonfinite(model, X, Y)
    assert not found
    assert (TOLD in str(found)) == (policy == "float16")
    assert ("Nothing is at fault" in str(found)) == (policy == "mixed_float16")
