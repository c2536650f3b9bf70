"""LossScaleOptimizer around optimizers of tf.compat.v1.train.

The first tests assert what the suites of TensorFlow do, in other words: 1.15's
`contrib/mixed_precision/python/loss_scale_optimizer_test.py`, and 2.4's
`python/training/experimental/loss_scale_optimizer_test.py`.
"""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import tensorflow as tf
from installed import families
from strategies import last_replica_gets
from version_1 import IS_EAGER, MODES, SESSIONS, needs_eager, running, v1, variable

import lossscale
from lossscale.compat.v1 import (
    LossScaleOptimizer,
    MixedPrecisionLossScaleOptimizer,
    enable_mixed_precision_graph_rewrite,
)

#: A program of TensorFlow 1 that does as it should is warned of nothing.
pytestmark = pytest.mark.filterwarnings("error::lossscale.LossScaleWarning")
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=MODES)
def run(request):
    with running(request.param) as found:
        yield found


@pytest.fixture(params=SESSIONS)
def session(request):
    with running(request.param) as found:
        yield found


def sgd(loss_scale, rate=1.0):
    return LossScaleOptimizer(v1.train.GradientDescentOptimizer(rate), loss_scale)


@tf.custom_gradient
def squaring_gradients(x):
    """Returns what comes. The gradient is squared on its way back."""
    return x, tf.square


class Stepwise(lossscale.LossScaleManager):
    """Goes up by 1 on a good step, and down by 1 on a bad one."""

    def __init__(self, loss_scale):
        # As contrib's, which had no constructor, were written.
        self.current = variable(loss_scale, "current", trainable=False)

    def get_loss_scale(self):
        return self.current

    def update_loss_scale(self, finite_grads):
        return tf.cond(
            finite_grads,
            lambda: v1.assign_add(self.current, 1.0),
            lambda: v1.assign_sub(self.current, 1.0),
        )


#: Public method of tf.compat.v1.train.Optimizer -> calls of it.
METHODS = {
    "apply_gradients": [
        lambda o, _loss, w: o.apply_gradients([(tf.constant(0.5), w)]),
        lambda o, _loss, w: o.apply_gradients([(tf.constant(0.5), w)], name="mine"),
        lambda o, _loss, _w: o.apply_gradients([]),
        lambda o, _loss, w: o.apply_gradients([(None, w)]),
    ],
    "compute_gradients": [
        lambda o, loss, w: o.compute_gradients(loss, [w]),
        lambda o, loss, w: o.compute_gradients(loss, [w], grad_loss=tf.constant(3.0)),
        lambda o, loss, w: o.compute_gradients(loss, [w], gate_gradients=o.GATE_NONE),
        lambda o, loss, _w: o.compute_gradients(loss, []),
        lambda o, loss, _w: o.compute_gradients(loss, ["no variable"]),
        lambda o, loss, w: o.compute_gradients(loss, [w], gate_gradients=7),
        lambda o, _loss, w: o.compute_gradients(tf.constant(1.0), [w]),
    ],
    "get_name": [lambda o, _loss, _w: o.get_name()],
    "get_slot": [
        lambda o, _loss, w: o.get_slot(w, "momentum"),
        lambda o, _loss, w: o.get_slot(w, "none of this name"),
    ],
    "get_slot_names": [lambda o, _loss, _w: o.get_slot_names()],
    "minimize": [
        lambda o, loss, w: o.minimize(loss, var_list=[w]),
        lambda o, loss, _w: o.minimize(loss, var_list=[variable(1.0, "other")]),
    ],
    "variables": [lambda o, _loss, _w: o.variables()],
}


