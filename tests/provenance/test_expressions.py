"""What users do to gradients before they apply them: a table of expressions.

Each row has what becomes of a gradient `g` of shape `[3, 3]` that is still scaled, and
an expression, in which `w` is the weight, `other` a constant, `s` the loss scale and
`u` the gradient as it was unscaled. `provenance/walk.py` says it of a graph. That the
table is right is seen by the numbers, and by training with some of its rows.
"""

import re
from functools import partial
from itertools import cycle

import numpy as np
import pytest
import tensorflow as tf
from exact import S, gradients, heard
from models import built

from lossscale import DynamicLossScale
from lossscale.provenance.kinds import SCALE, SCALED, UNSCALED, Kind
from lossscale.provenance.walk import Kinds

#: A gradient of mixed signs and magnitudes, without ties.
GRADIENT = np.float32([[0.7, -0.013, 2.1], [-1.3, 0.31, 0.0017], [0.09, -2.9, 1.1]])
WEIGHT = np.float32([[0.5, -0.25, 1.0], [0.75, -1.5, 0.125], [2.0, 0.375, -0.625]])
OTHER = np.float32([[1.0, -0.5, 0.25], [0.5, 2.0, 0.125], [-1.0, 0.75, 1.5]])
SHAPE = [3, 3]


def adaptive_clip(g, w):
    """Adaptive gradient clipping, as NFNets have it."""
    most = 0.01 * tf.maximum(tf.norm(w, axis=0), 1e-3)
    norm = tf.norm(g, axis=0)
    return tf.where(norm < most, g, g * (most / tf.maximum(norm, 1e-6)))


def newton_schulz(g):
    """As the optimizer Muon does it."""
    x = g / (tf.norm(g) + 1e-7)
    for _ in range(5):
        a = tf.matmul(x, x, transpose_b=True)
        x = 3.4445 * x + tf.matmul(-4.775 * a + 2.0315 * tf.matmul(a, a), x)
    return x


def loop(body, x):
    """Returns a value after three turns of a loop."""
    turn = lambda i, x: (i + 1, body(x))  # noqa: E731
    return tf.while_loop(lambda i, _: i < 3, turn, (0, x))[1]


def halved_until_small(g):
    is_large = lambda x: tf.norm(x) > 1.0  # noqa: E731
    return tf.while_loop(is_large, lambda x: (x / 2,), (g,), maximum_iterations=20)[0]


def halved_in_numpy(g):
    halved = tf.numpy_function(lambda x: x / np.float32(2), [g], tf.float32)
    return tf.ensure_shape(halved, SHAPE)


def to_8_bit_integers(g):
    step = tf.reduce_max(tf.abs(g)) / 127.0
    return tf.cast(tf.cast(tf.round(g / step), tf.int8), tf.float32) * step


def ternary(g):
    """As TernGrad has it, without chance."""
    largest = tf.reduce_max(tf.abs(g))
    return largest * tf.sign(g) * tf.cast(tf.abs(g) > 0.5 * largest, tf.float32)


def rounded_by_its_bits(g):
    """Stochastic rounding adds noise to the bits."""
    bits = tf.bitcast(g, tf.int32)
    noise = tf.bitwise.bitwise_and(tf.ones_like(bits), 127)
    return tf.bitcast(tf.bitwise.bitwise_and(bits + noise, -128), tf.float32)


@tf.function(autograph=False)
def clipped_in_a_function(g):
    return tf.clip_by_value(g, -1.0, 1.0)


@tf.function(autograph=False)
def product(x, y):
    return x * y


