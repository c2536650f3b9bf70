"""LossScaleOptimizer on two replicas. The infinity is on the last one only.

What every strategy and entry point must do is in test_strategies.py.
"""

from __future__ import annotations

import benchmark
import numpy as np
import pytest
import tensorflow as tf
from limits import is_older, skip_without
from models import compiled, differ, variable_of
from strategies import assert_bit_equal, copies, last_replica_gets

from lossscale import DynamicLossScale, LossScaleOptimizer


@pytest.fixture
def setup(family, mirrored):
    """Returns an optimizer and a variable on both replicas."""

    def make(initial_loss_scale=8.0, dtype="float32", start=(1.0, 2.0)):
        with mirrored.scope():
            variable = variable_of(family, list(start), dtype)
            scale = DynamicLossScale(initial_loss_scale, 1000)
            optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), scale)
        return optimizer, variable

    return make


def make_step(mirrored, optimizer, variable):
    """Returns a step whose gradients are `special` on the last replica."""

    def replica(special, ordinary):
        optimizer.scale_loss(tf.constant(1.0))
        grads = [last_replica_gets(special, ordinary)]
        optimizer.apply_gradients(list(zip(grads, [variable])))

    return tf.function(lambda *pair: mirrored.run(replica, args=pair))


@pytest.mark.peer_defect(24)
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("runs", ["in one run", "from one run to the next"])
def test_clipping_on_one_replica_hides_nothing(mirrored, setup, mode, runs):
    optimizer, variable = setup()

    def differentiate(special):
        optimizer.scale_loss(tf.constant(1.0))
        grad = last_replica_gets(special, [8.0, 0.0])
        grad = optimizer.get_unscaled_gradients([grad])[0]
        return tf.clip_by_value(grad, -0.25, 0.25)

    def apply(grad):
        optimizer.apply_gradients([(grad, variable)])

    def step(special):
        if runs == "in one run":
            mirrored.run(lambda special: apply(differentiate(special)), args=(special,))
        else:
            grads = mirrored.run(differentiate, args=(special,))
            mirrored.run(apply, args=(grads,))  # in new threads

    step = compiled(step, mode)
    step(tf.constant([np.inf, 0.0]))
    np.testing.assert_array_equal(copies(mirrored, variable)[0], [1.0, 2.0])
    assert optimizer.loss_scale.skipped_steps.numpy() == 1
    step(tf.constant([8.0, 0.0]))
    assert differ([copies(mirrored, variable)[0]], [[1.0, 2.0]])


def test_slots_may_be_created_within_a_step(family, mirrored):
    # A bare Keras 3 optimizer fails here: its slots' initial values belong to a trace.
    with mirrored.scope():
        variable = variable_of(family, [1.0, 2.0])
        optimizer = LossScaleOptimizer(family.optimizers.Adam(0.5), 8.0)
    make_step(mirrored, optimizer, variable)([8.0, 0.0], [8.0, 0.0])
    assert_bit_equal(mirrored, [variable])
    np.testing.assert_allclose(copies(mirrored, variable)[0], [0.5, 2.0], rtol=1e-5)


@pytest.mark.peer_defect(25)
@pytest.mark.parametrize(("dtype", "large"), [("float16", 4e4), ("float32", 2e38)])
def test_large_gradients_of_a_finite_sum_are_applied(mirrored, setup, dtype, large):
    optimizer, variable = setup(1.0, dtype, start=(0.0, 0.0))
    step = make_step(mirrored, optimizer, variable)
    grads = [np.array(each, dtype) for each in ([large, 0.0], [0.0, large])]
    step(*map(tf.constant, grads))
    assert int(optimizer.iterations.numpy()) == 1
    step(tf.constant(grads[0] + grads[1]), tf.constant(-grads[0] - grads[1]))
    assert int(optimizer.iterations.numpy()) == 2
    assert optimizer.loss_scale.skipped_steps.numpy() == 0


def test_sparse_gradients_on_replicas(family, mirrored):
    with mirrored.scope():
        table = variable_of(family, np.ones([5, 2], np.float32))
        optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), "dynamic")

    def replica(special):
        optimizer.scale_loss(tf.constant(1.0))
        values = tf.fill([1, 2], last_replica_gets(special, 1.0))
        grad = tf.IndexedSlices(values, tf.constant([3]), tf.constant([5, 2]))
        optimizer.apply_gradients([(grad, table)])

    step = tf.function(lambda special: mirrored.run(replica, args=(special,)))
    step(tf.constant(np.inf))
    np.testing.assert_array_equal(copies(mirrored, table)[0], np.ones([5, 2]))
    step(tf.constant(1.0))
    after = copies(mirrored, table)[0]
    assert (after[[0, 1, 2, 4]] == 1).all()
    assert (after[3] < 1).all()
    assert_bit_equal(mirrored, [table])