@pytest.mark.parametrize("name", METHODS)
def test_each_method_answers_as_the_bare_optimizers(name):
    def outcome(call, mode, is_used, wraps):
        """Returns the answer of a method or its error, and the weight after it."""
        with running(mode) as run:
            weight = variable(2.0)
            loss = run.loss(lambda: weight * weight)
            optimizer = v1.train.MomentumOptimizer(0.25, 0.5)
            if wraps:
                optimizer = LossScaleOptimizer(optimizer, 64.0)
            if is_used:
                run.step(lambda _: optimizer.minimize(loss, var_list=[weight]))()
            of_scale = optimizer.loss_scale.variables if wraps else []

            def plain(value):
                if isinstance(value, (list, tuple)):
                    known = [v for v in value if not any(v is o for o in of_scale)]
                    return [plain(each) for each in known]
                if isinstance(value, tf.Operation):  # a step
                    return run.value(value)
                is_plain = value is None or isinstance(value, str)
                return value if is_plain else run.value(value)

            try:
                answer = plain(call(optimizer, loss, weight))
            except Exception as error:
                answer = type(error), re.sub("0x[0-9a-f]+", "", str(error))
            return answer, run.value(weight)

    modes = ["eager", "session"] if IS_EAGER else SESSIONS
    for call, mode, is_used in itertools.product(METHODS[name], modes, [False, True]):
        bare = outcome(call, mode, is_used, wraps=False)
        assert outcome(call, mode, is_used, wraps=True) == bare


# What contrib's suite asserts.


@pytest.mark.parametrize("managed", [True, False])
def test_what_is_not_finite_is_not_applied_and_moves_the_scale(run, managed):
    weight = variable(1.0)
    manager = Stepwise(8.0) if managed else lossscale.FixedLossScaleManager(8)
    optimizer = sgd(manager)
    step = run.step(lambda fed: optimizer.apply_gradients([(fed, weight)]))
    seen = []
    for fed in (NAN, INF, 0.25):
        step(fed)
        seen.append((run.value(weight), run.value(manager.get_loss_scale)))
    assert [each for each, _ in seen] == [1.0, 1.0, 0.75]
    assert [each for _, each in seen] == ([7, 6, 7] if managed else [8, 8, 8])


# What the suite of MixedPrecisionLossScaleOptimizer asserts.


@pytest.mark.parametrize("loss_scale", [16.0, "torch"])
def test_the_loss_is_scaled_and_the_gradients_are_not(run, loss_scale):
    weight = variable(5.0)
    inner = v1.train.GradientDescentOptimizer(1.0)
    optimizer = MixedPrecisionLossScaleOptimizer(inner, loss_scale=loss_scale)
    # What flows back is the loss scale: squared, and divided by it, it is that.
    loss = run.loss(lambda: squaring_gradients(weight))
    run.step(lambda _: optimizer.minimize(loss))()
    scale = 2.0**16 if loss_scale == "torch" else loss_scale
    assert run.value(weight) == 5.0 - scale


def test_slots_and_the_scale_move_from_step_to_step(run):
    weight = variable([1.0, 2.0])
    loss_scale = lossscale.DynamicLossScale(2, increment_period=1, multiplier=4)
    optimizer = LossScaleOptimizer(v1.train.MomentumOptimizer(1.0, 1.0), loss_scale)
    step = run.step(lambda fed: optimizer.minimize(run.loss(lambda: weight * fed)))
    seen = []
    for fed in (1.0, NAN, 1.0):
        step(fed)
        seen.append((run.value(weight).tolist(), run.value(optimizer.loss_scale)))
    assert seen == [([0.0, 1.0], 8.0), ([0.0, 1.0], 2.0), ([-2.0, -1.0], 8.0)]


def test_a_checkpoint_holds_slots_and_the_scale_once(run, tmp_path):
    weight = variable(2.0)
    loss_scale = lossscale.DynamicLossScale(1.0, increment_period=2)
    optimizer = LossScaleOptimizer(v1.train.MomentumOptimizer(1.0, 1.0), loss_scale)
    state = weight, loss_scale, loss_scale.good_steps
    step = run.step(lambda _: optimizer.minimize(run.loss(lambda: weight + 1.0)))
    step()
    checkpoint = v1.train.Checkpoint(optimizer=optimizer, weight=weight)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    step()
    assert list(map(run.value, state)) == [-1.0, 2.0, 0]
    status = checkpoint.restore(path)
    status.assert_consumed()
    status.run_restore_ops()
    step()
    assert list(map(run.value, state)) == [-1.0, 2.0, 0]