#: What is trained, too: some of each kind.
TRAINED = """
scaled    g * w ; product(g, u) ; loop(lambda x: x / tf.norm(u), g) ; ternary(g)
scaled    tf.clip_by_global_norm([g], 1.0 * s)[0][0]
scaled    tf.cond(tf.norm(u) > 0.5, lambda: g / tf.norm(u), lambda: g)
unscaled  tf.cond(g[0, 0] > 0.0, lambda: g / s, lambda: tf.zeros_like(g)) ; tf.sign(g)
squared   g * g
inverse   tf.math.reciprocal(g)
changed   tf.clip_by_norm(g, 1.0) ; u + g
"""
TABLE = f"""{TRAINED}
scaled    tf.add_n([g, 2.0 * g]) ; tf.concat([g, -2.0 * g], 0) ; g / tf.norm(u)
scaled    tf.where(tf.math.is_finite(g), g, 0.0) ; rounded_by_its_bits(g) ; g / other
scaled    tf.switch_case(tf.cast(u[0, 0] > 0.0, tf.int32), [lambda: g, lambda: 2.0 * g])
scaled    g - tf.reduce_mean(g, axis=0, keepdims=True) ; loop(lambda x: x / 2.0, g)
scaled    g + 1e-12 ; g % tf.reduce_mean(tf.abs(g)) ; tf.sqrt(g * g) ; tf.norm(g)
scaled    tf.math.divide_no_nan(g, other) ; tf.matmul(g, other) ; tf.nn.relu(g)
scaled    tf.gather(g, [2, 0, 1]) ; tf.concat([g[:2], tf.zeros([1, 3])], 0)
scaled    tf.maximum(tf.abs(g), 1e-6) ; tf.minimum(g, tf.reduce_mean(g))
scaled    tf.clip_by_value(g, -tf.reduce_mean(tf.abs(g)), tf.reduce_mean(tf.abs(g)))
scaled    tf.clip_by_norm(g, 1.0 * s)
scaled    tf.cond(tf.norm(u) > 9.0, lambda: tf.zeros_like(g), lambda: g)
scaled    tf.abs(tf.signal.fft2d(tf.cast(g, tf.complex64)))
scaled    tf.scan(lambda a, x: a + x, g) ; tf.identity_n([g, -g])[1] ; product(g, 2.0)
scaled    loop(lambda x: x + g, tf.zeros(SHAPE)) ; to_8_bit_integers(g)
unscaled  g / s ; g / tf.maximum(s, 1.0) ; newton_schulz(g) ; g / (tf.norm(g) + 1e-7)
unscaled  tf.where(g > 0.0, 1.0, -1.0) ; g * s**-1 ; tf.math.count_nonzero(g)
unscaled  g / tf.linalg.global_norm([g, 2.0 * g]) ; tf.argsort(g)
unscaled  tf.cond(tf.reduce_sum(g) > 0.0, lambda: tf.ones([3]), lambda: tf.zeros([3]))
unscaled  g / tf.sqrt(tf.reduce_mean(g * g) + 1e-8)
unscaled  tf.vectorized_map(lambda x: x / tf.norm(x), g)
squared   tf.nn.l2_loss(g) ; tf.math.squared_difference(g, tf.transpose(g))
squared   tf.matmul(g, g, transpose_b=True) ; tf.einsum("ij,kj->ik", g, g)
inverse   tf.linalg.inv(g)
changed   g + 1.0 ; tf.where(other > 0.0, u, g) ; g // 0.1 ; tf.abs(g) ** 1.5
changed   g / tf.maximum(tf.norm(g), 1.0) ; tf.exp(tf.math.log(tf.abs(g)))
changed   tf.round(g) ; tf.cast(g, tf.int32) ; tf.nn.softmax(g) ; tf.nn.relu6(g)
changed   tf.nn.bias_add(g, [1.0, 1.0, 1.0]) ; tf.sqrt(tf.abs(g)) ; tf.tanh(g)
changed   tf.nn.softmax_cross_entropy_with_logits(tf.eye(3), g) ; tf.reduce_prod(g)
changed   tf.linalg.det(g) ; tf.linalg.expm(g) ; tf.clip_by_value(g, -1.0, 1.0)
changed   tf.sign(g - 0.5) ; tf.where(g > 0.1, g, 0.0)
changed   tf.pad(g, [[1, 0], [0, 1]], constant_values=1.0)
changed   tf.searchsorted(tf.constant([-1.0, 0.0, 1.0]), tf.reshape(g, [9]))
changed   tf.cond(tf.norm(g) > 1.0, lambda: g / tf.norm(g), lambda: g)
changed   loop(lambda x: tf.minimum(x, 1.0), g) ; halved_until_small(g)
changed   clipped_in_a_function(g) ; adaptive_clip(g, w) ; tf.concat([u, g], 0)[2:5]
changed   product(tf.abs(tf.norm(tf.stack([tf.norm(u), tf.norm(g)]))), 1.0)
changed   tf.norm(tf.stack([tf.norm(u), tf.norm(product(g, 2.0))]))
unknown   tf.py_function(lambda x: x, [g], tf.float32) ; halved_in_numpy(g)
number    tf.ones_like(g)
"""
#: A number stands beside scaled gradients and is divided with them, or a matrix
#: function that is not linear is divided once. Nobody sees it: docs/inside.md.
NOT_SEEN = """
scaled    g + 0.1 * w ; tf.concat([g[:2], w[2:]], 0) ; tf.where(g > 0.0, g, 1.0)
scaled    tf.tensor_scatter_nd_add(g, [[0, 0]], [1.0]) ; tf.linalg.pinv(g)
scaled    g + 0.1 * tf.random.stateless_normal([3, 3], [1, 2])
"""


