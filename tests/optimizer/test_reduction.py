"""`step`: what replicas know together, also of more replicas than are here."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from strategies import last_replica_gets

from lossscale import FixedLossScale
from lossscale.gradients.bundle import Bundle
from lossscale.gradients.check import Check
from lossscale.optimizer.reduction import EqualReplicas, SeveralReplicas
from lossscale.runtime import replicas

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("are_added", [False, True])
def test_all_replicas_have_the_flag_of_the_one_that_is_not_finite(mirrored, are_added):
    """Each by itself would decide otherwise than the last one."""
    loss_scale = FixedLossScale(1.0)

    def replica(special):
        reduction = SeveralReplicas(are_added)
        grads = [tf.reshape(last_replica_gets(special, 1.0), [1])]
        bundle = Bundle(loss_scale, grads, [None])
        bundle, contribution = reduction.check(bundle)

        def together(contributions, bundle):
            agreed = reduction.reduce(contributions, bundle).quick
            return replicas.call_for_each_replica(lambda: tf.identity(agreed))

        return replicas.merge_call(together, contribution, bundle)

    step = tf.function(lambda special: mirrored.run(replica, args=(special,)))
    count = mirrored.num_replicas_in_sync
    for special, flag in ((np.inf, False), (np.nan, False), (2.0, True)):
        found = mirrored.experimental_local_results(step(tf.constant(special)))
        assert [bool(each) for each in found] == [flag] * count


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