@needs_eager
def test_the_checkpoints_of_tensorflows_own_restore(tmp_path):
    own = v1.mixed_precision.MixedPrecisionLossScaleOptimizer
    path, seen = str(tmp_path / "checkpoint"), []
    for make, library in ((own, v1.mixed_precision), (LossScaleOptimizer, lossscale)):
        weight, inner = tf.Variable(2.0), v1.train.AdamOptimizer(0.5)
        loss_scale = library.DynamicLossScale(64.0, 5)
        optimizer = make(inner, loss_scale)
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, weight=weight)
        if make is own:
            optimizer.minimize(lambda w=weight: w * 3.0)
            checkpoint.write(path)
        else:
            checkpoint.read(path)
        optimizer.minimize(lambda w=weight: w * 2.0)
        slot = inner.get_slot(weight, "m")
        seen.append([each.numpy() for each in (weight, slot, loss_scale())])
    assert seen[0] == seen[1]
    assert loss_scale.good_steps.numpy() == 2


# What is promised besides.


def by_value(grad):
    return tf.clip_by_value(tf.convert_to_tensor(grad), -1.0, 1.0)


def clipped(pairs):
    return [(by_value(grad), each) for grad, each in pairs if grad is not None]


@pytest.mark.parametrize("run", [*MODES, "xla"], indirect=True)
def test_an_overflow_that_is_clipped_away_skips_the_step(run):
    weights = [variable([1.0, 2.0], "one"), variable(3.0, "two")]
    count = variable(0.0, "count", trainable=False)
    optimizer = sgd(lossscale.DynamicLossScale(16, increment_period=2))

    def step(fed):
        def loss():
            return tf.reduce_sum(weights[0]) * 4.0 + weights[1] * fed

        pairs = optimizer.compute_gradients(run.loss(loss), weights)
        return optimizer.apply_gradients(clipped(pairs), global_step=count)

    step = run.step(step)
    seen = []
    for fed in (2.0, INF, 2.0, 2.0):
        before = [run.value(weight).tolist() for weight in weights]
        step(fed)
        moved = [run.value(weight).tolist() for weight in weights] != before
        seen.append((moved, run.value(count), run.value(optimizer.loss_scale)))
    assert seen == [(True, 1, 16), (False, 1, 8), (True, 2, 8), (True, 3, 16)]


def gradient(optimizer, weight, factor):
    return optimizer.compute_gradients(weight * factor, [weight])[0][0]


def applied_in_a_branch(optimizer, weight, fed):
    grad = by_value(gradient(optimizer, weight, fed))

    def apply():
        with tf.control_dependencies([optimizer.apply_gradients([(grad, weight)])]):
            return tf.constant(True)

    return tf.cond(weight > 0.0, apply, lambda: tf.constant(False))


def out_of_a_branch(optimizer, weight, fed):
    def compute():
        return by_value(gradient(optimizer, weight, fed))

    grad = tf.cond(weight > 0.0, compute, lambda: tf.constant(0.0))
    return optimizer.apply_gradients([(by_value(grad), weight)])


def out_of_a_loop(optimizer, weight, fed):
    def add(i, total):
        # The three add up to what is fed.
        factor = tf.where(tf.equal(i, 1), fed, 0.0)
        return i + 1, total + by_value(gradient(optimizer, weight, factor))

    _, total = tf.while_loop(lambda i, _: i < 3, add, [0, 0.0])
    return optimizer.apply_gradients([(by_value(total), weight)])


def out_of_xla(optimizer, weight, fed):
    compute = lambda fed: gradient(optimizer, weight, fed)  # noqa: E731
    (grad,) = tf.xla.experimental.compile(compute, [fed])
    return optimizer.apply_gradients([(grad, weight)])


@pytest.mark.parametrize(
    "way", [applied_in_a_branch, out_of_a_branch, out_of_a_loop, out_of_xla]
)
def test_a_session_sees_an_overflow_in_other_graphs(session, way):
    weight = variable(1.0)
    optimizer = sgd(lossscale.DynamicLossScale(16))
    step = session.step(lambda fed: way(optimizer, weight, fed))
    for fed, expected in ((INF, 1.0), (0.5, 0.5)):
        step(fed)
        assert session.value(weight) == expected
    assert session.value(optimizer.loss_scale) == 8.0


