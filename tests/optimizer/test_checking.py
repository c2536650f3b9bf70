"""Checks when gradients are unscaled, and when they are applied."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import compiled

from lossscale import DynamicLossScale, FixedLossScale
from lossscale.gradients.check import CLEAN, Check
from lossscale.optimizer.bundle import (
    Bundle,
    check_of_quotients,
    largest_unscaled,
    unscale_and_check,
)
from lossscale.optimizer.reduction import EqualReplicas

INF = float("inf")
MODES = ["eager", "graph", "xla"]
SCALE = FixedLossScale(4.0)


def bundle_of(*values, divisor=4.0, dtype=tf.float32):
    grads = [tf.constant(each, dtype) for each in values]
    divisor = None if divisor is None else tf.constant(divisor)
    return Bundle(SCALE, grads, [divisor] * len(grads))


@pytest.mark.parametrize("mode", MODES)
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
        check = check_of_quotients(bundle_of(*values, divisor=divisor))
        return check.quick, check.exact(), check.exact_in_branch()

    assert [bool(each) for each in compiled(checked, mode)()] == [quick, exact, exact]


@pytest.mark.parametrize("mode", MODES)
def test_unscaled_they_come_back_with_the_worst_and_the_largest(mode):
    loss_scale = DynamicLossScale(4.0)
    loss_scale.keep_largest()

    def unscaled(*values):
        bundle = bundle_of([1.0, -8.0], *values).but(loss_scale=loss_scale)
        grads, check = unscale_and_check(bundle)
        return grads[0], check.exact(), check.worst_of(3), check.largest

    grad, flag, worst, largest = compiled(lambda: unscaled([3.0], [5.0]), mode)()
    assert grad.numpy().tolist() == [0.25, -2.0]
    assert bool(flag)
    assert np.isfinite(worst).all()
    assert float(largest) == 2.0
    _, flag, worst, _ = compiled(lambda: unscaled([INF], [float("nan")]), mode)()
    assert not bool(flag)
    np.testing.assert_array_equal(worst[1:], [INF, float("nan")])
    assert np.isfinite(worst[0])


def test_a_loss_scale_that_checks_nothing():
    (grad,), check = unscale_and_check(bundle_of([8.0]))
    assert float(grad[0]) == 2.0
    assert check is CLEAN


@pytest.mark.parametrize("mode", MODES)
def test_what_nobody_has_changed_is_checked_once(mode):
    def applied():
        bad = Check(tf.constant(False), None, lambda: tf.constant([INF]))
        bundle = bundle_of([1.0], divisor=None).but(check=bad)
        known, _ = EqualReplicas().check(bundle.but(is_checked=True))
        assert known.check is bad
        checked, _ = EqualReplicas().check(bundle)
        return checked.check.exact()

    assert not bool(compiled(applied, mode)())


@pytest.mark.parametrize("mode", MODES)
def test_duplicate_rows_are_summed_before_they_are_checked(mode):
    def applied(row):
        values = tf.constant([4e4, 4e4], tf.float16)
        grad = tf.IndexedSlices(values, tf.stack([0, row]), tf.constant([2]))
        checked, _ = EqualReplicas().check(Bundle(SCALE, [grad], [None]))
        check = checked.check
        return check.quick, check.exact(), check.worst()

    applied = compiled(applied, mode)
    for row, exact in ((1, True), (0, False)):
        quick, flag, worst = applied(tf.constant(row))
        assert (bool(quick), bool(flag)) == (False, exact)
        assert np.isfinite(worst).all() == exact


def test_the_largest_is_that_before_anybody_clipped():
    clipped = bundle_of([1.0], divisor=None)
    scaled = bundle_of([64.0])
    mixed = clipped.but(
        grads=[*clipped.grads, *scaled.grads],
        divisors=[*clipped.divisors, *scaled.divisors],
        groups=[[0], [1]],
    )
    before = Check(tf.constant(True), largest=tf.constant(9.0))
    assert float(largest_unscaled(clipped)) == 1.0
    assert float(largest_unscaled(scaled)) == 16.0
    assert float(largest_unscaled(clipped.but(check=before))) == 9.0
    assert float(largest_unscaled(mixed.but(check=before))) == 16.0
    assert float(largest_unscaled(mixed.but(check=before, is_checked=True))) == 9.0
    enlarged = mixed.but(grads=[tf.constant([99.0]), *scaled.grads], check=before)
    assert float(largest_unscaled(enlarged)) == 16.0
