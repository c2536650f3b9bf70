"""Four programs of TensorFlow 1, in which only the imports were changed.

Written anew and small, with the structure of the optimizer code of those that they are
named after. Each builds its graph, and returns its steps: a list of functions that take
a session and a batch.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

# These were `tensorflow.contrib.mixed_precision` and `tensorflow.train.experimental`.
from lossscale import DynamicLossScale, ExponentialUpdateLossScaleManager
from lossscale.compat.v1 import LossScaleOptimizer, MixedPrecisionLossScaleOptimizer

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


def feeding(op, placeholders):
    """Returns a step that feeds a batch."""
    return lambda session, given: session.run(op, dict(zip(placeholders, given)))


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
    return [feeding(train_op, [features, labels])]


class AdamWeightDecayOptimizer(tf.train.Optimizer):
    """Adam with decoupled weight decay, and LAMB: BERT's own optimizers.

    Their slots are variables that `apply_gradients` gets by name. They do not count
    steps: their program does.
    """

    def __init__(self, rate, decay, lamb):
        super().__init__(False, "LAMB" if lamb else "AdamWeightDecay")
        self.rate, self.decay, self.lamb = rate, decay, lamb

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
            if self.lamb:
                ratio = tf.norm(param) / tf.norm(update)
                update *= tf.where(tf.norm(param) > 0, ratio, 1.0)
            next_param = param - self.rate * update
            assignments += [
                param.assign(next_param),
                m.assign(next_m),
                v.assign(next_v),
            ]
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


def bert(mixed, dtype, lamb=False):
    """Gradients are clipped by their norm in between; the program counts steps."""
    features, labels = batch()
    x = tf.cast(features, dtype)
    logits = dense(tf.tanh(dense(x, 8, "one")), 1, "two")
    step = tf.train.get_or_create_global_step()
    rate = tf.train.polynomial_decay(0.02, step, 20)
    optimizer = AdamWeightDecayOptimizer(rate, 0.01, lamb)
    if mixed:
        loss_scaler = DynamicLossScale(
            initial_loss_scale=2**20, increment_period=1000, multiplier=2.0
        )
        optimizer = MixedPrecisionLossScaleOptimizer(optimizer, loss_scaler)
    variables = tf.trainable_variables()
    pairs = optimizer.compute_gradients(loss_of(logits, labels), variables)
    pairs = [(grad, variable) for grad, variable in pairs if grad is not None]
    grads, variables = list(zip(*pairs))
    all_are_finite = tf.reduce_all([tf.reduce_all(tf.is_finite(g)) for g in grads])
    clipped, _ = tf.clip_by_global_norm(
        grads,
        clip_norm=1.0,
        use_norm=tf.cond(
            all_are_finite, lambda: tf.global_norm(grads), lambda: tf.constant(1.0)
        ),
    )
    train_op = optimizer.apply_gradients(
        list(zip(clipped, variables)), global_step=step
    )
    with tf.control_dependencies([train_op]):  # which reads it, for its rate
        new_step = tf.cond(all_are_finite, lambda: step + 1, lambda: tf.identity(step))
    train_op = tf.group(train_op, [step.assign(new_step)])
    return [feeding(train_op, [features, labels])]


def bert_with_lamb(mixed, dtype):
    return bert(mixed, dtype, lamb=True)


def wide_and_deep(mixed, dtype):
    """Two optimizers of one loss, each with a loss scale of its own."""
    features, labels = batch()
    x = tf.cast(features, dtype)
    with tf.variable_scope("linear"):
        logits = dense(x, 1, "wide")
    with tf.variable_scope("dnn"):
        logits += dense(tf.nn.relu(dense(x, 8, "one")), 1, "two")
    loss = loss_of(logits, labels)
    wide = tf.train.FtrlOptimizer(0.05, l1_regularization_strength=0.001)
    deep = tf.train.AdagradOptimizer(0.05, initial_accumulator_value=0.1)
    if mixed:
        wide = MixedPrecisionLossScaleOptimizer(wide, DynamicLossScale())
        deep = MixedPrecisionLossScaleOptimizer(deep, DynamicLossScale())
    train_ops = []
    for optimizer, scope in ((deep, "dnn"), (wide, "linear")):
        variables = tf.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES, scope=scope)
        train_ops.append(optimizer.minimize(loss, var_list=variables))
    return [feeding(tf.group(*train_ops), [features, labels])]


def accumulating(mixed, dtype):
    """Gradients add up in variables; what applies them is fed nothing."""
    features, labels = batch()
    logits = dense(tf.cast(features, dtype), 1, "one")
    optimizer = tf.train.MomentumOptimizer(0.05, 0.9)
    if mixed:
        optimizer = LossScaleOptimizer(optimizer, DynamicLossScale(2**10))
    variables = tf.trainable_variables()
    sums = [
        tf.Variable(tf.zeros(v.shape), trainable=False, name="sum") for v in variables
    ]
    pairs = optimizer.compute_gradients(loss_of(logits, labels), variables)
    add = [total.assign_add(grad) for total, (grad, _) in zip(sums, pairs)]
    means = [(total / 2.0, v) for total, (_, v) in zip(sums, pairs)]
    step = tf.train.get_or_create_global_step()
    train_op = optimizer.apply_gradients(means, global_step=step)
    clear = [total.assign(tf.zeros(total.shape)) for total in sums]
    adds = feeding(add, [features, labels])
    return [
        adds,
        adds,
        lambda session, _: session.run(train_op),
        lambda session, _: session.run(clear),
    ]


PROGRAMS = [ncf, bert, bert_with_lamb, wide_and_deep, accumulating]
