"""Small gradients packed into few tensors, and the branch, come out as they went in."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import variable_of

import lossscale
from lossscale.gradients.packing import SMALL, add_up, pack, unpack
from lossscale.runtime.control import either
from lossscale.runtime.mode import COMPILED_BY_XLA, in_xla


def mixed_gradients():
    """Returns gradients of which 0, 2 and 5 can be packed, and 3 and 6."""
    return [
        tf.constant([1.0, 2.0]),
        None,
        tf.constant([3.0, 4.0]),
        tf.constant([5.0], tf.float16),
        tf.ones([SMALL + 1]),
        tf.constant([6.0, 7.0]),
        tf.constant([8.0], tf.float16),
        tf.constant([9.0]),
        tf.IndexedSlices(tf.ones([2, 1]), tf.constant([0, 3]), tf.constant([4, 1])),
        tf.constant([1, 2]),
    ]


def test_equal_small_gradients_become_one_and_come_back():
    grads = mixed_gradients()
    packed, groups = pack(grads)
    assert len(packed) == len(grads) - 3
    back = unpack(packed, groups)
    tf.nest.assert_same_structure(grads, back)
    for grad, same in zip(tf.nest.flatten(grads, True), tf.nest.flatten(back, True)):
        if grad is not None:
            assert grad.dtype == same.dtype
            np.testing.assert_array_equal(grad, same)


def test_equal_small_gradients_are_added_up():
    grads = [grad for grad in mixed_gradients() if isinstance(grad, tf.Tensor)]
    summed = add_up([*grads, tf.constant([np.inf, np.nan])])
    assert len(summed) == len(grads) - 3
    np.testing.assert_array_equal(summed[0], [np.inf, np.nan])
    np.testing.assert_array_equal(summed[1], np.array([13.0], np.float16))
    assert [tensor.shape for tensor in summed[2:]] == [SMALL + 1, 1, 2]


def test_under_xla_nothing_is_packed():
    @tf.function(**COMPILED_BY_XLA)
    def compiled():
        return len(pack([tf.ones([2]), tf.ones([2])])[0])

    assert int(compiled()) == 2


def test_xla_is_seen_from_within_branches_and_nested_functions():
    inner = tf.function(lambda: tf.constant(in_xla()), autograph=False)
    once = tf.function(
        lambda x: tf.cond(x > 0, inner, lambda: tf.constant(False)),
        **COMPILED_BY_XLA,
        autograph=False,
    )
    assert bool(once(tf.constant(1.0)))
    assert not bool(tf.function(lambda: tf.constant(in_xla()), autograph=False)())
    assert not in_xla()


def test_under_xla_no_cond_runs_both_its_sides(family):
    variable = variable_of(family, np.ones([SMALL + 1], np.float32))
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD(1.0))

    @tf.function(**COMPILED_BY_XLA)
    def step(grad):
        optimizer.scale_loss(0.0)
        optimizer.apply_gradients([(grad, variable)])

    graph = step.get_concrete_function(tf.TensorSpec([SMALL + 1])).graph
    functions = graph.as_graph_def().library.function
    nodes = [node for function in functions for node in function.node_def]
    types = {node.op for node in [*graph.as_graph_def().node, *nodes]}
    assert "While" in types or "StatelessWhile" in types
    assert not types & {"If", "StatelessIf", "Switch"}


@pytest.mark.parametrize("jit_compile", [False, True])
def test_one_side_of_the_branch_runs_once(jit_compile):
    count, other = tf.Variable(0.0), tf.Variable(0.0)

    def add(variable):
        variable.assign_add(1.0)
        return tf.constant(True)

    @tf.function(autograph=False, **(COMPILED_BY_XLA if jit_compile else {}))
    def step(condition):
        either(condition, lambda: add(count), lambda: add(other))

    step(tf.constant(True))
    assert (float(count), float(other)) == (1.0, 0.0)
    step(tf.constant(False))
    assert (float(count), float(other)) == (1.0, 1.0)


@pytest.mark.parametrize("size", [2, SMALL + 1], ids=["small", "large"])
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize(
    ("scale", "value", "applies"),
    [
        (1.0, 3e38, True),  # their sum is infinite
        (0.25, 3e37, True),
        (0.25, 1e38, False),  # finite, and so is the sum, until they are divided
        (2.0**127, 2.0**127, True),
        (2.0, np.inf, False),
        (2.0, np.nan, False),
    ],
)
def test_a_step_is_applied_if_the_unscaled_gradients_are_finite(
    family, size, mode, scale, value, applies
):
    variable = variable_of(family, tf.zeros([size]))
    loss_scale = lossscale.DynamicLossScale(scale, min_loss_scale=2.0**-10)
    inner = family.optimizers.SGD(1.0)
    optimizer = lossscale.LossScaleOptimizer(inner, loss_scale)
    optimizer.build([variable])
    optimizer.iterations  # noqa: B018 - Keras 2 makes it when it is asked for

    def step(grad):
        optimizer.scale_loss(1.0)
        grads = [grad]
        if family.name != "keras3":
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients([(grads[0], variable)])

    if mode != "eager":
        options = COMPILED_BY_XLA if mode == "xla" else {}
        step = tf.function(step, autograph=False, **options)
    grad = np.zeros([size], np.float32)
    grad[-2:] = value
    step(tf.constant(grad))
    expected = -np.float32(value) / np.float32(scale) if applies else 0.0
    assert float(tf.convert_to_tensor(variable)[-1]) == expected
    assert int(loss_scale.skipped_steps.numpy()) == (not applies)
