"""Checks: joined by `&`, settled, and exact only where the quick check fails."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from models import compiled

from lossscale.gradients.check import CLEAN, Check, greater

#: Of each kind of gradients: do they pass the quick check, are they finite?
QUICK, SLOW, BAD = (True, True), (False, True), (False, False)
INF, NAN = float("inf"), float("nan")
MODES = ["eager", "graph", "xla"]


class Checked:
    """A check of two gradients, the first of which may be at fault."""

    def __init__(self, kind, worst=INF):
        self.quick, self.is_finite = kind
        self.worst = 0.0 if self.is_finite else worst
        self.examined = 0

    def check(self, largest=None):
        def exact_check():
            self.examined += 1
            return tf.constant(self.is_finite)

        def worst():
            return tf.constant([self.worst, 0.0])

        return Check(tf.constant(self.quick), exact_check, worst, largest)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("first", "last"), itertools.product([QUICK, SLOW, BAD], repeat=2)
)
def test_two_checks_together(first, last, mode):
    def joined():
        check = Checked(first, INF).check() & Checked(last, NAN).check()
        return check.quick, check.exact(), check.exact_in_branch(), check.worst()

    quick, *exact, worst = compiled(joined, mode)()
    assert bool(quick) == (first[0] and last[0])
    assert [bool(each) for each in exact] == [first[1] and last[1]] * 2
    # The first is the cause of what the last one finds.
    cause = INF if first is BAD else NAN if last is BAD else 0.0
    np.testing.assert_array_equal(worst, [cause, 0.0])


def test_nobody_examines_what_passes_the_quick_check():
    for kind, times in ((QUICK, 0), (SLOW, 1), (BAD, 1)):
        checked = Checked(kind)
        assert bool(checked.check().exact()) is kind[1]
        assert checked.examined == times


@pytest.mark.parametrize("kind", [QUICK, SLOW, BAD])
def test_clean_changes_nothing(kind):
    check = Checked(kind).check(tf.constant(3.0))
    for joined in (check & CLEAN, CLEAN & check, CLEAN & check & CLEAN):
        assert joined == check
    assert (CLEAN & CLEAN) == CLEAN
    assert CLEAN.exact() is True
    assert CLEAN.exact_in_branch() is True
    assert CLEAN.worst_of(2).numpy().tolist() == [0.0, 0.0]


def test_clean_may_know_the_largest():
    check = Checked(SLOW).check(tf.constant(3.0))
    known = CLEAN._replace(largest=tf.constant(5.0))
    for joined in (check & known, known & check):
        assert float(joined.largest) == 5.0
        assert joined.exact_check is check.exact_check


def test_what_is_exact_stays_so():
    exact = Check(tf.constant(True))
    assert (exact & exact).exact_check is None
    assert (exact & Checked(SLOW).check()).exact_check is not None
    assert bool((exact & Check(tf.constant(False))).exact()) is False


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [QUICK, SLOW, BAD])
def test_settled_it_says_the_same(kind, mode):
    def settled():
        check = Checked(kind).check(tf.constant(3.0)).without_gradients(2)
        assert check.exact_check is None
        return check.exact(), check.worst_of(2), check.largest

    flag, worst, largest = compiled(settled, mode)()
    assert bool(flag) is kind[1]
    assert worst.numpy().tolist() == [0.0 if kind[1] else INF, 0.0]
    assert float(largest) == 3.0


def test_settled_in_a_graph_it_examines_in_a_branch():
    values = tf.constant([1.0, 2.0])

    @tf.function(autograph=False)
    def settled():
        check = Check(
            tf.math.is_finite(tf.reduce_sum(values)),
            lambda: tf.reduce_all(tf.math.is_finite(values)),
            lambda: tf.zeros([1]),
        ).without_gradients(1)
        return check.exact()

    assert bool(settled())
    operations = settled.get_concrete_function().graph.get_operations()
    assert "IsFinite" in {each.type for each in operations}
    assert not any(each.type == "All" for each in operations)  # within the branch


def test_the_greater_of_what_is_requested():
    one, two = tf.constant(1.0), tf.constant(2.0)
    assert greater(None, None) is None
    assert greater(None, one) is one
    assert greater(one, None) is one
    assert float(greater(one, two)) == float(greater(two, one)) == 2.0
