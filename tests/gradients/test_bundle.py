"""Bundles cross replicas whole; sums of duplicate rows. test_step.py has the checks."""

import numpy as np
import pytest
import strategies
import tensorflow as tf
from models import compiled

from lossscale import FixedLossScale
from lossscale.gradients.bundle import (
    Bundle,
    magnitudes_of_rows,
    row_sums_stay_finite,
    sums_of_rows,
)
from lossscale.runtime import replicas

SCALE = FixedLossScale(4.0)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_it_crosses_replicas_whole(mirrored, mode):
    count = mirrored.num_replicas_in_sync

    def meet(bundle):
        # More positions than Python keeps one object of each for.
        assert replicas.local_result(bundle).groups == [[i] for i in range(300)]
        return replicas.call_for_each_replica(lambda own: own.grads[-1], bundle)

    def replica():
        grad = tf.fill([2], tf.cast(strategies.replica(), tf.float32))
        bundle = Bundle(SCALE, [*[None] * 299, grad], [None] * 300)
        return replicas.merge_call(meet, bundle)

    found = compiled(lambda: mirrored.run(replica), mode)()
    found = mirrored.experimental_local_results(found)
    np.testing.assert_array_equal(found, [[i, i] for i in range(count)])


BIG = 4e4


def bundle_of(grads, divisors=None):
    return Bundle(SCALE, grads, divisors or [None] * len(grads))


def sparse(values, indices, dtype=tf.float16):
    values = tf.cast(tf.reshape(tf.constant(values), [-1, 1]), dtype)
    return tf.IndexedSlices(values, tf.constant(indices), tf.constant([5, 1]))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64], ids=str)
def test_wider_and_dense_gradients_are_not_looked_at(dtype):
    wide = sparse([1.0], [0], tf.float32)
    wide = tf.IndexedSlices(tf.cast(wide.values, dtype), wide.indices)
    dense = tf.ones([2], tf.float16)
    assert not bundle_of([wide, dense, None, 1.0]).has_duplicates
    assert bundle_of([None, sparse([1.0], [0])]).has_duplicates


@pytest.mark.parametrize(
    ("values", "indices", "is_finite"),
    [
        ([BIG, BIG], [1, 3], True),
        ([BIG, BIG], [3, 3], False),
        ([BIG, -BIG], [3, 3], True),
        ([BIG, -BIG, BIG], [3, 3, 3], False),  # in one order it is infinite
        ([2e4, 2e4, 2e4], [3, 3, 3], True),
        ([65504.0, 15.0], [0, 0], True),  # rounded it is 65504
        ([65504.0, 17.0], [0, 0], False),
        ([np.nan], [2], False),
        ([np.inf, -np.inf], [2, 2], False),
    ],
    ids=str,
)
def test_sums_are_exact(values, indices, is_finite, mode):
    def look(values):
        grad = tf.IndexedSlices(values, tf.constant(indices), tf.constant([5, 1]))
        return tf.reduce_all(tf.math.is_finite(sums_of_rows([grad])[0]))

    given = sparse(values, indices).values
    assert bool(compiled(look, mode)(given)) == is_finite


def test_the_proof_never_holds_where_a_sum_overflows(mode, rng):
    def both(values, indices):
        grad = tf.IndexedSlices(values, indices, tf.constant([5, 1]))
        exact = tf.reduce_all(tf.math.is_finite(sums_of_rows([grad])[0]))
        return row_sums_stay_finite(bundle_of([None, grad])), exact

    both = compiled(both, mode)
    seen = set()
    for size in np.linspace(1e3, 6e4, 60):
        values = tf.constant(rng.uniform(-size, size, [6, 1]), tf.float16)
        proof, exact = both(values, tf.constant(rng.integers(0, 5, 6)))
        seen.add((bool(proof), bool(exact)))
    assert seen == {(True, True), (False, True), (False, False)}


def test_the_proof_looks_at_what_is_still_to_be_divided():
    grads = [sparse([BIG, 2e4], [1, 2])]
    assert not bool(row_sums_stay_finite(bundle_of(grads)))
    assert bool(row_sums_stay_finite(bundle_of(grads, [tf.constant(8.0)])))
    assert not bool(
        row_sums_stay_finite(bundle_of(grads, [tf.constant(8.0)]), terms=16)
    )


def test_magnitudes_are_dense():
    grad = sparse([1.0, -2.0, 4.0], [3, 3, 0])
    expected = [[4.0], [0.0], [0.0], [3.0], [0.0]]
    np.testing.assert_array_equal(magnitudes_of_rows(grad), expected)