def test_what_one_run_accumulates_another_applies(session):
    """Nothing that is computed from what is fed runs where it is applied."""
    weight, total = variable(1.0), variable(0.0, "total", trainable=False)
    optimizer = sgd(lossscale.DynamicLossScale(16))

    def accumulate(fed):
        pairs = optimizer.compute_gradients(weight * fed, [weight])
        return v1.assign_add(total, pairs[0][0]).op

    accumulate = session.step(accumulate)
    grad = tf.clip_by_norm(total / 2.0, 1.0)
    applied = optimizer.apply_gradients([(grad, weight)])
    for fed, expected in ((0.5, 0.5), (INF, 0.5), (0.25, 0.25)):
        for each in (fed, fed):
            accumulate(each)
        session.run(applied)
        session.run(v1.assign(total, 0.0))
        assert session.value(weight) == expected
    assert session.value(optimizer.loss_scale) == 8.0


def test_an_overflow_that_is_not_applied_counts_where_a_state_keeps_it(run):
    """A session has no state: there only what is made of gradients counts."""
    weight = variable(1.0)
    optimizer = sgd(lossscale.DynamicLossScale(16))

    def step(fed):
        optimizer.compute_gradients(run.loss(lambda: weight * fed), [weight])
        pairs = optimizer.compute_gradients(run.loss(lambda: weight * 0.5), [weight])
        return optimizer.apply_gradients(pairs)

    run.step(step)(INF)
    found = run.value(weight), run.value(optimizer.loss_scale)
    in_session = hasattr(run, "session")
    assert found == ((0.5, 16.0) if in_session else (1.0, 8.0))


def test_what_is_still_scaled_is_divided(run):
    weight = variable(1.0)
    inner = v1.train.GradientDescentOptimizer(1.0)
    optimizer = LossScaleOptimizer(inner, lossscale.FixedLossScaleManager(16))

    def step(fed):
        scaled = run.loss(lambda: weight * fed * optimizer.loss_scale())
        return optimizer.apply_gradients(inner.compute_gradients(scaled, [weight]))

    run.step(step)(0.5)
    assert run.value(weight) == 0.5


@pytest.mark.parametrize("shares", [True, False])
def test_each_of_two_optimizers_adjusts_the_scale_that_they_may_share(run, shares):
    weights = [variable(1.0, "one"), variable(1.0, "two")]
    scales = [lossscale.DynamicLossScale(16) for _ in range(1 if shares else 2)]
    steps = [
        run.step(lambda fed, o=o, w=w: o.minimize(run.loss(lambda: w * fed), None, [w]))
        for o, w in zip(map(sgd, [scales[0], scales[-1]]), weights)
    ]
    seen = []
    for fed in (0.5, INF):
        for step in steps:
            step(fed)
            seen.append(run.value(scales[0]))
    assert seen == [16.0, 16.0, 8.0, 4.0 if shares else 8.0]
    assert run.value(scales[-1]) == seen[-1]
    assert [run.value(weight) for weight in weights] == [0.5, 0.5]


@needs_eager
def test_beside_those_of_keras_it_adjusts_alone():
    keras = families()[0].optimizers.SGD
    loss_scale = lossscale.DynamicLossScale(16)
    others = [lossscale.LossScaleOptimizer(keras(), loss_scale) for _ in range(2)]
    ours, weight = sgd(loss_scale), tf.Variable(1.0)
    for optimizer in others:
        loss = optimizer.scale_loss(tf.constant(INF))
        optimizer.apply_gradients([(loss, weight)])
    assert loss_scale.numpy() == 8.0
    ours.minimize(lambda: weight * INF)
    assert loss_scale.numpy() == 4.0


def test_all_of_one_list_must_be_finite(run):
    weights = [variable(1.0, "one"), variable(1.0, "two")]
    optimizer = sgd(lossscale.DynamicLossScale(16))

    def step(fed):
        pairs = optimizer.compute_gradients(
            run.loss(lambda: weights[0] * 0.5 + weights[1] * fed), weights
        )
        return optimizer.apply_gradients(clipped(pairs[:1]))

    step = run.step(step)
    for fed, expected in ((INF, 1.0), (0.5, 0.5)):
        step(fed)
        assert run.value(weights[0]) == expected


