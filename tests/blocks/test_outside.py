"""What a block's layer may read: its arguments and variables (backward, base)."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import compiled, policy_of

from lossscale import ScaledBlock
from lossscale.runtime import kerases

#: A gradient that no float16 holds.
TINY = 2.0**-60
X = np.array([[1.0, 2.0, 3.0]], np.float32)
V = np.array([1.0, 2.0, 4.0], np.float32)
recomputed = pytest.mark.parametrize("recompute", [False, True])
refused = pytest.raises(
    ValueError,
    match=r"(?s)`layer` must read tensors with a gradient from the arguments of its "
    r"call, got one of shape \(3,\).* Pass it to the block as an argument",
)


def multiplied(layer, inputs, factor=None):
    """Returns inputs times the layer's weight and a factor: its tensor if None."""
    factor = tf.cast(layer.w if factor is None else factor, inputs.dtype)
    return inputs * tf.cast(layer.scale, inputs.dtype) * factor


def block_of(family, recompute=False, call=multiplied):
    """Returns a built block of a float16 layer with a weight and a tensor.

    Args:
      family: The Keras.
      recompute: As for `ScaledBlock`.
      call: Returns the layer's outputs, given the layer and its inputs.
    """

    class Reading(family.keras.layers.Layer):
        def build(self, _):
            self.scale = self.add_weight(shape=(3,), initializer="ones", name="scale")
            self.built = True

        def call(self, inputs):
            return call(self, inputs)

    with policy_of(family.keras, "mixed_float16"):
        layer = Reading()
    layer.w = tf.ones([3])
    block = ScaledBlock(layer, recompute=recompute)
    block(tf.constant(X))
    return block


def loss_of(block, x=X):
    outputs = tf.nest.flatten(block(tf.convert_to_tensor(x)))
    return tf.add_n([tf.reduce_sum(each) for each in outputs]) * TINY


def assert_grads(found, *expected):
    assert len(found) == len(expected)
    for grad, other in zip(found, expected):
        np.testing.assert_array_equal(grad, np.multiply(other, TINY))


def from_a_list(layer, inputs):
    is_built = not tf.is_tensor(layer.w)
    return multiplied(layer, inputs, layer.w["all"][0] if is_built else layer.w)


def in_a_function(layer, inputs):
    return multiplied(layer, inputs, tf.function(lambda: layer.w * 1.0)())


def in_a_branch(layer, inputs):
    one = tf.cast(layer.scale[0], tf.float32)
    w = tf.cond(one > 0.0, lambda: layer.w * 1.0, lambda: tf.ones([3]))
    return multiplied(layer, inputs, w)


def only_returned(layer, inputs):
    return inputs, layer.w


READS = [multiplied, from_a_list, in_a_function, in_a_branch, only_returned]


@recomputed
@pytest.mark.parametrize("call", READS)
def test_a_tensor_that_a_tape_records_is_an_error(family, mode, call, recompute):
    block, v = block_of(family, recompute, call), tf.Variable(V)

    def step():
        with tf.GradientTape() as tape:
            w = v * 2.0
            block.layer.w = {"all": [w]} if call is from_a_list else w
            loss = loss_of(block)
        return tape.gradient(loss, v)

    with refused:
        compiled(step, mode)()


@recomputed
@pytest.mark.parametrize("place", ["watched", "in a function", "an argument, too"])
def test_wherever_the_tape_knows_it_from(family, mode, place, recompute):
    block = block_of(family, recompute)

    def step():
        w = tf.constant(V)
        with tf.GradientTape() as tape:
            tape.watch(w)
            block.layer.w = w
            if place == "watched":
                loss = loss_of(block)
            elif place == "in a function":
                loss = tf.function(lambda: loss_of(block))()
            else:
                loss = tf.reduce_sum(block(w[None])) + tf.reduce_sum(block(w))
        return tape.gradient(loss, w)

    with refused:
        compiled(step, mode)()