def test_equal_rows_of_float16_that_add_up_to_infinity(family, mirrored):
    skip_without("adding up over replicas", family)
    with mirrored.scope():
        table = variable_of(family, np.ones([5, 2], np.float16), "float16")
        inner = family.optimizers.SGD(2.0**-10)
        optimizer = LossScaleOptimizer(inner, DynamicLossScale(1.0))

    def replica(indices, indices_of_last):
        optimizer.scale_loss(tf.constant(1.0))
        values = tf.constant([[2e4, 0], [2e4, 1]], tf.float16)
        indices = last_replica_gets(indices_of_last, indices)
        grad = tf.IndexedSlices(values, indices, tf.constant([5, 2]))
        optimizer.apply_gradients([(grad, table)])

    @tf.function
    def step(*args):
        mirrored.run(replica, args=tuple(map(tf.constant, args)))

    step([0, 1], [3, 3])  # 4e4
    step([3, 3], [1, 3])  # 6e4
    assert optimizer.loss_scale.skipped_steps.numpy() == 0
    skipped = copies(mirrored, table)[0].tolist()
    step([3, 3], [3, 3])  # 8e4
    assert optimizer.loss_scale.skipped_steps.numpy() == 1
    assert copies(mirrored, table)[0].tolist() == skipped
    (found,) = optimizer.nonfinite_gradients()
    assert found.kind == "inf"
    assert_bit_equal(mirrored, [table])


@pytest.mark.peer_defect(13)
@pytest.mark.parametrize(
    "setting",
    [
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_overwrite_frequency": 2},
    ],
    ids=str,
)
def test_settings_for_which_keras3_meets_in_a_branch(family, mirrored, setting):
    """Bare, Keras 3 can do it eagerly, and in a graph one from 3.16 on: so do we."""
    skip_without("gradient accumulation and EMA on replicas", family)
    seen, in_a_graph = [], []
    for wrap in (False, True):
        variable, each = _on_both(mirrored, family, wrap, setting)
        for _ in range(2):
            mirrored.run(each)
        assert_bit_equal(mirrored, [variable])
        seen.append(copies(mirrored, variable)[0].tolist())
        try:
            tf.function(mirrored.run)(each)
        except RuntimeError as error:
            in_a_graph.append(["merge_call"] if "merge_call" in str(error) else [])
        else:
            assert_bit_equal(mirrored, [variable])
            in_a_graph.append(copies(mirrored, variable)[0].tolist())
    assert seen[0] == seen[1] != [1.0, 2.0]
    assert in_a_graph[0] == in_a_graph[1]
    if "use_ema" not in setting or is_older(family, (3, 16)):
        assert in_a_graph[0] == ["merge_call"]


@pytest.mark.peer_defect(14)
def test_clipnorm_clips_where_a_bare_optimizer_does(family, mirrored):
    skip_without("adding up over replicas", family)
    seen = []
    for wrap in (False, True):
        variable, each = _on_both(mirrored, family, wrap, {"clipnorm": 1.0})
        tf.function(mirrored.run)(each)
        assert_bit_equal(mirrored, [variable])
        seen.append(copies(mirrored, variable)[0].tolist())
    assert seen[0] == seen[1] != [1.0, 2.0]


def _on_both(mirrored, family, wrap, setting):
    """Returns a variable and a replica's step, bare or wrapped."""
    with mirrored.scope():
        variable = variable_of(family, [1.0, 2.0])
        optimizer = family.optimizers.SGD(0.5, **setting)
        if wrap:
            optimizer = LossScaleOptimizer(optimizer, DynamicLossScale(8.0))
        if hasattr(optimizer, "build"):
            optimizer.build([variable])

    def each():
        grads = [last_replica_gets([8.0, 0.0], [0.0, 8.0])]
        if wrap:
            grads[0] *= optimizer.scale_loss(tf.constant(1.0))
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(list(zip(grads, [variable])))

    return variable, each


def test_apply_in_cross_replica_context_is_refused(mirrored, setup):
    optimizer, variable = setup()
    with mirrored.scope(), pytest.raises(ValueError, match="in replica context"):
        optimizer.apply_gradients([(tf.constant([1.0, 1.0]), variable)])
    assert optimizer.loss_scale.skipped_steps.numpy() == 0


@pytest.mark.parametrize("shapes", [[(2,)], [(2,), (3, 4), (5,)]], ids=len)
def test_one_scalar_is_all_that_crosses_for_our_sake(family, mirrored, shapes):
    """In a step that is not in doubt: counted in the graph, beside the bare step."""
    skip_without("adding up over replicas", family)
    counts = benchmark.count(mirrored, family, shapes)
    assert counts["lossscale"] == counts["bare"] + 1
    assert counts["bare"] >= 1  # the gradients cross, and are seen to
