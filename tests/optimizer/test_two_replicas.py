"""LossScaleOptimizer on two replicas. The infinity is on the last one only.

What every strategy and entry point must do is in test_strategies.py.
"""

from __future__ import annotations

import benchmark
import numpy as np
import pytest
import tensorflow as tf
from limits import is_older, skip_without
from models import built, compiled, data, differ, regression, variable_of
from strategies import assert_bit_equal, copies, last_replica_gets

from lossscale import DynamicLossScale, HeadroomLossScale, LossScaleOptimizer


@pytest.mark.smoke
@pytest.mark.peer_defect(24)
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("runs", ["in one run", "from one run to the next"])
def test_clipping_on_one_replica_hides_nothing(family, mirrored, mode, runs):
    with mirrored.scope():
        optimizer, variable = built(family, DynamicLossScale(8.0))

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


def make_step(mirrored, optimizer, variable):
    """Returns a step with a gradient of the last replica, and one of the others."""

    def replica(of_last, of_others):
        optimizer.scale_loss(tf.constant(1.0))
        grads = [last_replica_gets(of_last, of_others)]
        optimizer.apply_gradients(list(zip(grads, [variable])))

    return tf.function(lambda *pair: mirrored.run(replica, args=pair))


def test_slots_may_be_created_within_a_step(family, mirrored):
    # A bare Keras 3 optimizer fails here: its slots' initial values belong to a trace.
    with mirrored.scope():
        variable = variable_of(family, [1.0, 2.0])
        optimizer = LossScaleOptimizer(family.optimizers.Adam(0.5), 8.0)
    make_step(mirrored, optimizer, variable)([8.0, 0.0], [8.0, 0.0])
    assert_bit_equal(mirrored, [variable])
    np.testing.assert_allclose(copies(mirrored, variable)[0], [0.5, 2.0], rtol=1e-5)


@pytest.mark.smoke
@pytest.mark.peer_defect(25)
@pytest.mark.parametrize(("dtype", "large"), [("float16", 4e4), ("float32", 2e38)])
def test_large_gradients_of_a_finite_sum_are_applied(family, mirrored, dtype, large):
    with mirrored.scope():
        scale = DynamicLossScale(1.0)
        optimizer, variable = built(family, scale, [0.0, 0.0], dtype=dtype)
    step = make_step(mirrored, optimizer, variable)
    grads = [np.array(each, dtype) for each in ([large, 0.0], [0.0, large])]
    step(*map(tf.constant, grads))
    assert int(optimizer.iterations.numpy()) == 1
    step(tf.constant(grads[0] + grads[1]), tf.constant(-grads[0] - grads[1]))
    assert int(optimizer.iterations.numpy()) == 2
    assert optimizer.loss_scale.skipped_steps.numpy() == 0


@pytest.mark.slow
def test_sparse_gradients_on_replicas(family, mirrored):
    """Of equal rows too, that add up to infinity in float16."""
    skip_without("adding up over replicas", family)
    with mirrored.scope():
        scale, ones = DynamicLossScale(1.0), np.ones([5, 2])
        optimizer, table = built(family, scale, ones, 2.0**-10, "float16")

    def replica(indices, indices_of_last, of_last):
        optimizer.scale_loss(tf.constant(1.0))
        values = tf.constant([[2e4, 0], [2e4, 1]], tf.float16)
        values += tf.cast(last_replica_gets(of_last, 0.0), tf.float16)
        indices = last_replica_gets(indices_of_last, indices)
        grad = tf.IndexedSlices(values, indices, tf.constant([5, 2]))
        optimizer.apply_gradients([(grad, table)])

    @tf.function
    def step(*args):
        mirrored.run(replica, args=tuple(map(tf.constant, args)))

    step([0, 1], [3, 3], 0.0)  # 4e4
    step([3, 3], [1, 3], 0.0)  # 6e4
    assert scale.skipped_steps.numpy() == 0
    before = copies(mirrored, table)[0]
    assert (before[[2, 4]] == 1).all()
    assert (before[[0, 1, 3], 0] < 1).all()
    for number, args in enumerate([([3, 3], [3, 3], 0.0), ([0, 1], [3, 2], np.inf)]):
        step(*args)  # 8e4, and an infinity
        assert scale.skipped_steps.numpy() == number + 1
        np.testing.assert_array_equal(copies(mirrored, table)[0], before)
        (found,) = optimizer.nonfinite_gradients()
        assert found.kind == "inf"
    assert_bit_equal(mirrored, [table])


@pytest.mark.every
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


@pytest.mark.slow  # XLA and two replicas: it compiles long
@pytest.mark.peer_defect(28)
def test_xla_fails_or_works_as_with_a_bare_optimizer(family, mirrored, rng):
    skip_without("compile(jit_compile=...)", family)
    ends = []
    for wrap in (lambda inner: inner, LossScaleOptimizer):
        with mirrored.scope():
            optimizer = wrap(family.optimizers.SGD(0.1))
            model = regression(family, optimizer, jit_compile=True)
        try:
            model.fit(*data(rng, 8), batch_size=8, verbose=0)
            ends.append("trains")
        except (ValueError, tf.errors.OpError) as error:
            ends.append(type(error))
    bare, wrapped = ends
    assert wrapped == bare


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


def test_apply_in_cross_replica_context_is_refused(family, mirrored):
    with mirrored.scope():
        optimizer, variable = built(family, DynamicLossScale(8.0))
    with mirrored.scope(), pytest.raises(ValueError, match="in replica context"):
        optimizer.apply_gradients([(tf.constant([1.0, 1.0]), variable)])
    assert optimizer.loss_scale.skipped_steps.numpy() == 0


@pytest.mark.parametrize("loss_scale", [DynamicLossScale, HeadroomLossScale])
@pytest.mark.parametrize("shapes", [[(2,)], [(2,), (3, 4), (5,)]], ids=len)
def test_one_message_is_all_that_crosses_for_our_sake(
    family, mirrored, shapes, loss_scale
):
    """In a step that is not in doubt: counted in the graph, beside the bare step."""
    skip_without("adding up over replicas", family)
    counts = benchmark.count(mirrored, family, shapes, loss_scale)
    assert counts["lossscale"] == counts["bare"] + 1
    assert counts["bare"] >= 1  # the gradients cross, and are seen to
