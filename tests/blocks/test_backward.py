"""What goes into a block and comes out (backward, nests, signatures): gradients."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from falling import errors, falling, gradients
from models import compiled, policy_of

import lossscale
from lossscale import ScaledBlock
from lossscale.runtime import kerases

#: Where XLA compiles for long.
MODES_IN_BRIEF = ["eager", "graph"]
HALF = "mixed_float16"


@pytest.fixture
def x(rng):
    return tf.constant(rng.normal(size=(4, 8)).astype(np.float32))


def half(family, make):
    """Returns a layer that computes in float16."""
    with policy_of(family.keras, HALF):
        return make(family.keras.layers)


def held(layer):
    return [kerases.tensor_of(variable) for variable in layer.trainable_variables]


def grads_of(layer, mode, loss_of, sources=()):
    """Returns the gradients of a loss, of `sources` and then of the layer's weights."""

    def step():
        with tf.GradientTape() as tape:
            tape.watch(sources)
            loss = loss_of(layer)
        return tape.gradient(loss, [*sources, *held(layer)])

    return [tf.convert_to_tensor(grad) for grad in compiled(step, mode)()]


def squares(y):
    return tf.reduce_sum(tf.cast(y, tf.float32) ** 2)


def assert_as_bare(family, make, mode, loss_of):
    """A block around a float16 layer has the gradients of a float32 layer like it."""
    layer, bare = half(family, make), make(family.keras.layers)
    block = ScaledBlock(layer)
    for each in (block, bare):
        loss_of(each)  # which builds it
    bare.set_weights(layer.get_weights())
    expected = grads_of(bare, "eager", loss_of)
    assert max(errors(grads_of(block, mode, loss_of), expected)) < 0.02


@pytest.mark.slow
def test_twenty_blocks_that_take_most_of_the_gradient_all_have_theirs(family):
    """Eagerly examples/twenty_blocks.py shows it."""
    expected = gradients(falling(family, "float32", lambda layer: layer))
    bare = falling(family, HALF, lambda layer: layer)
    blocks = falling(family, HALF, ScaledBlock)
    assert max(errors(compiled(gradients, "graph")(blocks), expected)) < 0.05
    for scale in (1.0, 2.0**15):
        found = compiled(gradients, "graph")(bare, scale)
        assert max(errors(found, expected)) == 1


def test_an_overflow_within_a_block_is_no_skipped_step(family, mode, x):
    def make(layers):
        # Takes what comes in 2**10 times back: more than the headroom.
        init = family.keras.initializers.Constant(2.0**7)
        return layers.Dense(8, use_bias=False, kernel_initializer=init)

    def loss_of(layer):
        return squares(layer(x * 2.0**-7))

    block = ScaledBlock(half(family, make))
    loss_of(block)
    found = grads_of(block, mode, loss_of, [x])
    bare = grads_of(make(family.keras.layers), "eager", loss_of, [x])
    assert max(errors(found, bare)) < 0.01

    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD(1.0), 2.0**15)
    before = block.layer.get_weights()[0]
    optimizer.build(block.trainable_variables)

    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(loss_of(block))
        grads = tape.gradient(loss, held(block))
        optimizer.apply_gradients(zip(grads, block.trainable_variables))

    compiled(step, mode)()
    assert int(optimizer.loss_scale.skipped_steps.numpy()) == 0
    moved = before - block.layer.get_weights()[0]
    np.testing.assert_allclose(moved, bare[1].numpy(), rtol=0.02)


@pytest.mark.parametrize("value", [np.inf, np.nan, 0.0])
def test_what_is_not_finite_stays_so_and_zeros_stay_zeros(family, mode, value, x):
    block = ScaledBlock(half(family, lambda layers: layers.Dense(8)))
    block(x)
    found = grads_of(block, mode, lambda b: tf.reduce_sum(b(x)) * value, [x])
    for grad in found:
        if value == 0:
            np.testing.assert_array_equal(grad, np.zeros(grad.shape))
        else:
            assert not np.isfinite(grad).any()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mode", MODES_IN_BRIEF)
def test_statistics_move_once(family, mode, recompute, x):
    norm = half(family, lambda layers: layers.BatchNormalization(momentum=0.5))
    block = ScaledBlock(norm, recompute=recompute)
    block(x)

    def loss_of(layer):
        return tf.reduce_sum(layer(x, training=True) ** 3)

    found = grads_of(block, mode, loss_of, [x])
    mean = norm.get_weights()[2]
    np.testing.assert_allclose(mean, x.numpy().mean(0) / 2, atol=1e-3)
    bare = half(family, lambda layers: layers.BatchNormalization(dtype="float32"))
    expected = grads_of(bare, "eager", loss_of, [x])
    for grad, other in zip(found, expected[:1] + expected[-2:]):
        np.testing.assert_allclose(grad, other, atol=0.1)