def test_a_graph_has_one_training_op_of_the_given_name(session):
    optimizer = LossScaleOptimizer(v1.train.AdamOptimizer(0.1), "dynamic")
    op = optimizer.minimize(variable(1.0) * 2.0)
    assert op.name == optimizer.get_name() == "Adam"
    assert v1.get_collection(v1.GraphKeys.TRAIN_OP) == [op]
    session.run(op)


@pytest.mark.usefixtures("session")
def test_gradients_that_come_back_as_they_were_are_looked_at_once():
    op = sgd(lossscale.FixedLossScaleManager(16)).minimize(variable(1.0) * 2.0)
    # What a session runs for it: a quick check, and the exact one in a branch.
    run = v1.graph_util.extract_sub_graph(op.graph.as_graph_def(), [op.name])
    assert [node.op for node in run.node].count("IsFinite") == 2


def test_a_monitored_session_goes_on_where_it_stopped(tmp_path):
    seen = []
    for fed in ([INF, 0.5], [0.5, 0.5]):
        with running("session-of-1"):
            weight = variable(2.0)
            count = v1.train.get_or_create_global_step()
            scale = lossscale.DynamicLossScale(16, 3, 4, backoff_factor=0.5)
            optimizer = sgd(scale)
            factor = v1.placeholder(tf.float32, [])
            op = optimizer.minimize(weight * factor, global_step=count)
            fetched = [op, weight, count, optimizer.loss_scale()]
            with v1.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path), save_checkpoint_steps=1
            ) as training:
                for value in fed:
                    training.run(op, {factor: value})
                seen.append(training.run(fetched[1:]))
    assert [list(map(float, each)) for each in seen] == [[1.5, 1, 8], [0.5, 3, 32]]


# On several replicas.


def replicated_step(strategy, change):
    """Returns a step, and what it changes: made in the scope of the strategy."""
    weights = [tf.Variable([1.0, 2.0]), tf.Variable([[3.0], [4.0]]), tf.Variable(5.0)]
    count = tf.Variable(0, dtype=tf.int64, trainable=False)
    momentum = v1.train.MomentumOptimizer(1.0, momentum=0.0)
    optimizer = LossScaleOptimizer(momentum, lossscale.DynamicLossScale(16, 3))

    def on_replica(fed):
        factor = last_replica_gets(fed, 0.25)

        def loss():
            rows = tf.gather(weights[1], [1])
            return tf.reduce_sum(weights[0] * factor) + tf.reduce_sum(rows) * factor

        pairs = optimizer.compute_gradients(loss, weights)
        assert isinstance(pairs[1][0], tf.IndexedSlices)
        assert pairs[2][0] is None
        return optimizer.apply_gradients(change(pairs), global_step=count)

    seen = [*weights[:2], count, optimizer.loss_scale.current_loss_scale]
    return lambda fed: strategy.run(on_replica, (fed,)), seen


@pytest.mark.parametrize("change", [list, clipped])
@pytest.mark.parametrize("mode", MODES)
def test_an_overflow_on_the_last_replica_skips_the_step_on_all(mode, change, mirrored):
    with running(mode) as run:
        # One of its own: the other's collectives would wait for a session for ever.
        own = mode in SESSIONS
        strategy = (
            tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if own else mirrored
        )
        with strategy.scope():
            step, seen = replicated_step(strategy, change)
            step = run.step(step)
        for fed, moved, count, scale in ((INF, 0, 0, 8), (0.25, 0.5, 1, 8)):
            step(fed)
            found = [strategy.experimental_local_results(each) for each in seen]
            for first, *others in found:
                for other in others:
                    np.testing.assert_array_equal(run.value(first), run.value(other))
            first = [run.value(each[0]) for each in found]
            assert first[0].tolist() == [1.0 - moved, 2.0 - moved]
            assert first[1].tolist() == [[3.0], [4.0 - moved]]
            assert first[2:] == [count, scale]


@needs_eager
def test_gradients_that_add_up_to_an_overflow_are_skipped(mirrored):
    count = mirrored.num_replicas_in_sync
    with mirrored.scope():
        weight = tf.Variable(1.0)
        optimizer = sgd(lossscale.DynamicLossScale(16))

    def on_replica(value):
        optimizer.apply_gradients([(tf.fill([], value), weight)])

    for value, expected in ((3e38, 1.0), (0.25, 1 - count * 0.25)):
        mirrored.run(on_replica, (value,))
        assert weight.numpy() == expected


