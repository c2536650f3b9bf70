"""Forward expressions with loops, complex numbers, sparse and ragged tensors."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from expressions_of_zeros import FEATURES, KEEP, MATRIX, impute, of_width, zeros


def _loop(x, count=3):
    def body(i, total):
        return i + 1, total + x * tf.cast(i, x.dtype)

    # XLA wants to know how often at most, to go back.
    return tf.while_loop(
        lambda i, _: i < count, body, (0, zeros(x)), maximum_iterations=4
    )[1]


def _recurrence(x):
    def step(state, inputs):
        return tf.tanh(state + inputs)

    columns = tf.transpose(x)
    return tf.transpose(tf.scan(step, columns, tf.zeros_like(columns[0])))


def _tensor_array(x):
    array = tf.TensorArray(x.dtype, 2, element_shape=x.shape)
    array = array.write(0, x).write(1, zeros(x))
    return tf.reduce_sum(array.stack(), 0)


def _by_rows(x):
    array = tf.TensorArray(x.dtype, tf.shape(x)[0], element_shape=x.shape[1:])
    _, array = tf.while_loop(
        lambda i, _: i < tf.shape(x)[0],
        lambda i, array: (i + 1, array.write(i, x[i] * 2.0)),
        [0, array],
    )
    return of_width(x, array.stack())


@tf.function
def _function(x):
    total = tf.zeros_like(x)
    for i in tf.range(3):
        if i > 0:
            total += x
    return total


LOOPS = {
    "while-from-zeros_like": _loop,
    "while-no-turn": lambda x: x + _loop(x, 0),
    "scan-from-zeros_like": _recurrence,
    "foldl-from-zeros_like": lambda x: (
        x + tf.foldl(lambda a, row: a + row, x, tf.zeros_like(x[0]))
    ),
    "map_fn": lambda x: of_width(x, tf.map_fn(lambda row: row * tf.ones_like(row), x)),
    "vectorized_map": lambda x: tf.vectorized_map(impute, x),
    "cond-zeros_like": lambda x: tf.cond(
        tf.reduce_sum(x) > -1e9, lambda: x, lambda: zeros(x)
    ),
    "cond-zeros_like-taken": lambda x: (
        x + tf.cond(tf.reduce_sum(x) > 1e9, lambda: x, lambda: zeros(x))
    ),
    "switch_case": lambda x: tf.switch_case(
        tf.shape(x)[0] % 2, [lambda: impute(x), lambda: x + zeros(x)]
    ),
    "tensor_array": _tensor_array,
    "tensor_array-by-rows": _by_rows,
    "function": _function,
    "function-impute": tf.function(impute),
    "py_function": lambda x: tf.ensure_shape(
        tf.py_function(impute, [x], x.dtype), x.shape
    ),
}


def _complex(x):
    return tf.complex(x, zeros(x))


def _transformed(x):
    return tf.signal.fft(tf.complex(x, 0.5 * x))


COMPLEX = {
    "abs-complex": lambda x: tf.abs(tf.complex(x, x)),
    "abs-complex-zeros_like": lambda x: tf.abs(_complex(x)),
    "abs-squared-complex": lambda x: tf.abs(_complex(x)) ** 2,
    "real-of-a-product": lambda x: tf.math.real(tf.complex(x, 2.0 * x) * _complex(x)),
    "imag-of-conj": lambda x: tf.math.imag(tf.math.conj(tf.complex(x, x))),
    "angle": lambda x: tf.math.angle(tf.complex(x, tf.ones_like(x))),
    "turned-in-the-plane": lambda x: tf.math.real(
        _complex(x) * tf.exp(tf.complex(zeros(x), tf.ones_like(x)))
    ),
    "complex-cast": lambda x: tf.math.real(tf.cast(x, tf.complex64) * (1 + 2j)),
    "complex-matmul": lambda x: tf.math.real(
        tf.complex(x, x) @ tf.cast(MATRIX, tf.complex64)
    ),
    "fft-abs": lambda x: tf.abs(_transformed(x)),
    "fft-real": lambda x: tf.math.real(_transformed(x)),
    "fft-there-and-back": lambda x: tf.math.real(tf.signal.ifft(2.0 * _transformed(x))),
    "rfft-abs": lambda x: tf.abs(tf.signal.rfft(x)),
    "rfft-there-and-back": lambda x: of_width(x, tf.signal.irfft(tf.signal.rfft(x))),
    "rfft-of-zeros_like": lambda x: x + tf.abs(tf.signal.rfft(zeros(x)))[:, :1],
    "fft2d": lambda x: tf.math.real(tf.signal.fft2d(_complex(x)[:, None] * [[1], [2]]))[
        :, 0
    ],
    "dct": lambda x: tf.signal.dct(x, norm="ortho"),
    "stft": lambda x: tf.reshape(tf.abs(tf.signal.stft(x, 2, 2)), [-1, 4]),
}


def _ragged(x):
    return tf.RaggedTensor.from_tensor(x)


def _ragged_rows(x):
    lengths = 1 + tf.range(tf.shape(x)[0]) % FEATURES
    return tf.RaggedTensor.from_tensor(x, lengths=lengths)


SPARSE = {
    "sparse-to_dense": lambda x: of_width(
        x, tf.sparse.to_dense(tf.sparse.from_dense(x))
    ),
    "sparse-matmul": lambda x: tf.sparse.sparse_dense_matmul(
        tf.sparse.from_dense(x), tf.constant(MATRIX)
    ),
    "sparse-reduce_sum": lambda x: (
        x
        + tf.reshape(
            tf.sparse.reduce_sum(tf.sparse.from_dense(x), 1, keepdims=True), [-1, 1]
        )
    ),
    "sparse-softmax": lambda x: of_width(
        x, tf.sparse.to_dense(tf.sparse.softmax(tf.sparse.from_dense(x)))
    ),
    "sparse-times-dense": lambda x: of_width(
        x, tf.sparse.to_dense(tf.sparse.from_dense(x) * tf.ones_like(x))
    ),
    "sparse-mask": lambda x: tf.transpose(
        tf.sparse.sparse_dense_matmul(
            tf.sparse.from_dense(np.diag(KEEP)), x, adjoint_b=True
        )
    ),
    "ragged-to_tensor": lambda x: of_width(x, _ragged(x).to_tensor()),
    "ragged-lengths": lambda x: _ragged_rows(x).to_tensor(shape=[None, FEATURES]),
    "ragged-reduce_sum": lambda x: x + tf.reduce_sum(_ragged_rows(x), 1)[:, None],
    "ragged-reduce_mean": lambda x: x + tf.reduce_mean(_ragged_rows(x), 1)[:, None],
    "ragged-map_flat_values": lambda x: tf.ragged.map_flat_values(
        impute, _ragged_rows(x)
    ).to_tensor(shape=[None, FEATURES]),
    "ragged-concat": lambda x: tf.concat(
        [_ragged_rows(x), tf.zeros_like(_ragged_rows(x))], 1
    ).to_tensor(shape=[None, 2 * FEATURES]),
    "ragged-boolean_mask": lambda x: tf.ragged.boolean_mask(x, x > -0.5).to_tensor(
        shape=[None, FEATURES]
    ),
}
