"""The worlds that programs of TensorFlow 1 make with their first line.

A world is a process's, so the slow test starts one for each, and runs there what
`tests/compat` holds: all with the newest TensorFlow, a few programs with older ones.
"""

import os

import numpy as np
import pytest
import tensorflow as tf
from installed import ROOT, families
from limits import IS_NEWEST
from processes import SUPPORT, printed
from version_1 import SESSIONS, needs_eager, running, v1

import lossscale
from lossscale.compat.v1 import LossScaleOptimizer, MixedPrecisionLossScaleOptimizer

WORLDS = ["disable_v2_behavior", "disable_eager_execution"]
INF = float("inf")


class InPython(v1.train.Optimizer):
    """As BERT's own: its slots are variables that `apply_gradients` gets by name."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        steps = [] if global_step is None else [v1.assign_add(global_step, 1)]
        for grad, weight in grads_and_vars:
            slot = v1.get_variable(
                weight.op.name + "/slot",
                weight.shape.as_list(),
                initializer=v1.zeros_initializer(),
                trainable=False,
            )
            new = 0.9 * slot + 0.1 * tf.convert_to_tensor(grad)
            steps += [slot.assign(new), weight.assign(weight - 0.1 * new)]
        return tf.group(*steps, name=name)


def falling_rate():
    return v1.train.polynomial_decay(0.1, v1.train.get_or_create_global_step(), 20)


OPTIMIZERS = {
    "SGD": lambda: v1.train.GradientDescentOptimizer(0.1),
    "SGD that locks": lambda: v1.train.GradientDescentOptimizer(0.1, use_locking=True),
    "Momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "Adam": lambda: v1.train.AdamOptimizer(falling_rate()),
    "Adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "AdagradDA": lambda: v1.train.AdagradDAOptimizer(
        0.1, v1.train.get_or_create_global_step(), l1_regularization_strength=0.01
    ),
    "Adadelta": lambda: v1.train.AdadeltaOptimizer(0.1),
    "RMSProp": lambda: v1.train.RMSPropOptimizer(0.1, momentum=0.9, centered=True),
    "Ftrl": lambda: v1.train.FtrlOptimizer(0.1, l1_regularization_strength=0.001),
    "ProximalSGD": lambda: v1.train.ProximalGradientDescentOptimizer(0.1),
    "ProximalAdagrad": lambda: v1.train.ProximalAdagradOptimizer(0.1),
    "in Python": lambda: InPython(False, "own"),
}

WRAPPERS = {
    "contrib's, dynamic": lambda opt: LossScaleOptimizer(
        opt, lossscale.ExponentialUpdateLossScaleManager(2.0**10, 1000)
    ),
    "contrib's, fixed": lambda opt: LossScaleOptimizer(
        opt, lossscale.FixedLossScaleManager(2.0**10)
    ),
    "experimental": lambda opt: MixedPrecisionLossScaleOptimizer(opt, "dynamic"),
}


def plainly(optimizer, loss, step):
    return optimizer.minimize(loss, global_step=step)


def clipped(optimizer, loss, step):
    grads, variables = zip(*optimizer.compute_gradients(loss))
    grads, _ = tf.clip_by_global_norm(grads, 1.0)
    return optimizer.apply_gradients(zip(grads, variables), global_step=step)


def in_a_branch(optimizer, loss, step):
    """Takes a step in a branch of the program's own: slots are named after it."""
    pairs = optimizer.compute_gradients(loss)

    def train():
        with tf.control_dependencies([optimizer.apply_gradients(pairs, step)]):
            return tf.constant(True)

    return tf.cond(step < 100, train, lambda: tf.constant(False))


def as_bert(optimizer, loss, step):
    """Clips gradients by their norm where they are finite, and counts such steps."""
    grads, variables = zip(*optimizer.compute_gradients(loss))
    norm = tf.linalg.global_norm(grads)
    is_finite = tf.math.is_finite(norm)
    norm = tf.where(is_finite, norm, 1.0)
    grads, _ = tf.clip_by_global_norm(grads, clip_norm=1.0, use_norm=norm)
    train_op = optimizer.apply_gradients(zip(grads, variables))
    with tf.control_dependencies([train_op]):  # which reads it, for its rate
        counted = tf.cond(is_finite, lambda: step + 1, lambda: tf.identity(step))
    return tf.group(train_op, [step.assign(counted)])


#: Batches. One overflows. The others are powers of two.
BATCHES = [([0, 2, 2], 0.5), ([1, 2, 0], 2.0), ([1, 1, 0], INF), ([3, 1, 1], 0.25)]
GOOD = [batch for batch in BATCHES if batch[1] != INF]


def trained(make, batches, program, resource=None, mode=SESSIONS[0], dtype=tf.float32):
    """Trains. Returns the values of all variables by their names, and the session's."""
    with running(mode) as run:
        rows, factor = v1.placeholder(tf.int32, [None]), v1.placeholder(tf.float32, [])
        step = v1.train.get_or_create_global_step()
        start = v1.constant_initializer(0.5)
        with v1.variable_scope("model", use_resource=resource):
            table = v1.get_variable("table", [4, 2], initializer=start)
            kernel = v1.get_variable("kernel", [2, 3], initializer=start)
            bias = v1.get_variable("bias", [3], initializer=start)
        found = tf.cast(tf.nn.embedding_lookup(table, rows), dtype)
        found = found @ tf.cast(kernel, dtype) + tf.cast(bias, dtype)
        loss = tf.reduce_mean((tf.cast(found, tf.float32) - 2.0) ** 2) * factor
        op = program(make(), loss, step)
        run.session.run(v1.global_variables_initializer())
        for fed in batches:
            run.session.run(op, dict(zip((rows, factor), fed)))
        variables = v1.global_variables()
        values = run.session.run(variables)
        return {each.name: value for each, value in zip(variables, values)}


