"""LossScaleOptimizer on two replicas. The infinity is on the last one only."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import (
    assert_same,
    data,
    differ,
    regression,
    training_state,
    with_infinity,
)

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer

MODES = ["eager", "graph"]
LOOPS = ["keras2", "keras3"]
QUIET = {"verbose": 0, "shuffle": False}


def copies(strategy, variable):
    variable = variable if isinstance(variable, tf.Variable) else variable.value
    return [c.numpy() for c in strategy.experimental_local_results(variable)]


def assert_bit_equal(strategy, variables):
    for variable in variables:
        first, *others = copies(strategy, variable)
        for other in others:
            np.testing.assert_array_equal(first, other)


def variable_of(family, value, dtype="float32"):
    if family.name == "keras3":
        return family.keras.Variable(value, dtype=dtype, name="v")
    return tf.Variable(value, dtype=dtype, name="v")


@pytest.fixture
def setup(family, mirrored):
    """Returns an optimizer and a variable on both replicas."""

    def make(loss_scale=None, dtype="float32", start=(1.0, 2.0), inside=True):
        scale = None if inside else DynamicLossScale(8.0, 1000)
        with mirrored.scope():
            variable = variable_of(family, list(start), dtype)
            if inside:
                scale = loss_scale or DynamicLossScale(8.0, 1000)
            optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), scale)
        return optimizer, variable

    return make


def last_replica_gets(special, ordinary):
    """Returns `special` on the last replica and `ordinary` on the others."""
    context = tf.distribute.get_replica_context()
    last = context.replica_id_in_sync_group == context.num_replicas_in_sync - 1
    return tf.where(last, special, ordinary)


def make_step(mirrored, optimizer, variable, loop, mode, clip=None, **arguments):
    """Returns a step whose gradients are `special` on the last replica."""

    def replica(special, ordinary):
        optimizer.scale_loss(tf.constant(1.0))
        grads = [last_replica_gets(special, ordinary)]
        if loop == "keras2":
            grads = optimizer.get_unscaled_gradients(grads)
            if clip:
                grads = [tf.clip_by_value(grad, -clip, clip) for grad in grads]
        optimizer.apply_gradients(list(zip(grads, [variable])), **arguments)

    def step(special, ordinary):
        pair = tf.convert_to_tensor(special), tf.convert_to_tensor(ordinary)
        mirrored.run(replica, args=pair)

    return tf.function(step) if mode == "graph" else step


@pytest.mark.peer_defect(1)
@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_fit_skips_on_both_replicas(family, mirrored, rng, eagerly):
    x, y = data(rng, 16)
    with mirrored.scope():
        scale = DynamicLossScale(2.0**12)
        optimizer = LossScaleOptimizer(family.optimizers.Adam(0.05), scale)
        model = regression(family, optimizer, "mixed_float16", run_eagerly=eagerly)
    model.fit(x, y, batch_size=16, epochs=2, **QUIET)
    before = training_state(model)

    model.fit(with_infinity(x), y, batch_size=16, **QUIET)
    assert_same(training_state(model), before)
    assert float(scale.numpy()) == 2.0**11
    assert scale.skipped_steps.numpy() == 1
    assert int(optimizer.iterations.numpy()) == 2

    model.fit(x, y, batch_size=16, **QUIET)
    assert differ(training_state(model), before)
    assert int(optimizer.iterations.numpy()) == 3
    assert_bit_equal(mirrored, [*scale.variables, *model.weights])


@pytest.mark.peer_defect(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("loop", "inside", "bad"),
    [("keras2", True, np.inf), ("keras3", False, np.nan)],
    ids=["keras2-in-scope-inf", "keras3-out-of-scope-nan"],
)
def test_strategy_run_skips_on_both_replicas(
    family, mirrored, setup, mode, loop, inside, bad
):
    optimizer, variable = setup(inside=inside)
    step = make_step(mirrored, optimizer, variable, loop, mode)
    share = 2.0 if family.keras.__name__ == "keras" and _halves(family) else 1.0
    step([2.0 * share, 0.0], [1.0 * share, 0.0])
    np.testing.assert_array_equal(copies(mirrored, variable)[0], [0.625, 2.0])
    step([bad, 0.0], [1.0, 0.0])
    np.testing.assert_array_equal(copies(mirrored, variable)[0], [0.625, 2.0])
    assert optimizer.loss_scale.numpy() == 4.0
    step([1.0 * share, 0.0], [0.5 * share, 0.0])  # of a loss that is scaled by 4 now
    np.testing.assert_array_equal(copies(mirrored, variable)[0], [0.25, 2.0])
    assert int(optimizer.iterations.numpy()) == 2
    assert_bit_equal(mirrored, [variable, *optimizer.loss_scale.variables])


def _halves(family):
    # Keras 3.3 averages gradients over the replicas where later ones add them up.
    return getattr(family.keras, "__version__", "2").startswith("3.3.")


@pytest.mark.peer_defect(24)
@pytest.mark.parametrize("mode", MODES)
def test_clipping_on_one_replica_hides_nothing(mirrored, setup, mode):
    optimizer, variable = setup()
    step = make_step(mirrored, optimizer, variable, "keras2", mode, clip=0.5)
    step([np.inf, 0.0], [1.0, 0.0])
    np.testing.assert_array_equal(copies(mirrored, variable)[0], [1.0, 2.0])
    assert optimizer.loss_scale.skipped_steps.numpy() == 1


@pytest.mark.peer_defect(24)
@pytest.mark.parametrize("mode", MODES)
def test_the_flag_survives_from_one_strategy_run_to_the_next(mirrored, setup, mode):
    optimizer, variable = setup()

    def differentiate(special):
        optimizer.scale_loss(tf.constant(1.0))
        grad = last_replica_gets(special, [8.0, 0.0])
        grad = optimizer.get_unscaled_gradients([grad])[0]
        return tf.clip_by_value(grad, -0.25, 0.25)

    def apply(grad):
        optimizer.apply_gradients([(grad, variable)])

    def step(special):
        grads = mirrored.run(differentiate, args=(special,))
        mirrored.run(apply, args=(grads,))  # in new threads

    step = tf.function(step) if mode == "graph" else step
    step(tf.constant([np.inf, 0.0]))
    np.testing.assert_array_equal(copies(mirrored, variable)[0], [1.0, 2.0])
    step(tf.constant([8.0, 0.0]))
    assert differ([copies(mirrored, variable)[0]], [[1.0, 2.0]])


class TestOverflowOfTheSum:
    """Gradients that are finite on each replica, and whose sum may not be."""

    @pytest.mark.peer_defect(30)
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("loop", LOOPS)
    @pytest.mark.parametrize(("dtype", "large"), [("float16", 4e4), ("float32", 2e38)])
    def test_it_is_skipped(self, mirrored, setup, mode, loop, dtype, large):
        optimizer, variable = setup(DynamicLossScale(1.0), dtype)
        step = make_step(mirrored, optimizer, variable, loop, mode)
        grad = np.array([large, 0.0], dtype)
        step(grad, grad)
        np.testing.assert_array_equal(copies(mirrored, variable)[0], [1.0, 2.0])
        assert optimizer.loss_scale.skipped_steps.numpy() == 1
        assert int(optimizer.iterations.numpy()) == 0

    @pytest.mark.peer_defect(25)
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(("dtype", "large"), [("float16", 4e4), ("float32", 2e38)])
    def test_large_gradients_of_a_finite_sum_are_applied(
        self, mirrored, setup, mode, dtype, large
    ):
        optimizer, variable = setup(DynamicLossScale(1.0), dtype, start=(0.0, 0.0))
        step = make_step(mirrored, optimizer, variable, "keras3", mode)
        step(np.array([large, 0.0], dtype), np.array([0.0, large], dtype))
        assert int(optimizer.iterations.numpy()) == 1
        step(np.array([large, large], dtype), np.array([-large, -large], dtype))
        assert int(optimizer.iterations.numpy()) == 2
        assert optimizer.loss_scale.skipped_steps.numpy() == 0


@pytest.mark.peer_defect(23)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "argument",
    [
        {"skip_gradients_aggregation": True},
        {"experimental_aggregate_gradients": False},
    ],
    ids=str,
)
def test_the_flag_is_agreed_whoever_aggregates(family, mirrored, setup, mode, argument):
    if family.name == "keras3":
        pytest.skip("Keras 3 always aggregates")
    if family.name == "keras2-legacy" and "skip_gradients_aggregation" in argument:
        pytest.skip("legacy optimizers call it experimental_aggregate_gradients")
    optimizer, variable = setup()
    step = make_step(mirrored, optimizer, variable, "keras2", mode, **argument)
    step([np.inf, 0.0], [8.0, 0.0])
    for copy in copies(mirrored, variable):
        np.testing.assert_array_equal(copy, [1.0, 2.0])
    step([4.0, 0.0], [4.0, 0.0])
    for copy in copies(mirrored, variable):
        np.testing.assert_array_equal(copy, [0.0, 2.0])
    assert optimizer.loss_scale.skipped_steps.numpy() == 1


@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradients_on_replicas(family, mirrored, mode):
    with mirrored.scope():
        table = variable_of(family, np.ones([5, 2], np.float32))
        optimizer = LossScaleOptimizer(
            family.optimizers.SGD(1.0), DynamicLossScale(8.0)
        )

    def replica(special):
        optimizer.scale_loss(tf.constant(1.0))
        values = tf.fill([1, 2], last_replica_gets(special, 1.0))
        grads = [tf.IndexedSlices(values, tf.constant([3]), tf.constant([5, 2]))]
        optimizer.apply_gradients(list(zip(grads, [table])))

    def step(special):
        mirrored.run(replica, args=(tf.convert_to_tensor(special),))

    step = tf.function(step) if mode == "graph" else step
    step(np.inf)
    np.testing.assert_array_equal(copies(mirrored, table)[0], np.ones([5, 2]))
    step(1.0)
    after = copies(mirrored, table)[0]
    assert (after[[0, 1, 2, 4]] == 1).all()
    assert (after[3] < 1).all()
    assert_bit_equal(mirrored, [table])


def test_a_fixed_scale_on_replicas(mirrored, setup):
    optimizer, variable = setup(FixedLossScale(8.0))
    make_step(mirrored, optimizer, variable, "keras3", "graph")([2.0, 0.0], [2.0, 0.0])
    assert differ([copies(mirrored, variable)[0]], [[1.0, 2.0]])


def test_apply_in_cross_replica_context_is_refused(mirrored, setup):
    optimizer, variable = setup()
    with mirrored.scope(), pytest.raises(ValueError, match="in replica context"):
        optimizer.apply_gradients([(tf.constant([1.0, 1.0]), variable)])
    assert optimizer.loss_scale.skipped_steps.numpy() == 0


def test_one_scalar_is_all_that_crosses_for_our_sake(family, mirrored, setup):
    """In a step that is not in doubt: counted in the graph, beside the bare step."""
    optimizer, variable = setup()
    with mirrored.scope():
        bare = family.optimizers.SGD(1.0)
        other = variable_of(family, [1.0, 2.0])

    def apply(which, variable):
        def replica():
            if which is optimizer:
                optimizer.scale_loss(tf.constant(1.0))
            which.apply_gradients([(tf.constant([1.0, 1.0]), variable)])

        return replica

    def crossing(which, variable):
        mirrored.run(apply(which, variable))  # builds the slots
        step = tf.function(lambda: mirrored.run(apply(which, variable)))
        definition = step.get_concrete_function().graph.as_graph_def()
        everywhere = [*definition.node]
        for function in definition.library.function:
            everywhere += function.node_def
        return [node.op for node in everywhere if "Collective" in node.op]

    # One on each of the two replicas. On CPUs a scalar needs no collective at all.
    assert len(crossing(optimizer, variable)) <= len(crossing(bare, other)) + 2
