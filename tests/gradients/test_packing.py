"""Small gradients packed into few tensors come out as they went in."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from lossscale.gradients.check import SMALL, add_up, pack, unpack


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
    assert [tensor.shape for tensor in summed[2:]] == [SMALL + 1, 1, 2]
