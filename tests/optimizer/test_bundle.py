"""Bundles: gradients packed, checked as quotients, and taken across replicas."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import compiled

from lossscale import FixedLossScale
from lossscale.gradients.check import CLEAN
from lossscale.optimizer.bundle import Bundle, check_of_quotients, unscale_and_check
from lossscale.runtime import replicas

INF = float("inf")
SCALE = FixedLossScale(4.0)


def test_what_is_divided_by_the_same_is_packed():
    four = tf.constant(4.0)
    sparse = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 1]), tf.constant([5, 3]))
    grads = [tf.ones([2]), None, tf.ones([3]), sparse, tf.ones([2])]
    bundle = Bundle(SCALE, grads, [four] * 5)
    packed = bundle.packed()
    assert packed.groups == [[0, 4], [1], [2], [3]]
    assert packed.count == bundle.count == 5
    assert [tuple(each.shape) for each in packed.grads[::2]] == [(2, 2), (3,)]
    mixed = Bundle(SCALE, grads, [four, None, None, four, four])
    assert mixed.packed() is mixed


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize(
    ("values", "divisor", "quick", "exact"),
    [
        ([[1.0, 2.0], [3.0]], 4.0, True, True),
        ([[1.0, INF], [3.0]], 4.0, False, False),
        ([[3e38, 3e38], [3.0]], 4.0, False, True),  # the sum overflows
        ([[1.0, 2.0], [3.0]], 0.5, False, True),  # a quotient might
        ([[2e38, 1.0], [3.0]], 0.5, False, False),  # and does
        ([[1.0, 2.0], [3.0]], None, True, True),
    ],
)
def test_the_quick_check_of_quotients_and_the_exact_one(
    values, divisor, quick, exact, mode
):
    def checked():
        by = None if divisor is None else tf.constant(divisor)
        bundle = Bundle(SCALE, list(map(tf.constant, values)), [by, by])
        check = check_of_quotients(bundle)
        return check.quick, check.exact(), check.exact_in_branch()

    assert [bool(each) for each in compiled(checked, mode)()] == [quick, exact, exact]


def test_a_loss_scale_that_checks_nothing():
    bundle = Bundle(SCALE, [tf.constant([8.0])], [tf.constant(4.0)])
    (grad,), check = unscale_and_check(bundle)
    assert float(grad[0]) == 2.0
    assert check is CLEAN


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_it_crosses_replicas_whole(mirrored, mode):
    count = mirrored.num_replicas_in_sync

    def meet(bundle):
        # More positions than Python keeps one object of each for.
        assert replicas.local_result(bundle).groups == [[i] for i in range(300)]
        return replicas.call_for_each_replica(lambda own: own.grads[-1], bundle)

    def replica():
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        grad = tf.fill([2], tf.cast(number, tf.float32))
        bundle = Bundle(SCALE, [*[None] * 299, grad], [None] * 300)
        return replicas.merge_call(meet, bundle)

    found = compiled(lambda: mirrored.run(replica), mode)()
    found = mirrored.experimental_local_results(found)
    np.testing.assert_array_equal(found, [[i, i] for i in range(count)])