def assert_the_same_is_dropped_on_the_way_back(block, mode, x):
    def step():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = block(x, training=True)
        return y, tape.gradient(y, x)

    step = compiled(step, mode)
    masks = []
    for _ in range(2):
        y, grad = step()
        np.testing.assert_array_equal(y.numpy() == 0, grad.numpy() == 0)
        masks.append(y.numpy() == 0)
    assert (masks[0] != masks[1]).any()


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout(family, mode, recompute, x):
    if recompute and family.name != "keras3":
        pytest.skip("Keras 2 draws what no variable keeps")
    layer = half(family, lambda layers: layers.Dropout(0.5, seed=3))
    block = ScaledBlock(layer, recompute=recompute)
    assert_the_same_is_dropped_on_the_way_back(block, mode, x)


def test_a_layers_own_generator(family, mode, x):
    class Drops(family.keras.layers.Layer):
        def call(self, inputs):
            kept = self.generator.uniform(inputs.shape) > 0.5
            return inputs * tf.cast(kept, inputs.dtype)

    layer = half(family, lambda _: Drops())
    layer.generator = tf.random.Generator.from_seed(3)
    block = ScaledBlock(layer, recompute=True)
    assert_the_same_is_dropped_on_the_way_back(block, mode, x)


def test_an_embeddings_gradient_stays_sparse_and_its_mask_is_kept(family, mode):
    ids = tf.constant([[1, 2, 2], [0, 3, 1]])
    block = ScaledBlock(
        half(family, lambda layers: layers.Embedding(5, 4, mask_zero=True))
    )
    y = block(ids)
    np.testing.assert_array_equal(y._keras_mask, ids != 0)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(block(ids)) * 2.0**-60
        return tape.gradient(loss, held(block))[0]

    grad = compiled(step, mode)()
    assert isinstance(grad, tf.IndexedSlices)
    counts = np.array([1, 2, 2, 1, 0])[:, None] * np.ones([5, 4]) * 2.0**-60
    np.testing.assert_array_equal(tf.convert_to_tensor(grad), counts)


@pytest.mark.parametrize("mode", MODES_IN_BRIEF)
def test_several_arguments_by_name_with_masks_and_several_results(family, mode, rng):
    x = tf.constant(rng.normal(size=(2, 5, 8)).astype(np.float32))
    mask = tf.constant(np.tril(np.ones((2, 5, 5), bool)))
    layer = half(family, lambda layers: layers.MultiHeadAttention(2, 4))
    named = {"attention_mask": mask, "return_attention_scores": True}

    def loss_of(attention):
        # The same tensor in two places.
        y, scores = attention(query=x, value=x, **named)
        return squares(y) + tf.reduce_sum(tf.cast(scores, tf.float32) ** 3)

    block = ScaledBlock(layer)
    assert {each.dtype for each in block(x, x, **named)} == {tf.float32}
    # Not Keras's random ones: the gradient of the query's bias is 0, and what float16
    # makes of it depends on them.
    layer.set_weights([rng.normal(0, 0.3, w.shape) for w in layer.get_weights()])
    bare = family.keras.layers.MultiHeadAttention(2, 4)
    bare(x, x)
    bare.set_weights(layer.get_weights())
    found = grads_of(block, mode, loss_of, [x])
    for grad, other in zip(found, grads_of(bare, "eager", loss_of, [x])):
        np.testing.assert_allclose(grad, other, atol=0.02 * float(tf.norm(other) + 1))


@pytest.mark.parametrize("mode", MODES_IN_BRIEF)
def test_nests_in_and_out_with_integers_among_them(family, mode, x):
    class Many(family.keras.layers.Layer):
        def call(self, inputs, factor=None, flag=False):
            y = inputs["a"] * tf.cast(factor, inputs["a"].dtype)
            y = y * tf.cast(inputs["n"], y.dtype)
            return {"y": (y if flag else -y,), "n": inputs["n"] + 1}

    block = ScaledBlock(half(family, lambda _: Many()))
    factor, n = tf.constant(2.0), tf.constant([[1], [2], [3], [4]])

    def loss_of(block):
        found = block({"a": x, "n": n}, factor=factor, flag=True)
        assert found["n"].dtype == tf.int32
        return tf.reduce_sum(found["y"][0])

    of_x, of_factor = grads_of(block, mode, loss_of, [x, factor])
    expected = np.broadcast_to(2 * n.numpy().astype(np.float32), [4, 8])
    np.testing.assert_array_equal(of_x, expected)
    total = float(tf.reduce_sum(x * tf.cast(n, tf.float32)))
    assert float(of_factor) == pytest.approx(total, abs=0.1)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mode", MODES_IN_BRIEF)
