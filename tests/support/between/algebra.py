"""Linear algebra."""

from __future__ import annotations

import tensorflow as tf

from between.values import OTHER


def gram(g):
    return tf.matmul(g, g, transpose_b=True)


def newton_schulz(g):
    """As the optimizer Muon does it."""
    x = g / (tf.norm(g) + 1e-7)
    for _ in range(5):
        a = tf.matmul(x, x, transpose_b=True)
        x = 3.4445 * x + tf.matmul(-4.775 * a + 2.0315 * tf.matmul(a, a), x)
    return x


def power_of_gram(g, power):
    values, vectors = tf.linalg.eigh(gram(g))
    return tf.matmul(vectors * values**power, vectors, transpose_b=True)


LINEAR_ALGEBRA = {
    "matmul(g, g)": lambda g: tf.matmul(g, g),
    "matmul(g, other)": lambda g: tf.matmul(g, OTHER),
    "matmul(g, transpose(g))": gram,
    "transpose": tf.transpose,
    "svd values": lambda g: tf.linalg.svd(g, compute_uv=False),
    "Newton-Schulz": newton_schulz,
    "g / largest singular value": lambda g: g / tf.linalg.svd(g, compute_uv=False)[0],
    "qr q": lambda g: tf.linalg.qr(g)[0],
    "gram ** -0.25 @ g": lambda g: tf.matmul(power_of_gram(g, -0.25), g),
    "cholesky of gram + 1": lambda g: tf.linalg.cholesky(gram(g) + tf.eye(3)),
    "inv": tf.linalg.inv,
    "pinv": tf.linalg.pinv,
    "det": tf.linalg.det,
    "slogdet log": lambda g: tf.linalg.slogdet(g)[1],
    "matrix_exp": tf.linalg.expm,
    "logm": lambda g: tf.math.real(tf.linalg.logm(tf.complex(gram(g), 0.0 * g))),
    "matrix_rank": tf.linalg.matrix_rank,
    "solve(other, g)": lambda g: tf.linalg.solve(OTHER, g),
    "norm": tf.norm,
    "norm of order 1": lambda g: tf.norm(g, ord=1),
    "g / global_norm": lambda g: g / tf.linalg.global_norm([g, 2.0 * g]),
    "einsum(g, other)": lambda g: tf.einsum("ij,jk->ik", g, tf.constant(OTHER)),
    "einsum(g, g)": lambda g: tf.einsum("ij,kj->ik", g, g),
}
