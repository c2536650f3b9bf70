"""`reduction`: what replicas and workers know together, also more than are here."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from trained import ByEngine

from lossscale import (
    DynamicLossScale,
    FixedLossScale,
    HeadroomLossScale,
    LossScaleEngine,
    LossScaleOptimizer,
    SpikeGuard,
)
from lossscale.gradients.bundle import Bundle
from lossscale.gradients.check import Check
from lossscale.optimizer.reduction import EqualReplicas, SeveralReplicas
from lossscale.runtime import replicas

pytestmark = pytest.mark.smoke


def test_what_nobody_has_changed_is_checked_once():
    bad = Check(tf.constant(False))
    bundle = Bundle(FixedLossScale(1.0), [tf.constant([1.0])], [None], check=bad)
    for is_checked in (True, False):
        checked, _ = EqualReplicas().check(bundle.but(is_checked=is_checked))
        assert not bool(checked.check.exact())
        assert (checked.check.worst is None) == is_checked


@pytest.mark.parametrize(("count", "added"), [(2, -4e4), (3, 4e4), (8, 4e4)])
def test_of_three_replicas_the_order_of_the_sum_cannot_tell(monkeypatch, count, added):
    # 4e4 + 4e4 - 4e4 is infinite in float16, 4e4 - 4e4 + 4e4 is not.
    monkeypatch.setattr(replicas, "count", lambda: count)
    grads = [tf.constant([-4e4], tf.float16), None]
    bundle = Bundle(FixedLossScale(1.0), grads, [None, None])
    terms = SeveralReplicas(are_added=True)._terms(bundle)
    assert list(terms) == [0]
    np.testing.assert_array_equal(terms[0], np.float16([added]))


@pytest.mark.parametrize(("value", "is_small"), [(3e2, True), (1e3, False)])
def test_equal_rows_are_small_if_they_are_so_on_four_replicas(
    monkeypatch, value, is_small
):
    # Twenty times 1e3 is finite on each replica, and 8e4 on four of them is not.
    monkeypatch.setattr(replicas, "count", lambda: 4)
    values = tf.constant([[value]] * 20, tf.float16)
    rows = tf.IndexedSlices(values, tf.constant([1] * 20), tf.constant([2, 1]))
    bundle = Bundle(FixedLossScale(1.0), [rows], [None])
    _, contribution = SeveralReplicas(are_added=True).check(bundle)
    assert float(contribution) == (0.0 if is_small else 1.0)


# Workers that tf.distribute does not know


def on_two_workers(train):
    """Returns what `train` returns in each of two threads, which wait for each other.

    It is called with the rank, and with `gather`.
    """
    rows, barrier = [None] * 2, threading.Barrier(2)

    def meet(rank, row):
        rows[rank] = row
        barrier.wait(60)
        together = np.stack(rows)
        barrier.wait(60)
        return together

    def worker(rank):
        met = partial(meet, rank)
        return train(rank, lambda row: tf.numpy_function(met, [row], tf.float32))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(worker, range(2)))


GOOD, LARGE, NAN = [0.5, 1.0], [0.5, 4.0], [np.nan, 1.0]
HUGE = [1e38, 1.0]  # it overflows when it is scaled


@pytest.mark.parametrize(
    ("options", "steps", "state", "loss"),
    [
        ({}, [(GOOD, GOOD), (GOOD, HUGE)], [32.0, 1, 1], None),
        ({"nonfinite_loss": "skip"}, [(GOOD, GOOD), (GOOD, NAN)], [64.0, 1, 1], "nan"),
        ({"nonfinite_loss": "skip"}, [(NAN, GOOD), (NAN, HUGE)], [32.0, 2, 0], "nan"),
        ({"nonfinite_loss": "skip"}, [(NAN, NAN), (HUGE, GOOD)], [32.0, 2, 0], None),
        ({"guard": SpikeGuard(window=2)}, [(GOOD, GOOD)] * 3, [64.0, 0, 3], None),
        ({"loss_scale": HeadroomLossScale()}, [(GOOD, LARGE)], [2.0**9, 0, 1], None),
    ],
    ids=["overflow", "bad loss", "both", "one, then the other", "guarded", "largest"],
)
def test_workers_decide_alike(options, steps, state, loss):
    """Each by itself would skip, or count, other steps than the other one."""

    def train(rank, gather):
        own = copy.deepcopy({"loss_scale": DynamicLossScale(64.0), **options})
        ours = ByEngine(**own, gather=gather)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                scaled = ours.scale(tf.reduce_sum(ours.weight * x))
            ours.apply(ours.unscale(tape.gradient(scaled, [ours.weight])))

        for both in steps:
            step(tf.constant(both[rank]))
        faults = [fault.kind for fault in ours.engine.nonfinite_gradients()]
        return ours.state()[1], ours.engine.nonfinite_loss(), faults

    one, other = on_two_workers(train)
    assert one == other
    assert one[:2] == (state, loss)
    assert len(one[2]) == min(state[1], 1)


@pytest.mark.parametrize("wrong", [tf.identity, lambda row: tf.cast([row], "float64")])
def test_a_gather_of_the_wrong_shape_or_dtype_changes_nothing(wrong):
    ours = ByEngine(DynamicLossScale(64.0), gather=wrong)
    step = lambda: ours.apply([ours.scale(tf.constant([np.inf, 1.0]))])  # noqa: E731
    with pytest.raises(ValueError, match=r"must return float32 of shape \[None, 4\]"):
        tf.function(step)()
    assert ours.state() == ([1.0, 2.0], [64.0, 0.0, 0.0])


def test_a_gather_that_cannot_be_is_refused(mirrored):
    with pytest.raises(TypeError, match=r"`gather` must be a function, got 3 of type"):
        LossScaleEngine(gather=3)
    gather = lambda row: row[tf.newaxis]  # noqa: E731
    with mirrored.scope(), pytest.raises(ValueError, match="None under a strategy of"):
        LossScaleEngine(gather=gather)
    ours = ByEngine(DynamicLossScale(64.0), gather=gather)
    with pytest.raises(ValueError, match="None under a strategy of several"):
        mirrored.run(lambda: ours.apply([ours.scale(tf.ones([2]))]))
    assert ours.state() == ([1.0, 2.0], [64.0, 0.0, 0.0])


def test_a_variable_on_a_mesh_is_refused(family):
    dtensor = getattr(tf.experimental, "dtensor", None)
    if dtensor is None or not hasattr(dtensor, "create_mesh"):
        pytest.skip("this TensorFlow has no DTensor")
    mesh = dtensor.create_mesh([("batch", 2)], devices=["CPU:0", "CPU:1"])
    layout = dtensor.Layout.replicated(mesh, rank=1)
    zeros = dtensor.call_with_layout(tf.zeros, layout, [2])
    variable, engine = dtensor.DVariable(zeros), LossScaleEngine()
    optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0))
    attempts = [
        lambda: engine.build([variable]),
        lambda: engine.apply([tf.ones([2])], [variable], pytest.fail),
        lambda: optimizer.build([variable]),
        lambda: optimizer.apply_gradients([(tf.ones([2]), variable)]),
    ]
    # Keras 3 trains its own variables.
    for attempt in attempts[: 2 if family.name == "keras3" else 4]:
        with pytest.raises(ValueError, match="must not lie on a DTensor mesh"):
            attempt()
    assert int(engine.applied_steps.numpy()) == 0
    assert engine.loss_scale.skipped_steps.numpy() == 0