def test_blocks_in_blocks_and_shared_weights(family, mode, recompute, x):
    keras = family.keras
    shared = half(family, lambda layers: layers.Dense(8, activation="tanh"))
    last = half(family, lambda layers: layers.Dense(8))
    nested = keras.Sequential([ScaledBlock(shared), last])
    first = ScaledBlock(nested, recompute=recompute)
    second = ScaledBlock(shared, recompute=recompute)
    first(x)

    def loss_of(block):
        return squares(second(block(x))) * 2.0**-60

    found = grads_of(first, mode, loss_of, [x])
    weights = [tf.constant(each) for each in nested.get_weights()]
    with tf.GradientTape() as tape:
        tape.watch([x, *weights])
        a, b, c, d = weights
        y = tf.tanh((tf.tanh(x @ a + b) @ c + d) @ a + b)
        loss = tf.reduce_sum(y**2) * 2.0**-60
    assert max(errors(found, tape.gradient(loss, [x, *weights]))) < 0.01


def test_gradients_of_gradients(family, mode, x):
    def loss_of(layer):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = squares(layer(x))
        return squares(tape.gradient(y, x))

    assert_as_bare(family, lambda each: each.Dense(8, "tanh"), mode, loss_of)


@pytest.mark.parametrize("mode", MODES_IN_BRIEF)
def test_loops_within(family, mode, rng):
    x = tf.constant(rng.normal(size=(2, 5, 8)).astype(np.float32))

    def loss_of(layer):
        return squares(layer(x)) * 2.0**-60

    assert_as_bare(family, lambda each: each.GRU(4), mode, loss_of)


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_weights_that_are_read_again_on_the_way_back(family, mode, x):
    class Again(family.keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = family.keras.layers.Dense(8)

        def call(self, inputs):
            return tf.recompute_grad(self.dense)(inputs)

    block = ScaledBlock(half(family, lambda _: Again()))
    block.layer.dense(x)
    block(x)
    found = grads_of(block, mode, lambda b: tf.reduce_sum(b(x)) * 2.0**-60)
    np.testing.assert_array_equal(found[1], np.full([8], 4 * 2.0**-60))


@pytest.mark.parametrize("mode", MODES_IN_BRIEF)
def test_a_loss_that_a_layer_adds_has_its_gradient(family, mode, x):
    def make(layers):
        return layers.Dense(8, activity_regularizer="l2", use_bias=False)

    def loss_of(layer):
        layer(x)
        return tf.cast(tf.add_n(layer.losses), tf.float32)

    assert_as_bare(family, make, mode, loss_of)


def test_a_layer_of_keras_2_may_branch_in_python(family):
    if family.name == "keras3":
        pytest.skip("Keras 3 rewrites no layer with AutoGraph")

    class Branching(family.keras.layers.Layer):
        def call(self, inputs):
            if tf.reduce_sum(inputs) > 0:
                return inputs * 2
            else:
                return inputs * 3

    block = ScaledBlock(half(family, lambda _: Branching()))
    called = tf.function(block.__call__)
    assert float(called(tf.ones([1]))[0]) == 2
    assert float(called(-tf.ones([1]))[0]) == -3


def test_in_a_graph_of_tensorflow_1(family, x):
    if family.name == "keras3":
        pytest.skip("Keras 3 has no such graphs")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        given = tf.compat.v1.placeholder(tf.float32, [None, 8])
        block = ScaledBlock(half(family, lambda layers: layers.Dense(8)))
        loss = tf.reduce_sum(block(given)) * 2.0**-60
        grads = tf.gradients(loss, block.trainable_variables)
        session.run(tf.compat.v1.global_variables_initializer())
        of_kernel, of_bias = session.run(grads, {given: x.numpy()})
    np.testing.assert_array_equal(of_bias, np.full([8], 4 * 2.0**-60))
    np.testing.assert_allclose(
        of_kernel * 2.0**60, np.repeat(x.numpy().sum(0)[:, None], 8, 1), rtol=0.02
    )
