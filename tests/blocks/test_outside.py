"""Tensors that a block's layer reads from outside (outside, reads, tapes)."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import compiled, policy_of

from lossscale import ScaledBlock
from lossscale.runtime import kerases

MODES = ["eager", "graph", "xla"]
#: A gradient that no float16 holds.
TINY = 2.0**-60
X = np.array([[1.0, 2.0, 3.0]], np.float32)
V = np.array([1.0, 2.0, 4.0], np.float32)
pytestmark = pytest.mark.compiled_once
recomputed = pytest.mark.parametrize("recompute", [False, True])


class Elsewhere:
    """Holds a tensor where nobody looks for one."""


def layer_of(family, read):
    """Returns a float16 layer that multiplies by a weight and another tensor.

    Args:
      family: The Keras.
      read: Returns that, given the layer.
    """

    class Reading(family.keras.layers.Layer):
        def build(self, _):
            self.scale = self.add_weight(shape=(3,), initializer="ones", name="scale")
            self.built = True

        def call(self, inputs):
            factor = tf.cast(read(self), inputs.dtype)
            return inputs * tf.cast(self.scale, inputs.dtype) * factor

    with policy_of(family.keras, "mixed_float16"):
        layer = Reading()
    layer.w = tf.ones([3])
    return layer


def block_of(family, recompute=False):
    """Returns a block that reads `layer.w`, that layer, and a variable."""
    layer = layer_of(family, lambda layer: layer.w)
    block = ScaledBlock(layer, recompute=recompute)
    block(tf.constant(X))
    return block, layer, tf.Variable(V)


def assert_grads(found, *expected):
    assert len(found) == len(expected)
    for grad, other in zip(found, expected):
        np.testing.assert_array_equal(grad, np.multiply(other, TINY))


@recomputed
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["here", "in a function", "before the tape"])
def test_what_an_attribute_holds_has_its_gradient(family, mode, place, recompute):
    block, layer, v = block_of(family, recompute)

    def loss_of(x):
        return tf.reduce_sum(block(x)) * TINY

    def step():
        doubled = v * 2.0
        with tf.GradientTape() as tape:
            tape.watch(doubled)
            layer.w = doubled if place == "before the tape" else v * 2.0
            # Traced anew at each call, as it captures what is here.
            loss = (tf.function(loss_of) if "function" in place else loss_of)(X)
        source = doubled if place == "before the tape" else v
        return tape.gradient(loss, [source, kerases.tensor_of(layer.scale)])

    step = compiled(step, mode)
    for _ in range(2):
        factor = 1.0 if place == "before the tape" else 2.0
        assert_grads(step(), X[0] * factor, X[0] * V * 2.0)


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_within_branches_and_loops(family, mode):
    block, layer, v = block_of(family)

    def add(count, loss):
        return count + 1, loss + tf.reduce_sum(block(tf.constant(X))) * TINY

    def step(is_loop):
        with tf.GradientTape() as tape:
            layer.w = v * 2.0
            if is_loop:
                zero = (0, 0.0)
                _, loss = tf.while_loop(
                    lambda count, _: count < 2, add, zero, maximum_iterations=2
                )
            else:
                loss = tf.cond(v[0] > 0.0, lambda: add(0, 0.0)[1], lambda: 0.0)
        return tape.gradient(loss, [v])

    assert_grads(compiled(lambda: step(False), mode)(), X[0] * 2.0)
    assert_grads(compiled(lambda: step(True), mode)(), X[0] * 4.0)


def test_without_a_tape(family):
    block, layer, v = block_of(family)

    @tf.function
    def step():
        layer.w = v * 2.0
        return tf.gradients(tf.reduce_sum(block(tf.constant(X))) * TINY, [v])

    assert_grads(step(), X[0] * 2.0)


@recomputed
@pytest.mark.parametrize("mode", MODES)
def test_each_call_has_what_its_attribute_held_then(family, mode, recompute):
    block, layer, v = block_of(family, recompute)
    x = tf.constant(X)

    def step():
        with tf.GradientTape() as tape:
            layer.w = v * 2.0
            y = block(x)
            layer.w = v * 8.0
            loss = tf.reduce_sum(y + block(y)) * TINY
            layer.w = None
        grad = tape.gradient(loss, v)
        assert layer.w is None
        return [grad]

    # 2 x v + 16 x v**2
    assert_grads(compiled(step, mode)(), X[0] * (2.0 + 32.0 * V))


@recomputed
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("kind", ["list", "closure", "partial", "inner layer"])
def test_where_it_may_be_held(family, mode, kind, recompute):
    held = [None]

    def read(layer):
        return layer.ws["a"][0] if kind == "list" else layer.w

    layer = layer_of(family, read if kind != "closure" else lambda _: held[0])
    outer = layer
    if kind == "inner layer":
        outer = family.keras.Sequential([ScaledBlock(layer), layer])
    block, v = ScaledBlock(outer, recompute=recompute), tf.Variable(V)

    def step():
        with tf.GradientTape() as tape:
            held[0] = w = v * 2.0
            layer.ws, layer.w = {"a": [w]}, w
            if kind == "closure":
                layer.ws = layer.w = None
            loss = tf.reduce_sum(block(tf.constant(X))) * TINY
        return [tape.gradient(loss, v)]

    layer.ws, held[0] = {"a": [tf.ones([3])]}, tf.ones([3])
    block(tf.constant(X))
    of_square = X[0] * 8.0 * V  # (2 v)**2
    expected = of_square if kind == "inner layer" else X[0] * 2.0
    assert_grads(compiled(step, mode)(), expected)


@recomputed
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_is_read_from_elsewhere_is_an_error(family, mode, recompute):
    elsewhere = Elsewhere()
    block = ScaledBlock(layer_of(family, lambda _: elsewhere.w), recompute=recompute)
    x, v = tf.constant(X), tf.Variable(V)

    def step(factor):
        with tf.GradientTape() as tape:
            elsewhere.w = factor()
            loss = tf.reduce_sum(block(x)) * TINY
        return [tape.gradient(loss, kerases.tensor_of(block.layer.scale))]

    elsewhere.w = tf.ones([3])
    block(x)
    # A constant has no gradient: nothing is missing.
    assert_grads(compiled(lambda: step(lambda: tf.ones([3])), mode)(), X[0])
    with pytest.raises(
        ValueError, match=r"`layer` must read tensors with a gradient .*3.*"
    ):
        compiled(lambda: step(lambda: v * 2.0), mode)()


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_changes_until_it_is_computed_again_is_an_error(family, mode):
    held = {}
    layer = layer_of(family, lambda _: held["w"])
    block, v = ScaledBlock(layer, recompute=True), tf.Variable(V)

    def step():
        with tf.GradientTape() as tape:
            held["w"] = v * 2.0
            loss = tf.reduce_sum(block(tf.constant(X))) * TINY
        held["w"] = tf.ones([3])
        return tape.gradient(loss, v)

    held["w"] = tf.ones([3])
    block(tf.constant(X))
    with pytest.raises(ValueError, match=r"`layer` must read the same tensors when"):
        compiled(step, mode)()


@recomputed
def test_what_layers_keep_of_other_calls_does_no_harm(family, recompute):
    class Keeping(family.keras.layers.Layer):
        def call(self, inputs):
            self.last = inputs * 2.0
            return self.last

    with policy_of(family.keras, "mixed_float16"):
        block = ScaledBlock(Keeping(), recompute=recompute)
    block(tf.constant(X))

    def step():
        x = tf.constant(X)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(block(x) + block(x)) * TINY
        return [tape.gradient(loss, x)]

    # A tensor of a graph that is gone is there when the next one is traced.
    for function in (step, tf.function(step), tf.function(step), step):
        assert_grads(function(), np.full([1, 3], 4.0))


@recomputed
@pytest.mark.parametrize("mode", MODES)
def test_an_argument_that_is_an_attribute_too_counts_once_in_each(
    family, mode, recompute
):
    block, layer, _ = block_of(family, recompute)

    def step():
        x = tf.constant(X)
        with tf.GradientTape() as tape:
            tape.watch(x)
            layer.w = x
            loss = tf.reduce_sum(block(x)) * TINY
        return [tape.gradient(loss, x)]

    assert_grads(compiled(step, mode)(), 2.0 * X)


@pytest.mark.parametrize("mode", MODES)
def test_an_overflow_of_its_gradient_is_tried_again(family, mode):
    block, layer, v = block_of(family)
    x = tf.constant(np.full([1, 3], 2.0**9, np.float32))

    def step():
        with tf.GradientTape() as tape:
            layer.w = v * 2.0
            loss = tf.reduce_sum(block(x)) * TINY
        return [tape.gradient(loss, v)]

    assert_grads(compiled(step, mode)(), np.full([3], 2.0**10))


@recomputed
@pytest.mark.parametrize("mode", MODES)
def test_a_variable_that_an_operation_is_given_is_no_such_tensor(
    family, mode, recompute
):
    v = tf.Variable(V.astype(np.float16))

    class Bare(family.keras.layers.Layer):
        def call(self, inputs):
            # Eager mode reads it out of sight.
            return tf.raw_ops.Mul(x=inputs, y=v)

    with policy_of(family.keras, "mixed_float16"):
        block = ScaledBlock(Bare(), recompute=recompute)
    block(tf.constant(X))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(block(tf.constant(X)))
        return tape.gradient(loss, v)

    np.testing.assert_array_equal(compiled(step, mode)(), X[0])
