"""LossScaleOptimizer around optimizers of tf.compat.v1.train.

The first programs are those of TensorFlow's own suites: 1.15's
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


def sgd(loss_scale=None, wrapper=LossScaleOptimizer):
    if loss_scale is None:
        loss_scale = lossscale.DynamicLossScale(16, increment_period=2)
    return wrapper(v1.train.GradientDescentOptimizer(1.0), loss_scale)


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


@tf.custom_gradient
def squaring_gradients(x):
    """Returns what comes. The gradient is squared on its way back."""
    return x, tf.square


def by_value(grad):
    return tf.clip_by_value(tf.convert_to_tensor(grad), -1.0, 1.0)


def clipped(pairs):
    return [(by_value(grad), each) for grad, each in pairs if grad is not None]


# Programs. Each gets a mode and two weights of 1. It returns a step, which takes a
# number, and the loss scale.


def with_a_manager(run, weight, _):
    manager = Stepwise(8.0)
    optimizer = sgd(manager)
    step = run.step(lambda fed: optimizer.apply_gradients([(fed, weight)]))
    return step, manager.get_loss_scale


def whose_gradients_are_squared(run, weight, _):
    # What flows back is the loss scale: squared, and divided by it, it is that.
    optimizer = sgd(16.0, MixedPrecisionLossScaleOptimizer)
    loss = run.loss(lambda: squaring_gradients(weight))
    return run.step(lambda _: optimizer.minimize(loss)), optimizer.loss_scale


def that_clips_and_counts(run, weight, count):
    optimizer = sgd()

    def step(fed):
        pairs = optimizer.compute_gradients(run.loss(lambda: weight * fed), [weight])
        return optimizer.apply_gradients(clipped(pairs), global_step=count)

    return run.step(step), optimizer.loss_scale


def that_applies_one_of_two(run, weight, other):
    optimizer = sgd()

    def step(fed):
        loss = run.loss(lambda: weight * 0.5 + other * fed)
        pairs = optimizer.compute_gradients(loss, [weight, other])
        return optimizer.apply_gradients(clipped(pairs[:1]))

    return run.step(step), optimizer.loss_scale


def that_drops_gradients(run, weight, _):
    optimizer = sgd()

    def step(fed):
        optimizer.compute_gradients(run.loss(lambda: weight * fed), [weight])
        pairs = optimizer.compute_gradients(run.loss(lambda: weight * 0.5), [weight])
        return optimizer.apply_gradients(pairs)

    return run.step(step), optimizer.loss_scale


def that_leaves_division_to_apply(run, weight, _):
    optimizer = sgd(lossscale.FixedLossScaleManager(16))

    def step(fed):
        scaled = run.loss(lambda: weight * fed * optimizer.loss_scale())
        pairs = optimizer._optimizer.compute_gradients(scaled, [weight])
        return optimizer.apply_gradients(pairs)

    return run.step(step), optimizer.loss_scale


def of_two_optimizers(run, *weights):
    loss_scale = lossscale.DynamicLossScale(16)
    steps = [
        run.step(lambda fed, o=o, w=w: o.minimize(run.loss(lambda: w * fed), None, [w]))
        for o, w in zip([sgd(loss_scale), sgd(loss_scale)], weights)
    ]
    return (lambda fed: [step(fed) for step in steps]), loss_scale


#: A program -> what it is fed, and then both weights and the loss scale after it.
PROGRAMS = {
    with_a_manager: [(NAN, 1, 1, 7), (INF, 1, 1, 6), (0.25, 0.75, 1, 7)],
    whose_gradients_are_squared: [(0, -15, 1, 16)],
    that_clips_and_counts: [
        (2, 0, 2, 16),
        (INF, 0, 2, 8),
        (2, -1, 3, 8),
        (2, -2, 4, 16),
    ],
    that_applies_one_of_two: [(INF, 1, 1, 8), (0.5, 0.5, 1, 8)],
    # A session keeps no state of a step: there only what is applied counts.
    that_drops_gradients: [(INF, 1, 1, 8)],
    that_leaves_division_to_apply: [(0.5, 0.5, 1, 16)],
    # Each of two that share a loss scale adjusts it.
    of_two_optimizers: [(0.5, 0.5, 0.5, 16), (INF, 0.5, 0.5, 4)],
}
IN_A_SESSION = {that_drops_gradients: [(INF, 0.5, 1, 16)]}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_does_the_same_in_each_mode(program):
    compiles = IS_EAGER and program is that_clips_and_counts
    for mode in [*MODES, "xla"] if compiles else MODES:
        with running(mode) as run:
            weights = variable(1.0, "one"), variable(1.0, "two")
            step, loss_scale = program(run, *weights)
            expected = PROGRAMS[program]
            if hasattr(run, "session"):
                expected = IN_A_SESSION.get(program, expected)
            for fed, *after in expected:
                step(fed)
                assert list(map(run.value, (*weights, loss_scale))) == after, mode


def test_a_broadcast_gradient_of_an_optimizer_in_python_is_applied():
    class InPython(v1.train.Optimizer):  # as the one of BERT's programs
        def apply_gradients(self, grads_and_vars, *_):
            return tf.group(*[v.assign(v - g) for g, v in grads_and_vars])

    for mode in MODES:
        with running(mode) as run:
            optimizer = LossScaleOptimizer(InPython(False, "own"), 8.0)
            apply, weight = optimizer.apply_gradients, variable([1.0, 2.0])
            run.step(lambda _, w=weight, a=apply: a([(tf.ones([1]), w)]))()
            assert run.value(weight).tolist() == [0.0, 1.0]
            with pytest.raises(ValueError, match="`grads` must have the shapes"):
                apply([(tf.ones([3]), weight)])


def test_a_checkpoint_holds_slots_and_the_scale_once(tmp_path):
    for mode in MODES:
        with running(mode) as run:
            weight = variable(2.0)
            loss_scale = lossscale.DynamicLossScale(1.0, increment_period=2)
            momentum = v1.train.MomentumOptimizer(1.0, 1.0)
            optimizer = LossScaleOptimizer(momentum, loss_scale)
            state = weight, loss_scale, loss_scale.good_steps
            loss = run.loss(lambda w=weight: w + 1.0)
            step = run.step(lambda _, o=optimizer, at=loss: o.minimize(at))
            step()
            checkpoint = v1.train.Checkpoint(optimizer=optimizer, weight=weight)
            path = checkpoint.save(str(tmp_path / mode / "checkpoint"))
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


# In sessions, which run any part of a graph.


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
def test_a_session_sees_an_overflow_in_other_graphs(way):
    for mode in SESSIONS:
        with running(mode) as session:
            weight, optimizer = variable(1.0), sgd()
            step = session.step(lambda fed, o=optimizer, w=weight: way(o, w, fed))
            for fed, expected in ((INF, 1.0), (0.5, 0.5)):
                step(fed)
                assert session.value(weight) == expected
            assert session.value(optimizer.loss_scale) == 8.0


def test_what_one_run_accumulates_another_applies():
    """Nothing that is computed from what is fed runs where it is applied."""
    for mode in SESSIONS:
        with running(mode) as session:
            weight, total = variable(1.0), variable(0.0, "total", trainable=False)
            optimizer = sgd(lossscale.DynamicLossScale(16))
            accumulate = session.step(
                lambda fed, o=optimizer, w=weight, total=total: (
                    v1.assign_add(total, gradient(o, w, fed)).op
                )
            )
            grad = tf.clip_by_norm(total / 2.0, 1.0)
            applied = optimizer.apply_gradients([(grad, weight)])
            for fed, expected in ((0.5, 0.5), (INF, 0.5), (0.25, 0.25)):
                for each in (fed, fed):
                    accumulate(each)
                session.run(applied)
                session.run(v1.assign(total, 0.0))
                assert session.value(weight) == expected
            assert session.value(optimizer.loss_scale) == 8.0


def test_a_graph_has_one_training_op_which_looks_at_the_gradients_once():
    for mode in SESSIONS:
        with running(mode) as session:
            adam = v1.train.AdamOptimizer(0.1)
            optimizer = LossScaleOptimizer(adam, lossscale.FixedLossScaleManager(16))
            op = optimizer.minimize(variable(1.0) * 2.0)
            assert op.name == optimizer.get_name() == "Adam"
            assert v1.get_collection(v1.GraphKeys.TRAIN_OP) == [op]
            session.run(op)
            graph = op.graph.as_graph_def()
            # What a session runs for it: a quick check, and the exact one in a branch.
            runs = v1.graph_util.extract_sub_graph(graph, [op.name])
            assert [node.op for node in runs.node].count("IsFinite") == 2


def test_a_monitored_session_goes_on_where_it_stopped_and_asks_the_manager(tmp_path):
    seen = []
    for fed in ([INF, 0.5], [0.5, 0.5]):
        with running("session-of-1"):
            weight = variable(2.0)
            count = v1.train.get_or_create_global_step()
            manager = lossscale.ExponentialUpdateLossScaleManager(16, 3, 1, 4, 0.5)
            factor = v1.placeholder(tf.float32, [])
            op = sgd(manager).minimize(weight * factor, global_step=count)
            with v1.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path), save_checkpoint_steps=1
            ) as training:
                for value in fed:
                    training.run(op, {factor: value})
                # The graph is final: managers of contrib return what they made first.
                seen.append(training.run([weight, count, manager.get_loss_scale()]))
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


@pytest.mark.parametrize("mode", MODES)
def test_an_overflow_on_the_last_replica_skips_the_step_on_all(mode, mirrored):
    change = list if mode in ("eager", "session-of-1") else clipped
    with running(mode) as run:
        # One of its own: the other's collectives would wait for a session for ever.
        own = mode in SESSIONS
        strategy = (
            tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if own else mirrored
        )
        with strategy.scope():
            step, seen = replicated_step(strategy, change)
            step = run.step(step)
        if own:  # a graph holds each variable of the loss scale once
            names = [each.name for each in v1.global_variables()]
            assert sum("current_loss_scale" in name for name in names) == 1
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
        weight, optimizer = tf.Variable(1.0), sgd()
        with pytest.raises(ValueError, match="replica context"):
            optimizer.apply_gradients([(tf.constant(1.0), weight)])

    def on_replica(value):
        optimizer.apply_gradients([(tf.fill([], value), weight)])

    for value, expected in ((3e38, 1.0), (0.25, 1 - count * 0.25)):
        mirrored.run(on_replica, (value,))
        assert weight.numpy() == expected


# What is refused, and TensorFlow's rewrite of graphs to float16.

ADAM = v1.train.AdamOptimizer()
#: Words -> the call that is refused with them.
REFUSED = {
    "`opt` .* use lossscale.LossScaleOptimizer": lambda: LossScaleOptimizer(
        families()[0].optimizers.SGD(), "dynamic"
    ),
    "Wrap it in lossscale.compat.v1.LossSca": lambda: lossscale.LossScaleOptimizer(
        ADAM
    ),
    "not be a LossScaleOptimizer itself": lambda: LossScaleOptimizer(sgd(), 8),
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
    "got .*0": lambda: enable_mixed_precision_graph_rewrite(ADAM, 0),
    "`opt` must": lambda: enable_mixed_precision_graph_rewrite(
        families()[0].optimizers.SGD()
    ),
}


def is_on():
    return tf.config.optimizer.get_experimental_options().get("auto_mixed_precision")


@pytest.mark.parametrize("words", REFUSED)
def test_it_is_refused_with_these_words(words):
    with pytest.raises((TypeError, ValueError), match=words):
        REFUSED[words]()
    assert not is_on()


def test_it_turns_the_rewrite_to_float16_on_and_scales_the_loss():
    with running("session") as run:
        weight = variable(1.0)
        loss_scale = lossscale.DynamicLossScale(16)
        inner = v1.train.GradientDescentOptimizer(1.0)
        try:
            optimizer = enable_mixed_precision_graph_rewrite(inner, loss_scale)
            assert is_on()
        finally:
            v1.mixed_precision.disable_mixed_precision_graph_rewrite()
        assert isinstance(optimizer, MixedPrecisionLossScaleOptimizer)
        names = {each.name for each in v1.global_variables()}
        assert names == {weight.name, *(each.name for each in loss_scale.variables)}
        step = run.step(lambda fed: optimizer.minimize(weight * fed))
        for fed, expected in ((INF, 1.0), (0.5, 0.5)):
            step(fed)
            assert run.value(weight) == expected