@pytest.mark.usefixtures("session")
def test_a_graph_of_replicas_holds_each_variable_of_the_loss_scale_once():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        loss_scale = lossscale.DynamicLossScale()
    names = sorted(each.name for each in v1.global_variables())
    assert names == sorted(each.name for each in loss_scale.variables)


# What is refused.

ADAM = v1.train.AdamOptimizer()
#: Words -> the call that is refused with them.
REFUSED = {
    "`opt` .* use lossscale.LossScaleOptimizer": lambda: LossScaleOptimizer(
        families()[0].optimizers.SGD(), "dynamic"
    ),
    "Wrap it in lossscale.compat.v1.LossSca": lambda: lossscale.LossScaleOptimizer(
        ADAM
    ),
    "not be a LossScaleOptimizer itself": lambda: LossScaleOptimizer(
        LossScaleOptimizer(ADAM, 8), 8
    ),
    "be a LossScaleOptimizer itself": lambda: LossScaleOptimizer(
        v1.mixed_precision.MixedPrecisionLossScaleOptimizer(ADAM, 8.0), 8
    ),
    r"SyncReplicasOptimizer\(LossScaleOptimizer\(opt": lambda: LossScaleOptimizer(
        v1.train.SyncReplicasOptimizer(ADAM, 1), 8
    ),
    "`loss_scale_manager` must not be None": lambda: LossScaleOptimizer(ADAM, None),
    "`loss_scale` must not be None": lambda: MixedPrecisionLossScaleOptimizer(
        ADAM, None
    ),
    "must not be None": lambda: enable_mixed_precision_graph_rewrite(ADAM, None),
    "got .*0": lambda: enable_mixed_precision_graph_rewrite(ADAM, 0),
    "`opt` must": lambda: enable_mixed_precision_graph_rewrite(
        families()[0].optimizers.SGD()
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_it_is_refused_with_these_words(words):
    with pytest.raises((TypeError, ValueError), match=words):
        REFUSED[words]()
    assert not is_on()


def test_apply_gradients_is_refused_in_cross_replica_context(mirrored):
    with mirrored.scope():
        weight = tf.Variable(1.0)
        with pytest.raises(ValueError, match="replica context"):
            sgd("dynamic").apply_gradients([(tf.constant(1.0), weight)])


def test_a_broadcast_gradient_of_an_optimizer_in_python_is_applied(run):
    class InPython(v1.train.Optimizer):  # as the one of BERT's programs
        def apply_gradients(self, grads_and_vars, *_):
            return tf.group(*[v.assign(v - g) for g, v in grads_and_vars])

    optimizer = LossScaleOptimizer(InPython(False, "own"), 8.0)
    weight = variable([1.0, 2.0])
    run.step(lambda _: optimizer.apply_gradients([(tf.ones([1]), weight)]))()
    assert run.value(weight).tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="`grads` must have the shapes"):
        optimizer.apply_gradients([(tf.ones([3]), weight)])


# TensorFlow's rewrite of graphs to float16.


@pytest.fixture
def turned_off():
    yield
    v1.mixed_precision.disable_mixed_precision_graph_rewrite()


def is_on():
    return tf.config.optimizer.get_experimental_options().get("auto_mixed_precision")


@pytest.mark.usefixtures("turned_off")
def test_it_turns_the_rewrite_on_and_scales_the_loss():
    assert not is_on()
    with running("session") as run:
        weight = variable(1.0)
        loss_scale = lossscale.DynamicLossScale(16)
        inner = v1.train.GradientDescentOptimizer(1.0)
        optimizer = enable_mixed_precision_graph_rewrite(inner, loss_scale)
        assert is_on()
        assert isinstance(optimizer, MixedPrecisionLossScaleOptimizer)
        names = {each.name for each in v1.global_variables()}
        assert names == {weight.name, *(each.name for each in loss_scale.variables)}
        step = run.step(lambda fed: optimizer.minimize(weight * fed))
        for fed, expected in ((INF, 1.0), (0.5, 0.5)):
            step(fed)
            assert run.value(weight) == expected