@recomputed
@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("where", ["function", "loop", "branch", "no tape"])
def test_what_no_tape_records_is_an_error_when_its_gradient_is_computed(
    family, mode, where, recompute
):
    """An argument of a function or a loop, or what `tf.gradients` is asked for."""
    block, v = block_of(family, recompute), tf.Variable(V)

    def loss_at(w):
        block.layer.w = w
        return loss_of(block)

    def step():
        if where == "no tape":
            return tf.gradients(loss_at(v * 2.0), [v])
        with tf.GradientTape() as tape:
            w = v * 2.0
            if where == "function":
                loss = tf.function(loss_at)(w)
            elif where == "branch":
                loss = tf.cond(v[0] > 0.0, lambda: loss_at(w), lambda: 0.0)
            else:
                _, _, loss = tf.while_loop(
                    lambda count, *_: count < 2,
                    lambda count, w, loss: (count + 1, w, loss + loss_at(w)),
                    (0, w, 0.0),
                    maximum_iterations=2,
                )
        return tape.gradient(loss, v)

    with refused:
        compiled(step, mode)()


def test_a_function_that_a_tape_calls_is_an_error_then(family):
    block = block_of(family)

    @tf.function
    def loss_at(w):
        block.layer.w = w
        return loss_of(block)

    w = tf.constant(V)
    assert float(loss_at(w)) == X[0] @ V * TINY  # nobody asks for a gradient
    with tf.GradientTape() as tape, refused:
        tape.watch(w)
        tape.gradient(loss_at(w), w)


@recomputed
@pytest.mark.parametrize("where", ["function", "branch"])
def test_a_constant_may_be_read(family, mode, where, recompute):
    if recompute and where == "branch" and mode != "eager":
        pytest.skip("TensorFlow cannot differentiate tf.recompute_grad in a branch")
    table = tf.constant(np.tile(V, 100))  # captured as a placeholder, not a constant
    block = block_of(family, recompute, lambda *args: multiplied(*args, table[:3]))
    weight = kerases.tensor_of(block.layer.scale)

    function = tf.function(lambda x: loss_of(block, x))

    def step():
        x = tf.constant(X)
        with tf.GradientTape() as tape:
            tape.watch(x)
            if where == "function":
                loss = function(x)
            else:
                loss = tf.cond(x[0, 0] > 0.0, lambda: loss_of(block, x), lambda: 0.0)
        return tape.gradient(loss, [x, weight])

    assert_grads(compiled(step, mode)(), V[None], X[0] * V)


@recomputed
@pytest.mark.parametrize("way", ["read", "given to an operation"])
def test_a_variable_of_no_layer_has_its_gradient(family, mode, way, recompute):
    v = tf.Variable(V.astype(np.float16))

    def call(_, inputs):
        if way == "read":
            return inputs * v.read_value()
        # Eager mode reads it out of sight.
        return tf.raw_ops.Mul(x=inputs, y=v)

    block = block_of(family, recompute, call)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(block(tf.constant(X)))
        return tape.gradient(loss, v)

    np.testing.assert_array_equal(compiled(step, mode)(), X[0])


def test_a_frozen_variable_that_a_tape_watches_is_an_error(family, mode):
    block = block_of(family)
    block.trainable = False
    weight = kerases.tensor_of(block.layer.scale)

    def step(is_watched):
        x = tf.constant(X)
        with tf.GradientTape() as tape:
            tape.watch([x, *[weight] * is_watched])
            loss = loss_of(block, x)
        return [tape.gradient(loss, x)]

    assert_grads(compiled(lambda: step(False), mode)(), np.ones([1, 3]))
    with pytest.raises(ValueError, match=r"(?s)`layer` must have trainable .*scale"):
        compiled(lambda: step(True), mode)()


@recomputed
def test_what_layers_keep_of_other_calls_does_no_harm(family, recompute):
    def keeping(layer, inputs):
        layer.last = inputs * 2.0
        return layer.last

    block = block_of(family, recompute, keeping)

    def step():
        x = tf.constant(X)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(block, x) + loss_of(block, x)
        return [tape.gradient(loss, x)]

    # A tensor of a graph that is gone is there when the next one is traced.
    for function in (step, tf.function(step), tf.function(step), step):
        assert_grads(function(), np.full([1, 3], 4.0))
