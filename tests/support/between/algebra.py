"""Linear algebra."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from between.values import OTHER


def gram(g):
    return tf.matmul(g, g, transpose_b=True)


def symmetric(g):
    return g + tf.transpose(g)


def newton_schulz(g):
    """As the optimizer Muon does it."""
    x = g / (tf.norm(g) + 1e-7)
    for _ in range(5):
        a = tf.matmul(x, x, transpose_b=True)
        x = 3.4445 * x + tf.matmul(-4.775 * a + 2.0315 * tf.matmul(a, a), x)
    return x


def orthogonal_by_svd(g):
    _, u, v = tf.linalg.svd(g)
    return tf.matmul(u, v, transpose_b=True)


def composed_again(g):
    s, u, v = tf.linalg.svd(g)
    return tf.matmul(u * s, v, transpose_b=True)


def of_rank_one(g):
    s, u, v = tf.linalg.svd(g)
    return s[0] * u[:, :1] * tf.transpose(v[:, :1])


def power_of_gram(g, power):
    values, vectors = tf.linalg.eigh(gram(g))
    return tf.matmul(vectors * values**power, vectors, transpose_b=True)


def by_power_iteration(g):
    v = tf.ones([3, 1])
    for _ in range(3):
        v = tf.matmul(g, tf.matmul(g, v), transpose_a=True)
        v /= tf.norm(v)
    return g / tf.norm(tf.matmul(g, v))


LINEAR_ALGEBRA = {
    "matmul(g, g)": lambda g: tf.matmul(g, g),
    "matmul(g, other)": lambda g: tf.matmul(g, OTHER),
    "matmul(g, transpose(g))": gram,
    "transpose": tf.transpose,
    "symmetric part": lambda g: 0.5 * symmetric(g),
    "svd values": lambda g: tf.linalg.svd(g, compute_uv=False),
    "svd vectors": lambda g: tf.abs(tf.linalg.svd(g)[1]),
    "svd again": composed_again,
    "of rank one": of_rank_one,
    "orthogonal by svd": orthogonal_by_svd,
    "Newton-Schulz": newton_schulz,
    "g / largest singular value": lambda g: g / tf.linalg.svd(g, compute_uv=False)[0],
    "by power iteration": by_power_iteration,
    "qr q": lambda g: tf.linalg.qr(g)[0],
    "qr r": lambda g: tf.linalg.qr(g)[1],
    "eigh values": lambda g: tf.linalg.eigh(symmetric(g))[0],
    "eigvalsh": lambda g: tf.linalg.eigvalsh(symmetric(g)),
    "eigh vectors": lambda g: tf.abs(tf.linalg.eigh(symmetric(g))[1]),
    "eigvals": lambda g: tf.math.real(tf.linalg.eigvals(gram(g))),
    "gram ** -0.5 @ g": lambda g: tf.matmul(power_of_gram(g, -0.5), g),
    "gram ** -0.25 @ g": lambda g: tf.matmul(power_of_gram(g, -0.25), g),
    "gram ** 0.5": lambda g: power_of_gram(g, 0.5),
    "cholesky": lambda g: tf.linalg.cholesky(gram(g)),
    "cholesky of gram + 1": lambda g: tf.linalg.cholesky(gram(g) + tf.eye(3)),
    "cholesky_solve": lambda g: tf.linalg.cholesky_solve(
        tf.linalg.cholesky(gram(g)), g
    ),
    "inv": tf.linalg.inv,
    "pinv": tf.linalg.pinv,
    "inv(gram + 1) @ g": lambda g: tf.matmul(tf.linalg.inv(gram(g) + tf.eye(3)), g),
    "det": tf.linalg.det,
    "slogdet sign": lambda g: tf.linalg.slogdet(g)[0],
    "slogdet log": lambda g: tf.linalg.slogdet(g)[1],
    "logdet": lambda g: tf.linalg.logdet(gram(g)),
    "trace": tf.linalg.trace,
    "sqrtm": lambda g: tf.linalg.sqrtm(gram(g)),
    "lu": lambda g: tf.linalg.lu(g)[0],
    "matrix_exp": tf.linalg.expm,
    "logm": lambda g: tf.math.real(tf.linalg.logm(tf.complex(gram(g), 0.0 * g))),
    "matrix_rank": tf.linalg.matrix_rank,
    "solve(g, other)": lambda g: tf.linalg.solve(g, OTHER),
    "solve(other, g)": lambda g: tf.linalg.solve(OTHER, g),
    "solve(g, g)": lambda g: tf.linalg.solve(g, tf.transpose(g)),
    "triangular_solve(g, other)": lambda g: tf.linalg.triangular_solve(g, OTHER),
    "lstsq(other, g)": lambda g: tf.linalg.lstsq(OTHER, g, fast=False),
    "tridiagonal_matmul": lambda g: tf.linalg.tridiagonal_matmul(
        tf.constant(OTHER), g, diagonals_format="compact"
    ),
    "norm": tf.norm,
    "norm of order 1": lambda g: tf.norm(g, ord=1),
    "norm of order 3": lambda g: tf.norm(g, ord=3),
    "norm of order inf": lambda g: tf.norm(g, ord=np.inf),
    "norms of rows": lambda g: g / tf.norm(g, axis=1, keepdims=True),
    "g / global_norm": lambda g: g / tf.linalg.global_norm([g, 2.0 * g]),
    "einsum(g, other)": lambda g: tf.einsum("ij,jk->ik", g, tf.constant(OTHER)),
    "einsum(g, g)": lambda g: tf.einsum("ij,kj->ik", g, g),
    "einsum of one": lambda g: tf.einsum("ij->ji", g),
    "tensordot": lambda g: tf.tensordot(g, OTHER, 1),
    "matvec": lambda g: tf.linalg.matvec(g, [1.0, 2.0, 3.0]),
    "cross": lambda g: tf.linalg.cross(g, OTHER),
    "cross(g, transpose(g))": lambda g: tf.linalg.cross(g, tf.transpose(g)),
    "normalize": lambda g: tf.linalg.normalize(g)[0],
    "adjoint": tf.linalg.adjoint,
    "LinearOperatorKronecker": lambda g: tf.linalg.LinearOperatorKronecker(
        [tf.linalg.LinearOperatorFullMatrix(g), tf.linalg.LinearOperatorIdentity(1)]
    ).to_dense(),
}