@pytest.mark.parametrize("resource", [True, False], ids=["resources", "refs"])
@pytest.mark.parametrize("program", [plainly, clipped, in_a_branch, as_bert])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_trains_as_the_bare_optimizer(optimizer, wrapper, program, resource):
    make = OPTIMIZERS[optimizer]
    try:
        bare = trained(make, GOOD, program, resource)
    except Exception as error:
        # TensorFlow 2's branches know no ref variables. Up to TensorFlow 2.13 those of
        # the implicit graph are no place for slots.
        if program is not in_a_branch or not v1.control_flow_v2_enabled():
            raise
        pytest.skip(f"the bare optimizer fails, too: {str(error)[:100]}")
    # That without the overflow is as the bare optimizer's.
    ours = trained(lambda: WRAPPERS[wrapper](make()), BATCHES, program, resource)
    assert bare["global_step:0"] == 3
    assert {*bare} <= {*ours}
    for name, value in bare.items():
        np.testing.assert_allclose(ours[name], value, rtol=2e-6, err_msg=name)
    assert ours["skipped_steps:0"] == 1


@pytest.mark.each_version
@pytest.mark.parametrize("optimizer", ["Adam", "in Python"])
def test_a_program_in_float16_trains_from_too_large_a_scale(optimizer):
    def make():
        manager = lossscale.ExponentialUpdateLossScaleManager(2**32, 1000, 1, 2, 0.5)
        return LossScaleOptimizer(OPTIMIZERS[optimizer](), manager)

    before, after = (
        trained(make, batches, as_bert, mode=SESSIONS[-1], dtype=tf.float16)
        for batches in (GOOD[:1], GOOD * 40)
    )
    assert all(np.isfinite(value).all() for value in after.values())
    assert (before["model/kernel:0"] != after["model/kernel:0"]).any()
    assert 0 < after["skipped_steps:0"] < 120
    scale = next(value for name, value in after.items() if "current" in name)
    assert 1.0 < scale < 2.0**32


# Programs around an optimizer.


def estimated(wrap, folder, *runs):
    """Trains an Estimator again and again. Returns its variables."""

    def model_fn(features, labels, mode):
        del features
        weight = v1.get_variable("weight", [2], initializer=v1.ones_initializer())
        loss = tf.reduce_sum((weight * labels - 3.0) ** 2)
        op = wrap(OPTIMIZERS["Adam"]()).minimize(loss, v1.train.get_global_step())
        return v1.estimator.EstimatorSpec(mode, loss=loss, train_op=op)

    estimator = v1.estimator.Estimator(model_fn, str(folder))
    for run in runs:
        estimator.train(lambda run=run: tf.data.Dataset.from_tensor_slices((run, run)))
    names = ["weight", "weight/Adam", "beta1_power", "global_step"]
    return [estimator.get_variable_value(name) for name in names]


@pytest.mark.skipif(not hasattr(v1, "estimator"), reason="TensorFlow has none any more")
def test_an_estimator_goes_on_where_it_stopped(tmp_path):
    """Its hook stops where a loss is NaN: it is infinite here."""
    runs = [0.5, 1e19, 2.0], [0.25, 0.5]
    ours = estimated(WRAPPERS["contrib's, dynamic"], tmp_path / "ours", *runs)
    bare = estimated(lambda inner: inner, tmp_path / "bare", runs[0][::2], runs[1])
    for each, expected in zip(ours, bare):
        np.testing.assert_allclose(each, expected, rtol=1e-6)
    assert ours[-1] == 4


@pytest.mark.parametrize(
    "legacy", [f for f in families() if f.name == "keras2-legacy"], ids=lambda f: f.name
)
def test_fit_of_keras2_skips_an_overflow(legacy):
    keras = legacy.keras
    x, y = np.ones([4, 3], np.float32), np.ones([4, 2], np.float32)
    weights = []
    for wrap in (lambda optimizer: optimizer, lossscale.LossScaleOptimizer):
        keras.backend.clear_session()
        with running(SESSIONS[0]):
            layer = keras.layers.Dense(2, kernel_initializer="ones", input_shape=(3,))
            model = keras.Sequential([layer])
            model.compile(wrap(legacy.optimizers.Adam(0.1)), "mse")
            model.fit(x, y, epochs=2, verbose=0)
            if weights:
                model.train_on_batch(x * INF, y)
            model.fit(x, y, epochs=2, verbose=0)
            weights.append(np.hstack([w.ravel() for w in model.get_weights()]))
    np.testing.assert_allclose(*weights, rtol=1e-6)


# The worlds.


ALL = ("tests/compat",)
FEW = ("tests/compat", "-k", "monitored_session or bare_optimizer and Adam-")


@needs_eager
@pytest.mark.each_version
@pytest.mark.parametrize("world", WORLDS)
def test_programs_of_the_compat_suite(world):
    """Each value of each parameter: slow tests combine them anew without a world."""
    marks = ["-m", "not slow or each_version", "-W", "ignore::DeprecationWarning"]
    options = ["-q", "-p", "no:cacheprovider", *marks, *(ALL if IS_NEWEST else FEW)]
    program = (
        "import sys, pytest, tensorflow as tf\n"
        f"tf.compat.v1.{world}()\n"  # before anything else is imported
        f"sys.exit(pytest.main({options}))\n"
    )
    printed(
        *("-c", program),
        cwd=ROOT,
        PYTHONPATH=os.pathsep.join(map(str, [SUPPORT, ROOT])),
        # Not all plugins load after TensorFlow, which brings packages of its own.
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )
