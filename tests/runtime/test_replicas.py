"""What replicas know together, without a strategy, in replica context and across."""

import numpy as np
import pytest
import tensorflow as tf
from models import compiled

from lossscale.runtime import replicas


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_sums_and_the_greatest_across_replicas(mirrored, mode):
    count = mirrored.num_replicas_in_sync

    def meet(own):
        assert tf.distribute.in_cross_replica_context()
        doubled = replicas.call_for_each_replica(lambda x: 2.0 * x, own)
        total = replicas.all_reduce_sum(doubled)
        return tf.stack([total, replicas.greatest(own), replicas.local_result(own)])

    def replica():
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        return replicas.merge_call(meet, tf.cast(number, tf.float32))

    results = compiled(lambda: mirrored.run(replica), mode)()
    for found in mirrored.experimental_local_results(results):
        np.testing.assert_array_equal(found, [count * (count - 1), count - 1, 0])


def test_each_replica_has_a_name_that_stays(mirrored):
    seen = [[], []]
    for names in seen:
        mirrored.run(lambda names=names: names.append(replicas.this_one()))
    assert len(set(seen[0])) == mirrored.num_replicas_in_sync
    assert set(seen[0]) == set(seen[1])
    assert replicas.this_one() not in seen[0]
