"""The worst number of each gradient, in every dtype: finite, infinite or NaN."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import compiled

from lossscale.gradients import check as faults
from lossscale.gradients.packing import pack

INF, NAN = float("inf"), float("nan")


def kinds(worst):
    return [0 if np.isfinite(each) else str(each) for each in worst.numpy()]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex64"])
def test_every_dtype(dtype):
    def one(value):
        if dtype == "complex64":
            return tf.complex(tf.zeros([2]), tf.constant([1.0, value]))
        return tf.cast([1.0, value], dtype)

    grads = [one(1.0), one(INF), None, tf.constant([1]), one(NAN), one(1.0)]
    sparse = tf.IndexedSlices(one(INF), tf.constant([0, 1]), tf.constant([9]))
    packed, groups = pack([*grads, sparse])
    for mode in ("eager", "graph", "xla"):
        worst = compiled(lambda: faults.worst_of_each(packed, groups), mode)()
        assert not bool(faults.are_clean(worst))
        assert kinds(worst) == [0, "inf", 0, 0, "nan", 0, "inf"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_only_what_is_not_finite_is_a_fault(dtype, mode):
    largest = tf.fill([2000], tf.constant(tf.as_dtype(dtype).max, dtype))
    ends = [[1.0], [-INF], [INF, -INF], [INF, NAN], [-NAN, 1.0]]
    grads = [tf.concat([largest, tf.constant(end, dtype)], 0) for end in ends]
    alone = [[position] for position in range(len(grads))]
    worst = compiled(lambda: faults.worst_of_each(grads, alone), mode)()
    assert kinds(worst) == [0, "inf", "inf", "nan", "nan"]
    nothing = compiled(lambda: faults.worst_of_each([largest[:0]], [[0]]), mode)()
    assert nothing.numpy().tolist() == [0.0]
