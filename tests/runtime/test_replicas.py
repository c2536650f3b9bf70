"""What replicas know together, without a strategy, in replica context and across."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import compiled

from lossscale.runtime import replicas

MODES = ["eager", "graph"]


def number():
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def results(strategy, function, mode):
    found = compiled(lambda: strategy.run(function), mode)()
    return [each.numpy() for each in strategy.experimental_local_results(found)]


def test_without_a_strategy_there_is_one():
    assert replicas.count() == 1
    value = tf.constant(3.0)
    assert replicas.all_reduce_sum(value) is value
    assert replicas.greatest(value) is value
    assert replicas.local_result(value) is value
    assert bool(replicas.agree(tf.constant(True)))
    assert replicas.merge_call(lambda x, y: (x, y), 1, 2) == (1, 2)
    assert replicas.call_for_each_replica(lambda x: x + 1, 1) == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("last", [True, False])
def test_all_agree_on_the_last_ones_flag(mirrored, mode, last):
    count = mirrored.num_replicas_in_sync

    def agree():
        is_last = tf.equal(number(), count - 1)
        return replicas.agree(tf.where(is_last, last, True))

    assert results(mirrored, agree, mode) == [last] * count


@pytest.mark.parametrize("mode", MODES)
def test_sums_and_the_greatest(mirrored, mode):
    count = mirrored.num_replicas_in_sync

    def both():
        own = tf.cast(number(), tf.float32) + 1.0
        return tf.stack([replicas.all_reduce_sum(own), replicas.greatest(own)])

    for found in results(mirrored, both, mode):
        np.testing.assert_array_equal(found, [count * (count + 1) / 2, count])


@pytest.mark.parametrize("mode", MODES)
def test_across_replicas_it_is_the_same(mirrored, mode):
    count = mirrored.num_replicas_in_sync

    def meet(own):
        assert tf.distribute.in_cross_replica_context()
        doubled = replicas.call_for_each_replica(lambda x: 2.0 * x, own)
        total = replicas.all_reduce_sum(doubled)
        return tf.stack([total, replicas.greatest(own), replicas.local_result(own)])

    def replica():
        return replicas.merge_call(meet, tf.cast(number(), tf.float32))

    for found in results(mirrored, replica, mode):
        np.testing.assert_array_equal(found, [count * (count - 1), count - 1, 0])


def test_each_replica_has_a_name_that_stays(mirrored):
    seen = [[], []]
    for names in seen:
        mirrored.run(lambda names=names: names.append(replicas.this_one()))
    assert len(set(seen[0])) == mirrored.num_replicas_in_sync
    assert set(seen[0]) == set(seen[1])
    assert replicas.this_one() not in seen[0]


def test_gradients_are_applied_in_replica_context(mirrored):
    mirrored.run(replicas.check_can_apply)
    replicas.check_can_apply()
    with mirrored.scope(), pytest.raises(ValueError, match=r"within strategy\.run"):
        replicas.check_can_apply()
