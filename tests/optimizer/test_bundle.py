"""Bundles: gradients divided, packed and given back, and taken across replicas."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import compiled

from lossscale import FixedLossScale
from lossscale.gradients.check import CLEAN
from lossscale.optimizer.bundle import Bundle
from lossscale.runtime import replicas

SCALE = FixedLossScale(4.0)


def grads():
    """Small ones of two shapes, a sparse one, one that is missing, and a count."""
    sparse = tf.IndexedSlices(
        tf.fill([2, 3], 8.0), tf.constant([0, 1]), tf.constant([5, 3])
    )
    return [tf.fill([2], 8.0), None, tf.fill([3], 8.0), sparse, tf.fill([2], 16.0)]


def numbers(grads):
    return [
        None if grad is None else float(tf.reduce_max(getattr(grad, "values", grad)))
        for grad in grads
    ]


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("packs", [False, True])
def test_each_is_divided_by_its_own(mode, packs):
    two, four = tf.constant(2.0), tf.constant(4.0)
    for divisors, expected in (
        ([four] * 5, [2.0, None, 2.0, 2.0, 4.0]),
        ([None] * 5, [8.0, None, 8.0, 8.0, 16.0]),
        ([two, four, None, four, two], [4.0, None, 8.0, 2.0, 8.0]),
    ):

        def unscaled(divisors=divisors):
            bundle = Bundle(SCALE, grads(), divisors)
            bundle = bundle.packed() if packs else bundle
            return bundle.unscaled(), bundle.divided().unscaled()

        for found in compiled(unscaled, mode)():
            assert numbers(found) == expected


def test_what_is_divided_by_the_same_is_packed():
    four = tf.constant(4.0)
    bundle = Bundle(SCALE, grads(), [four, four, four, four, four])
    packed = bundle.packed()
    assert packed.groups == [[0, 4], [1], [2], [3]]
    assert packed.count == bundle.count == 5
    assert [tuple(each.shape) for each in packed.grads[::2]] == [(2, 2), (3,)]
    mixed = Bundle(SCALE, grads(), [four, None, None, four, four])
    assert mixed.packed() is mixed


def test_nothing_is_left_to_divide_once_it_is_divided():
    divided = Bundle(SCALE, grads(), [tf.constant(4.0)] * 5).packed().divided()
    assert divided.distinct_divisors() == [None]
    assert divided.quotients() is divided.grads


def test_it_begins_with_nothing_known_and_changes_in_copies():
    bundle = Bundle(SCALE, [tf.constant(1.0)], [None])
    assert (bundle.check, bundle.is_checked, bundle.losses) == (CLEAN, False, [])
    assert bundle.but(is_checked=True).is_checked
    assert not bundle.is_checked


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
