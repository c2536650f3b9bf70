"""Checks: joined, settled, exact where the quick one fails; and the worst numbers.

Small gradients packed into few tensors come out as they went in.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from models import compiled

from lossscale import all_finite
from lossscale.gradients.check import (
    SMALL,
    Check,
    add_up,
    checked,
    pack,
    sum_stays_finite,
    unpack,
    worst_of_each,
)

#: Of each kind of gradients: do they pass the quick check, are they finite?
QUICK, SLOW, BAD = (True, True), (False, True), (False, False)
INF, NAN = float("inf"), float("nan")


def check_of(kind, worst=INF, largest=None):
    """Returns a check of two gradients, the first of which may be at fault."""
    quick, is_finite = kind
    numbers = [0.0 if is_finite else worst, 0.0]
    return Check(
        tf.constant(quick),
        lambda: tf.constant(is_finite),
        lambda: tf.constant(numbers),
        largest,
    )


@pytest.mark.parametrize(
    ("first", "last"), [*itertools.product([QUICK, SLOW, BAD], repeat=2)]
)
def test_two_checks_together(first, last, mode):
    def joined():
        check = check_of(first, INF) & check_of(last, NAN)
        return check.quick, check.exact(), check._exact_in_branch(), check.worst()

    quick, *exact, worst = compiled(joined, mode)()
    assert bool(quick) == (first[0] and last[0])
    assert [bool(each) for each in exact] == [first[1] and last[1]] * 2
    # The first is the cause of what the last one finds.
    cause = INF if first is BAD else NAN if last is BAD else 0.0
    np.testing.assert_array_equal(worst, [cause, 0.0])


@pytest.mark.parametrize("kind", [QUICK, SLOW, BAD])
def test_settled_it_says_the_same(kind, mode):
    def settled():
        check = check_of(kind, largest=tf.constant(3.0)).without_gradients(2)
        assert check.exact_check is None
        return check.exact(), check.worst_of(2), check.largest

    flag, worst, largest = compiled(settled, mode)()
    assert bool(flag) is kind[1]
    assert worst.numpy().tolist() == [0.0 if kind[1] else INF, 0.0]
    assert float(largest) == 3.0


NOT_FINITE = [np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_one_bad_element_among_many_is_seen(mode, dtype, bad):
    check = compiled(all_finite, mode)
    good = np.ones([7, 31])
    worse = good.copy()
    worse[6, 30] = bad
    assert bool(check([tf.cast(good, dtype)]))
    assert not bool(check([tf.cast(good, dtype), tf.cast(worse, dtype)]))


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("size", [3, 5000])
@pytest.mark.parametrize(("dtype", "number"), [("float16", 7e4), ("bfloat16", 3.4e38)])
def test_an_infinity_made_by_rounding_is_seen(mode, size, dtype, number):
    # XLA leaves roundings out where it can, and stores the infinity all the same.
    check = compiled(lambda value: all_finite([tf.cast(value, dtype)]), mode)
    assert bool(check(tf.fill([size], 6e4)))
    assert not bool(check(tf.fill([size], number)))


SPARSE = tf.SparseTensor([[0, 0], [1, 2]], [1.0, np.inf], [10**5, 10**5])


def large_rows(*values):
    """Returns gradients of an embedding that would take 8 GB if they were dense."""
    return tf.IndexedSlices(tf.constant([values]), tf.constant([1]), [10**9, 2])


#: Nests, and whether all in them is finite.
NESTS = [
    ([], True),
    (tf.zeros([0, 3]), True),
    ([None, {"a": (1.0, np.float32(2.0)), "b": None}], True),
    ({"a": [None, np.inf]}, False),
    ({"a": [None, (tf.Variable([np.nan]),)]}, False),
    # Opposite infinities do not cancel.
    ([tf.constant([np.inf, -np.inf])], False),
    ([tf.constant([np.inf]), tf.constant([-np.inf])], False),
    # Their sum or their norm overflows.
    ([np.full([2], 1e20, np.float32)], True),
    ([np.full([1000], 3.4e38, np.float32)], True),
    ([np.full([4], np.finfo(np.float64).max)], True),
    ([np.full([4], 65504, np.float16)], True),
    ([np.array([3.4e38, -3.4e38, 3.4e38], np.float32)], True),
    # Integers and bools are ignored.
    ([tf.constant([1, 2]), tf.constant([True]), tf.constant([1.0 + 1j])], True),
    ([tf.constant([complex(1, np.inf)], tf.complex64)], False),
    ([tf.constant([complex(np.nan, 1)], tf.complex128)], False),
    ([large_rows(1.0, 2.0)], True),
    ([large_rows(3.0, np.inf)], False),
    ([SPARSE], False),
    ([tf.ragged.constant([[1.0], [2.0, np.nan]])], False),
]


@pytest.mark.peer_defect(19)
@pytest.mark.peer_defect(22)
@pytest.mark.peer_defect(25)
def test_what_is_finite(mode):
    flags = compiled(lambda: [all_finite(nest) for nest, _ in NESTS], mode)()
    for flag, (nest, is_finite) in zip(flags, NESTS):
        assert bool(flag) == is_finite, nest


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


def test_exact_check_runs_only_if_the_sum_is_not_finite():
    # The promise of one read of memory: is_finite of a whole gradient sits in a branch.
    graph = tf.function(all_finite).get_concrete_function([tf.ones([64, 64])]).graph
    looked_at = [
        op.inputs[0].shape for op in graph.get_operations() if op.type == "IsFinite"
    ]
    assert all(shape.rank == 0 for shape in looked_at)
    assert any(op.type in ("If", "StatelessIf") for op in graph.get_operations())


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_only_of_small_gradients_the_sum_over_replicas_is_sure_to_be_finite(dtype):
    assert bool(sum_stays_finite([tf.cast([1.0, 2.0, 30.0], dtype), None], 8))
    for large in (0.6 * float(tf.as_dtype(dtype).max), *NOT_FINITE):
        grads = [tf.cast([1.0], dtype), tf.cast(np.array([large]), dtype)]
        assert not bool(sum_stays_finite(grads, 2))


@settings(max_examples=60, deadline=None)
@given(
    grads=hnp.arrays(np.float16, (4, 5), elements=st.floats(-65504, 65504, width=16))
)
def test_where_the_sum_is_sure_to_be_finite_it_is(grads):
    if all(bool(sum_stays_finite([tf.constant(grad)], 4)) for grad in grads):
        assert np.isfinite(np.add.reduce(grads, dtype=np.float16)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_only_what_is_not_finite_is_a_fault(dtype, mode):
    largest = tf.fill([2000], tf.constant(tf.as_dtype(dtype).max, dtype))
    ends = [[1.0], [-INF], [INF, -INF], [INF, NAN], [-NAN, 1.0]]
    grads = [tf.concat([largest, tf.constant(end, dtype)], 0) for end in ends]
    grads += [None, tf.constant([1]), tf.IndexedSlices(grads[1], tf.range(2001))]
    grads.append(tf.complex([0.0, 0.0], [1.0, INF]))
    packed, groups = pack(grads)
    worst = compiled(lambda: worst_of_each(packed, groups), mode)().numpy()
    kinds = [0 if np.isfinite(each) else str(each) for each in worst]
    assert kinds == [0, "inf", "inf", "nan", "nan", 0, 0, "inf", "inf"]
    nothing = compiled(lambda: worst_of_each([largest[:0]], [[0]]), mode)()
    assert nothing.numpy().tolist() == [0.0]


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
        tf.ones([SMALL + 1]),  # too large to be packed
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
    assert [tensor.shape for tensor in summed[2:]] == [SMALL + 1, 1, 2, SMALL + 1]