def rows(table):
    """Returns the kind of each expression of a table."""
    lines = (line.split(None, 1) for line in table.split("\n") if line)
    return {each: kind for kind, line in lines for each in line.split(" ; ")}


def has(name, expression):
    return re.search(rf"\b{name}\b", expression) is not None


def call(expression, g, w, s, u):
    """Returns what an expression makes of a gradient: its values, or else their sum."""
    names = {**globals(), "g": g, "w": w, "s": s, "u": u, "other": OTHER}
    value = tf.cast(eval(expression, names), tf.float32)  # noqa: S307 - a row above
    if value.shape.rank is not None and value.shape.num_elements() == 9:
        return tf.reshape(value, SHAPE)
    return tf.reduce_sum(value) * tf.ones(SHAPE)


def bare(expression, scale=1.0):
    """Returns what an expression makes of a gradient that a scale has multiplied."""
    u, w, s = map(tf.constant, (GRADIENT, WEIGHT, scale))
    return call(expression, u * s, w, s, u).numpy()


def kinds_of(expressions, kind_of_g):
    """Returns the kinds of values of a gradient, as a walk over one graph says them."""
    found = {}

    @tf.function(autograph=False)
    def program(*values):
        for expression in expressions:
            kinds, (g, w, s, u) = Kinds(None), map(tf.identity, values)
            for value, kind in ((g, kind_of_g), (s, SCALE), (u, UNSCALED)):
                kinds.note(value, Kind(kind))
            (kind,) = kinds.of([call(expression, g, w, s, u)])
            found[expression] = "number" if kind is None else kind.name

    program.get_concrete_function(*map(tf.constant, (GRADIENT, WEIGHT, S, GRADIENT)))
    return found


@pytest.mark.smoke
def test_each_expression_makes_of_a_scaled_gradient_what_the_table_says():
    table = {**rows(TABLE), **rows(NOT_SEEN)}
    assert kinds_of(table, SCALED) == table


def test_whatever_is_made_of_an_unscaled_gradient_is_unscaled_if_it_is_seen():
    table = {row: kind for row, kind in rows(TABLE).items() if not has("s", row)}
    for row in table.keys() - {"tf.ones_like(g)"}:
        # A function does not know what a variable holds that it is given.
        is_seen = table[row] != "unknown" and not has("w", row)
        table[row] = "unscaled" if is_seen else "unknown"
    assert kinds_of(table, UNSCALED) == table


def test_the_table_says_what_is_so():
    """A scaled value of a gradient that is S times larger is S times larger."""
    times = {"scaled": S, "unscaled": 1, "squared": S**2, "inverse": 1 / S, "number": 1}
    for expression, kind in rows(TABLE).items():
        if kind in times:
            wanted = bare(expression) * np.float32(times[kind])
            found = bare(expression, S)
            np.testing.assert_allclose(found, wanted, 2e-3, err_msg=expression)


