"""Bundles: gradients packed, and taken across replicas. test_step.py has the checks."""

from __future__ import annotations

import numpy as np
import pytest
import strategies
import tensorflow as tf
from models import compiled

from lossscale import FixedLossScale
from lossscale.optimizer.bundle import Bundle
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
