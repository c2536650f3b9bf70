"""What moves elements, chooses some of them, or counts them."""

from __future__ import annotations

import tensorflow as tf

from between.values import OTHER, SHAPE, column


def partitioned(g):
    parts = tf.dynamic_partition(column(g), tf.cast(column(g) > 0.0, tf.int32), 2)
    at = tf.dynamic_partition(tf.range(9), tf.cast(column(g) > 0.0, tf.int32), 2)
    return tf.ensure_shape(tf.dynamic_stitch(at, [parts[0], parts[1] * 2.0]), [9])


MOVEMENTS = {
    "reshape and back": lambda g: tf.reshape(tf.reshape(g, [9, 1]), SHAPE),
    "concat with zeros": lambda g: tf.concat([g[:2], tf.zeros([1, 3])], 0),
    "concat with ones": lambda g: tf.concat([g[:2], tf.ones([1, 3])], 0),
    "concat of two": lambda g: tf.concat([g, -2.0 * g], 0),
    "pad": lambda g: tf.pad(g, [[1, 0], [0, 1]])[:3, :3],
    "pad with ones": lambda g: tf.pad(g, [[1, 0], [0, 1]], constant_values=1.0)[:3, :3],
    "gather": lambda g: tf.gather(g, [2, 0, 1]),
    "gather by argsort": lambda g: tf.gather(column(g), tf.argsort(column(g))),
    "scatter_nd": lambda g: tf.scatter_nd([[2], [0], [0]], g, SHAPE),
    "tensor_scatter_nd_update": lambda g: tf.tensor_scatter_nd_update(
        g, [[0, 0]], [0.0]
    ),
    "tensor_scatter_nd_add with 1": lambda g: tf.tensor_scatter_nd_add(
        g, [[0, 0]], [1.0]
    ),
    "strided slice": lambda g: g[::2, ::-1],
    "stack with ones": lambda g: tf.stack([g[0], g[1], tf.ones([3])]),
    "boolean_mask": lambda g: tf.reduce_sum(tf.boolean_mask(g, g > 0.0)),
    "boolean_mask of 0.1": lambda g: tf.reduce_sum(tf.boolean_mask(g, g > 0.1)),
    "gather_nd(where(g > 0))": lambda g: tf.reduce_sum(
        tf.gather_nd(g, tf.where(g > 0.0))
    ),
    "sort": tf.sort,
    "unique indices": lambda g: tf.unique(column(g)).idx,
    "dynamic_partition": partitioned,
    "sparse to dense": lambda g: tf.sparse.to_dense(tf.sparse.from_dense(g)),
    "sparse_dense_matmul": lambda g: tf.sparse.sparse_dense_matmul(
        tf.sparse.from_dense(g), tf.constant(OTHER)
    ),
    "sparse.softmax": lambda g: tf.sparse.to_dense(
        tf.sparse.softmax(tf.sparse.from_dense(g))
    ),
    "IndexedSlices": lambda g: tf.convert_to_tensor(
        tf.IndexedSlices(g, tf.constant([0, 2, 2]), tf.constant(SHAPE))
    ),
    "ragged": lambda g: tf.RaggedTensor.from_tensor(g, lengths=[1, 2, 3]).to_tensor(
        shape=SHAPE
    ),
    "set_diag": lambda g: tf.linalg.set_diag(g, tf.zeros([3])),
    "one_hot with values": lambda g: tf.one_hot([0, 1, 2], 3, g[0, 0], 0.0),
    "fill": lambda g: tf.fill(SHAPE, g[1, 1]),
    "linspace": lambda g: tf.linspace(0.0, tf.reduce_max(g), 9),
    "range": lambda g: tf.range(9.0) * g[0, 0],
    "searchsorted": lambda g: tf.searchsorted(tf.constant([-1.0, 0.0, 1.0]), column(g)),
    "histogram": lambda g: tf.cast(
        tf.histogram_fixed_width(g, [-3.0, 3.0], 9), tf.float32
    ),
    "bincount with weights": lambda g: tf.math.bincount(
        tf.constant([0, 1, 0, 2, 1, 0, 2, 1, 0]), weights=column(g)
    ),
    "bucketize": lambda g: tf.raw_ops.Bucketize(input=g, boundaries=[-1.0, 0.0, 1.0]),
}