# Training: what multiplies a loss, and what unscales its gradients.


BY_OPTIMIZER = (
    lambda by, loss: by.scale_loss(loss),
    lambda by, grads: by.get_unscaled_gradients(grads),
)
BY_SCALE = (
    lambda by, loss: by.loss_scale.scale(loss),
    lambda by, grads: by.loss_scale.unscale(grads),
)
BY_HAND = (
    lambda by, loss: loss * by.loss_scale,
    lambda by, grads: [grad / by.loss_scale for grad in grads],
)
BY_VARIABLE = (
    lambda by, loss: loss * by.loss_scale(),
    lambda by, grads: [grad / by.loss_scale.current_loss_scale for grad in grads],
)


class Trained:
    """An optimizer with its own loss scale, and its weight.

    What SGD(1.0) has subtracted from it is the gradient as it was applied.
    """

    def __init__(self, family, expression, way):
        self.optimizer, self.weight = built(family, DynamicLossScale(S, 1000), WEIGHT)
        self.expression, self.way, self.told = expression, way, None

    def step(self, gradient, is_unscaled):
        by, (multiply, unscale) = self.optimizer, self.way
        with heard() as self.told:
            scale = lambda loss: multiply(by, loss)  # noqa: E731
            grads = gradients(scale, gradient, [self.weight])
            (g,), (u,) = grads, unscale(by, grads)  # of scaled ones as for their norm
            g, weight = u if is_unscaled else g, tf.convert_to_tensor(self.weight)
            grad = call(self.expression, g, weight, by.loss_scale(), u)
            by.apply_gradients([(grad, self.weight)])

    def is_right(self):
        wanted = bare(self.expression)
        subtracted = WEIGHT - np.array(self.weight.numpy())
        size = np.max(np.abs(wanted)) + np.max(np.abs(WEIGHT))
        return np.allclose(subtracted, wanted, rtol=2e-3, atol=2e-6 * size)


def training(family, *ways, is_unscaled=True):
    """Returns what is trained with an expression each, a way in turn, and its step."""
    expressions = [e for e in rows(TRAINED) if not (is_unscaled and has("s", e))]
    every = list(map(partial(Trained, family), expressions, cycle(ways)))

    @tf.function(autograph=False)
    def step(gradient):
        for each in every:
            each.step(gradient, is_unscaled)

    return every, step


def test_scaled_gradients_are_divided_once_or_a_warning_says_so(family):
    """The state of the step says that they were unscaled: their norm was asked for."""
    every, step = training(family, BY_OPTIMIZER, is_unscaled=False)
    step(tf.constant(GRADIENT))
    kinds = rows(TABLE)
    for each in every:
        is_seen = kinds[each.expression] in {"scaled", "unscaled"}
        assert len(each.told) == (not is_seen), each.expression
        assert each.is_right() or not is_seen, each.expression
        is_mixed = each.expression == "u + g"
        assert not is_mixed or "mixed with unscaled values" in each.told[0]


@pytest.mark.parametrize(
    "ways",
    [[BY_OPTIMIZER], [BY_SCALE, BY_HAND, BY_VARIABLE]],
    ids=["by the optimizer", "in other ways"],
)
def test_unscaled_gradients_are_not_divided_again_and_an_overflow_of_them_is_seen(
    family, ways
):
    """Of what a program divides in other ways no overflow is remembered."""
    every, step = training(family, *ways)
    bad = GRADIENT.copy()
    bad[-1, -1] = np.inf
    for gradient, scale in [(GRADIENT, S), (bad, S / 2)][: 1 if len(ways) > 1 else 2]:
        step(tf.constant(gradient))
        for each in every:
            assert not each.told, each.told
            assert each.is_right(), each.expression
            assert float(each.optimizer.loss_scale) == scale
