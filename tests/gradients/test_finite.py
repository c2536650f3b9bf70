"""all_finite: exact, sparse, and unmoved by what is not floating."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from models import compiled

from lossscale import all_finite
from lossscale.gradients.check import checked, sum_stays_finite

BAD = [np.inf, -np.inf, np.nan]


@pytest.fixture(params=["eager", "graph", "xla"])
def check(request):
    function = compiled(all_finite, request.param)
    return lambda grads: bool(function(grads))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("bad", BAD)
def test_one_bad_element_among_many_is_seen(check, dtype, bad):
    good = np.ones([7, 31])
    worse = good.copy()
    worse[6, 30] = bad
    assert check([tf.cast(good, dtype)])
    assert not check([tf.cast(good, dtype), tf.cast(worse, dtype)])


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("size", [3, 5000])
@pytest.mark.parametrize(("dtype", "number"), [("float16", 7e4), ("bfloat16", 3.4e38)])
def test_an_infinity_made_by_rounding_is_seen(mode, size, dtype, number):
    # XLA leaves roundings out where it can, and stores the infinity all the same.
    check = compiled(lambda value: all_finite([tf.cast(value, dtype)]), mode)
    assert bool(check(tf.fill([size], 6e4)))
    assert not bool(check(tf.fill([size], number)))


@pytest.mark.peer_defect(25)
@pytest.mark.parametrize(
    "grad",
    [
        np.full([2], 1e20, np.float32),
        np.full([1000], 3.4e38, np.float32),
        np.full([4], np.finfo(np.float64).max),
        np.full([4], 65504, np.float16),
        np.array([3.4e38, -3.4e38, 3.4e38], np.float32),
    ],
    ids=str,
)
def test_finite_gradients_whose_sum_or_norm_overflows_are_finite(check, grad):
    assert check([tf.constant(grad)])


def test_opposite_infinities_do_not_cancel(check):
    assert not check([tf.constant([np.inf, -np.inf], tf.float32)])
    assert not check([tf.constant([np.inf]), tf.constant([-np.inf])])


@settings(max_examples=60, deadline=None)
@given(
    grads=st.lists(
        hnp.arrays(
            np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0), fill=None
        ),
        max_size=3,
    )
)
def test_agrees_with_numpy_on_any_gradients(grads):
    expected = all(bool(np.isfinite(grad).all()) for grad in grads)
    assert bool(all_finite([tf.constant(grad) for grad in grads])) == expected


def test_nests_nones_numbers_and_variables():
    bad = tf.Variable([np.nan])
    assert bool(all_finite([]))
    assert bool(all_finite([None, {"a": (1.0, np.float32(2.0)), "b": None}]))
    assert not bool(all_finite({"a": [None, np.inf]}))
    assert not bool(all_finite({"a": [None, (bad,)]}))
    assert bool(all_finite(tf.zeros([0, 3])))


@pytest.mark.peer_defect(22)
def test_integers_and_bools_are_ignored_and_complex_numbers_checked(check):
    assert check([tf.constant([1, 2]), tf.constant([True]), tf.constant([1.0 + 1j])])
    assert not check([tf.constant([complex(1, np.inf)], tf.complex64)])
    assert not check([tf.constant([complex(np.nan, 1)], tf.complex128)])


def _slices(values):
    return tf.IndexedSlices(tf.constant(values), tf.constant([1, 5]), [10**9, 2])


@pytest.mark.peer_defect(19)
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_sparse_gradients_are_never_made_dense(mode):
    # Dense, these would take 8 GB each.
    good, bad = [[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, np.inf]]
    assert bool(all_finite([_slices(good)]))
    assert not bool(all_finite([_slices(bad)]))

    def check(values):
        return all_finite([tf.IndexedSlices(values, tf.constant([1, 5]), [10**9, 2])])

    check = compiled(check, mode)
    assert bool(check(tf.constant(good)))
    assert not bool(check(tf.constant(bad)))


def test_sparse_and_ragged_tensors_are_looked_into():
    sparse = tf.SparseTensor([[0, 0], [1, 2]], [1.0, np.inf], [10**5, 10**5])
    assert not bool(all_finite([sparse]))
    assert not bool(all_finite([tf.ragged.constant([[1.0], [2.0, np.nan]])]))


def test_exact_check_runs_only_if_the_sum_is_not_finite():
    # The promise of one read of memory: is_finite of a whole gradient sits in a branch.
    graph = tf.function(all_finite).get_concrete_function([tf.ones([64, 64])]).graph
    looked_at = [
        op.inputs[0].shape for op in graph.get_operations() if op.type == "IsFinite"
    ]
    assert all(shape.rank == 0 for shape in looked_at)
    assert any(op.type in ("If", "StatelessIf") for op in graph.get_operations())


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_of_float16_the_quick_check_does_not_fail_for_a_sum_that_overflows(mode):
    # At a loss scale that is as high as it can be, most sums of float16 overflow.
    quick = compiled(lambda grads: checked(grads).quick, mode)
    large = tf.fill([1000], tf.constant(1000.0, tf.float16))
    others = [tf.ones([3]), tf.ones([3], tf.bfloat16)]
    assert bool(quick([large]))
    assert bool(quick([large, *others]))
    assert not bool(quick([large, tf.constant([np.nan], tf.float16), *others]))
    assert not bool(quick([large, *others, tf.constant([np.inf])]))
    assert not bool(quick([large, *others, tf.constant([-np.inf], tf.bfloat16)]))


class TestSumStaysFinite:
    """What proves that adding replicas' gradients up cannot overflow."""

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    def test_small_gradients_do(self, dtype):
        assert bool(sum_stays_finite([tf.cast([1.0, 2.0, 30.0], dtype), None], 8))

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    def test_large_gradients_are_not_proven_to(self, dtype):
        largest = tf.cast(np.array([float(tf.as_dtype(dtype).max)]), dtype)
        assert not bool(
            sum_stays_finite([tf.cast([1.0], dtype), largest * tf.cast(0.6, dtype)], 2)
        )

    @pytest.mark.parametrize("bad", BAD)
    def test_what_is_not_finite_never_does(self, bad):
        assert not bool(sum_stays_finite([tf.constant([1.0, bad])], 2))

    @settings(max_examples=60, deadline=None)
    @given(
        grads=hnp.arrays(
            np.float16, (4, 5), elements=st.floats(-65504, 65504, width=16)
        )
    )
    def test_yes_means_that_the_sum_is_finite(self, grads):
        if all(bool(sum_stays_finite([tf.constant(grad)], 4)) for grad in grads):
            assert np.isfinite(np.add.reduce(grads, dtype=np.float16)).all()
