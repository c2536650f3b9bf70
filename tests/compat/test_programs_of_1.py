"""Two programs of TensorFlow 1 whose imports alone were changed, in a session.

Written anew and small, with the structure of the optimizer code of those that they are
named after. Each builds its graph, and returns placeholders of a batch and the
operation that trains on it.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from version_1 import running

# These were `tensorflow.contrib.mixed_precision` and `tensorflow.train.experimental`.
from lossscale import DynamicLossScale, ExponentialUpdateLossScaleManager
from lossscale.compat.v1 import LossScaleOptimizer, MixedPrecisionLossScaleOptimizer

pytestmark = pytest.mark.each_version

ROWS, WIDTH = 6, 4


def batch():
    """Returns placeholders of features and labels."""
    features = tf.placeholder(tf.float32, [None, WIDTH], "features")
    return features, tf.placeholder(tf.float32, [None], "labels")


def dense(x, units, name):
    with tf.variable_scope(name):
        start = tf.constant_initializer(0.25)
        kernel = tf.get_variable("kernel", [x.shape[-1], units], initializer=start)
        bias = tf.get_variable("bias", [units], initializer=tf.zeros_initializer())
        return tf.matmul(x, tf.cast(kernel, x.dtype)) + tf.cast(bias, x.dtype)


def loss_of(logits, labels):
    logits = tf.cast(logits[:, 0], tf.float32)
    return tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
    )


def ncf(mixed, dtype):
    """Embeddings, whose gradients are sparse, and Adam."""
    features, labels = batch()
    rows = tf.cast(tf.abs(features[:, 0]), tf.int32) % ROWS
    table = tf.get_variable(
        "table", [ROWS, WIDTH], initializer=tf.constant_initializer(0.5)
    )
    found = tf.nn.embedding_lookup(table, rows) * features
    logits = dense(tf.nn.relu(dense(tf.cast(found, dtype), 8, "one")), 1, "two")
    optimizer = tf.train.AdamOptimizer(learning_rate=0.01, beta1=0.9, beta2=0.999)
    if mixed:
        manager = ExponentialUpdateLossScaleManager(2**32, 1000)
        optimizer = LossScaleOptimizer(optimizer, manager)
    pairs = optimizer.compute_gradients(loss_of(logits, labels))
    step = tf.train.get_or_create_global_step()
    train_op = optimizer.apply_gradients(pairs, global_step=step)
    return [features, labels], train_op


class AdamWeightDecayOptimizer(tf.train.Optimizer):
    """Adam with decoupled weight decay: BERT's own optimizer.

    Its slots are variables that `apply_gradients` gets by name. It does not count
    steps: its program does.
    """

    def __init__(self, rate, decay):
        super().__init__(False, "AdamWeightDecay")
        self.rate, self.decay = rate, decay

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        del global_step
        assignments = []
        for grad, param in grads_and_vars:
            if grad is None:
                continue
            m, v = (self._slot(param, slot) for slot in ("adam_m", "adam_v"))
            next_m = 0.9 * m + 0.1 * grad
            next_v = 0.999 * v + 0.001 * tf.square(grad)
            update = next_m / (tf.sqrt(next_v) + 1e-6)
            if "bias" not in param.name:
                update += self.decay * param
            next_param = param - self.rate * update
            news = ((param, next_param), (m, next_m), (v, next_v))
            assignments += [variable.assign(new) for variable, new in news]
        return tf.group(*assignments, name=name)

    @staticmethod
    def _slot(param, slot):
        return tf.get_variable(
            name=f"{param.op.name}/{slot}",
            shape=param.shape.as_list(),
            dtype=tf.float32,
            trainable=False,
            initializer=tf.zeros_initializer(),
        )


def bert(mixed, dtype):
    """Gradients are clipped by their norm in between; the program counts steps."""
    features, labels = batch()
    x = tf.cast(features, dtype)
    logits = dense(tf.tanh(dense(x, 8, "one")), 1, "two")
    step = tf.train.get_or_create_global_step()
    rate = tf.train.polynomial_decay(0.02, step, 20)
    optimizer = AdamWeightDecayOptimizer(rate, 0.01)
    if mixed:
        loss_scaler = DynamicLossScale(2**20, increment_period=1000, multiplier=2.0)
        optimizer = MixedPrecisionLossScaleOptimizer(optimizer, loss_scaler)
    variables = tf.trainable_variables()
    pairs = optimizer.compute_gradients(loss_of(logits, labels), variables)
    pairs = [(grad, variable) for grad, variable in pairs if grad is not None]
    grads, variables = list(zip(*pairs))
    all_are_finite = tf.reduce_all([tf.reduce_all(tf.is_finite(g)) for g in grads])
    norm = tf.cond(
        all_are_finite, lambda: tf.global_norm(grads), lambda: tf.constant(1.0)
    )
    clipped, _ = tf.clip_by_global_norm(grads, clip_norm=1.0, use_norm=norm)
    train_op = optimizer.apply_gradients(zip(clipped, variables), global_step=step)
    with tf.control_dependencies([train_op]):  # which reads it, for its rate
        new_step = tf.cond(all_are_finite, lambda: step + 1, lambda: tf.identity(step))
    return [features, labels], tf.group(train_op, [step.assign(new_step)])


PROGRAMS = [ncf, bert]

#: Powers of two: the loss scale is one, and what it multiplies keeps all its bits.
BATCHES = [
    (np.array([[1, 2, 0.5, -1], [3, -2, 1, 0.25]]) * 2.0**i, np.array([1.0, 0.0]))
    for i in range(-2, 3)
]
OVERFLOWS = (np.full([2, 4], np.inf), np.array([1.0, 0.0]))


def history_of(program, mixed, dtype, batches):
    """Runs a program. Returns what its variables hold, by their names, at each step."""
    with running("session-of-1") as run:
        placeholders, train_op = program(mixed, dtype)
        run.session.run(tf.global_variables_initializer())
        history = []
        for features_and_labels in batches:
            fed = dict(zip(placeholders, features_and_labels))
            run.session.run(train_op, fed)
            variables = tf.global_variables()
            values = run.session.run(variables)
            history.append({v.name: value for v, value in zip(variables, values)})
    return history


def by_name(history, names):
    return [{name: values[name] for name in names} for values in history]


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_trains_as_without_loss_scaling_and_skips_an_overflow(program):
    bare = history_of(program, False, tf.float32, BATCHES)
    batches = [*BATCHES[:2], OVERFLOWS, *BATCHES[2:]]
    mixed = history_of(program, True, tf.float32, batches)
    skipped = mixed.pop(2)
    assert max(v for k, v in skipped.items() if k.startswith("skipped_steps")) == 1
    np.testing.assert_equal(*by_name([skipped, mixed[1]], bare[0]))
    assert any((bare[0][name] != bare[-1][name]).any() for name in bare[0])
    np.testing.assert_equal(by_name(mixed, bare[0]), bare)


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_trains_in_float16(program):
    history = history_of(program, True, tf.float16, BATCHES * 40)
    last = history[-1]
    assert all(np.isfinite(value).all() for value in last.values())
    assert last["skipped_steps:0"] < len(history)
    kernel = next(name for name in last if name.endswith("kernel:0"))
    assert (last[kernel] != history[0][kernel]).any()
    if program is ncf:  # 2**32 is too much for float16
        scale = next(value for name, value in last.items() if "current" in name)
        assert last["skipped_steps:0"] > 0
        assert 1.0 < scale < 2.0**32
