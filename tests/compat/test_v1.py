"""LossScaleOptimizer around optimizers of tf.compat.v1.train.

The first programs are those of TensorFlow's own suites: 1.15's
`contrib/mixed_precision/python/loss_scale_optimizer_test.py`, and 2.4's
`python/training/experimental/loss_scale_optimizer_test.py`.
"""

import re

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


#: Calls of each public method of tf.compat.v1.train.Optimizer.
CALLS = [
    lambda o, _, w: o.apply_gradients([(tf.constant(0.5), w)]),
    lambda o, _, w: o.apply_gradients([(tf.constant(0.5), w)], name="mine"),
    lambda o, *_: o.apply_gradients([]),
    lambda o, _, w: o.apply_gradients([(None, w)]),
    lambda o, loss, w: o.compute_gradients(loss, [w]),
    lambda o, loss, w: o.compute_gradients(loss, [w], grad_loss=tf.constant(3.0)),
    lambda o, loss, w: o.compute_gradients(loss, [w], gate_gradients=o.GATE_NONE),
    lambda o, loss, _: o.compute_gradients(loss, []),
    lambda o, loss, _: o.compute_gradients(loss, ["no variable"]),
    lambda o, loss, w: o.compute_gradients(loss, [w], gate_gradients=7),
    lambda o, _, w: o.compute_gradients(tf.constant(1.0), [w]),
    lambda o, *_: o.get_name(),
    lambda o, _, w: o.get_slot(w, "momentum"),
    lambda o, _, w: o.get_slot(w, "none of this name"),
    lambda o, *_: o.get_slot_names(),
    lambda o, loss, w: o.minimize(loss, var_list=[w]),
    lambda o, loss, _: o.minimize(loss, var_list=[variable(1.0, "other")]),
    lambda o, *_: o.variables(),
]


def outcome(call, mode, is_used, wraps):
    """Returns the answer of a method or its error, and the weight after it."""
    with running(mode) as run:
        weight, of_scale = variable(2.0), []
        loss = run.loss(lambda: weight * weight)
        optimizer = v1.train.MomentumOptimizer(0.25, 0.5)
        if wraps:
            optimizer = LossScaleOptimizer(optimizer, 64.0)
            of_scale = optimizer.loss_scale.variables
        if is_used:
            run.step(lambda _: optimizer.minimize(loss, var_list=[weight]))()

        def plain(value):
            if isinstance(value, (list, tuple)):
                own = [v for v in value if not any(v is other for other in of_scale)]
                return [plain(each) for each in own]
            return value if isinstance(value, (str, type(None))) else run.value(value)

        try:
            answer = plain(call(optimizer, loss, weight))
        except Exception as error:
            answer = type(error), re.sub("0x[0-9a-f]+", "", str(error))
        return answer, run.value(weight)


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("mode", ["eager", "session"] if IS_EAGER else SESSIONS)
def test_each_method_answers_as_the_bare_optimizers(mode, is_used):
    for call in CALLS:
        bare, ours = (outcome(call, mode, is_used, wraps) for wraps in (False, True))
        assert ours == bare


class Stepwise(lossscale.LossScaleManager):
    """A user's own: up by 1 on a good step, and down by 1 on a bad one."""

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


# Programs. Each gets what runs it, an optimizer, the number that it is fed and two
# weights of 1, and takes a step.


def gradient(run, optimizer, fed, weight):
    return optimizer.compute_gradients(run.loss(lambda: weight * fed), [weight])[0][0]


def applies(_run, optimizer, fed, weight, _other):
    return optimizer.apply_gradients([(fed, weight)])


def squares_gradients(run, optimizer, _fed, weight, _other):
    # What flows back is the loss scale: squared, and divided by it, it is that.
    return optimizer.minimize(run.loss(lambda: squaring_gradients(weight)))


def clips_and_counts(run, optimizer, fed, weight, count):
    pairs = optimizer.compute_gradients(run.loss(lambda: weight * fed), [weight])
    return optimizer.apply_gradients(clipped(pairs), global_step=count)


def applies_one_of_two(run, optimizer, fed, weight, other):
    loss = run.loss(lambda: weight * 0.5 + other * fed)
    pairs = optimizer.compute_gradients(loss, [weight, other])
    return optimizer.apply_gradients(clipped(pairs[:1]))


def drops_gradients(run, optimizer, fed, weight, _):
    gradient(run, optimizer, fed, weight)
    return optimizer.apply_gradients([(gradient(run, optimizer, 0.5, weight), weight)])


def leaves_division_to_apply(run, optimizer, fed, weight, _):
    scaled = run.loss(lambda: weight * fed * optimizer.loss_scale())
    pairs = optimizer._optimizer.compute_gradients(scaled, [weight])
    return optimizer.apply_gradients(pairs)


def adjusts_twice(run, optimizer, fed, weight, other):
    one = optimizer.minimize(run.loss(lambda: weight * fed), None, [weight])
    with tf.control_dependencies([] if one is None else [one]):
        return optimizer.second.minimize(run.loss(lambda: other * fed), None, [other])


def applies_in_a_branch(run, optimizer, fed, weight, _):
    grad = by_value(gradient(run, optimizer, fed, weight))

    def apply():
        with tf.control_dependencies([optimizer.apply_gradients([(grad, weight)])]):
            return tf.constant(True)

    return tf.cond(weight > 0.0, apply, lambda: tf.constant(False))


def computes_in_a_branch(run, optimizer, fed, weight, _):
    grad = tf.cond(
        weight > 0.0,
        lambda: by_value(gradient(run, optimizer, fed, weight)),
        lambda: tf.constant(0.0),
    )
    return optimizer.apply_gradients([(by_value(grad), weight)])


def adds_up_in_a_loop(run, optimizer, fed, weight, _):
    def add(i, total):
        # The three add up to what is fed.
        factor = tf.where(tf.equal(i, 1), fed, 0.0)
        return i + 1, total + by_value(gradient(run, optimizer, factor, weight))

    _, total = tf.while_loop(lambda i, _: i < 3, add, [0, 0.0])
    return optimizer.apply_gradients([(by_value(total), weight)])


def computes_by_xla(run, optimizer, fed, weight, _):
    (grad,) = tf.xla.experimental.compile(
        lambda fed: gradient(run, optimizer, fed, weight), [fed]
    )
    return optimizer.apply_gradients([(grad, weight)])


def by_contrib():
    return sgd(lossscale.FixedLossScaleManager(16))


def two_that_share():
    optimizer = sgd()
    optimizer.second = sgd(optimizer.loss_scale)
    return optimizer


SKIPS_AND_APPLIES = [(INF, 1, 1, 8), (0.5, 0.5, 1, 8)]
#: A program, its optimizer, and what it is fed with both weights and the loss scale
#: after it.
PROGRAMS = [
    (applies, lambda: sgd(Stepwise(8.0)), [(NAN, 1, 1, 7), (0.25, 0.75, 1, 8)]),
    (
        squares_gradients,
        lambda: sgd(16.0, MixedPrecisionLossScaleOptimizer),
        [(0, -15, 1, 16)],
    ),
    (
        clips_and_counts,
        sgd,
        [(2, 0, 2, 16), (INF, 0, 2, 8), (2, -1, 3, 8), (2, -2, 4, 16)],
    ),
    (applies_one_of_two, sgd, SKIPS_AND_APPLIES),
    # A session keeps no state of a step: there only what is applied counts.
    (drops_gradients, sgd, [(INF, 1, 1, 8)]),
    (leaves_division_to_apply, by_contrib, [(0.5, 0.5, 1, 16)]),
    (adjusts_twice, two_that_share, [(0.5, 0.5, 0.5, 32), (INF, 0.5, 0.5, 8)]),
    (applies_in_a_branch, sgd, SKIPS_AND_APPLIES),
    (computes_in_a_branch, sgd, SKIPS_AND_APPLIES),
    (adds_up_in_a_loop, sgd, SKIPS_AND_APPLIES),
    (computes_by_xla, sgd, SKIPS_AND_APPLIES),
]
IN_A_SESSION = {drops_gradients: [(INF, 0.5, 1, 16)]}


@pytest.mark.every
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("program", "make", "expected"), PROGRAMS)
def test_a_program_does_the_same_in_each_mode(program, make, expected, mode):
    with running(mode) as run:
        weights, optimizer = (variable(1.0, "one"), variable(1.0, "two")), make()
        step = run.step(lambda fed: program(run, optimizer, fed, *weights))
        if mode in SESSIONS:
            expected = IN_A_SESSION.get(program, expected)
        for fed, *after in expected:
            step(fed)
            seen = (*weights, optimizer.loss_scale)
            assert list(map(run.value, seen)) == after


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_holds_slots_and_the_scale_once(mode, tmp_path):
    with running(mode) as run:
        weight = variable(2.0)
        loss_scale = lossscale.DynamicLossScale(1.0, increment_period=2)
        momentum = v1.train.MomentumOptimizer(1.0, 1.0)
        optimizer = LossScaleOptimizer(momentum, loss_scale)
        state = weight, loss_scale, loss_scale.good_steps
        loss = run.loss(lambda: weight + 1.0)
        step = run.step(lambda _: optimizer.minimize(loss))
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


# In sessions, which run any part of a graph.


@pytest.mark.parametrize("mode", SESSIONS)
def test_what_one_run_accumulates_another_applies(mode):
    """Nothing that is computed from what is fed runs where it is applied."""
    with running(mode) as session:
        weight, total = variable(1.0), variable(0.0, "total", trainable=False)
        optimizer = sgd(lossscale.DynamicLossScale(16))
        accumulate = session.step(
            lambda fed: (
                v1.assign_add(total, gradient(session, optimizer, fed, weight)).op
            )
        )
        grad = tf.clip_by_norm(total / 2.0, 1.0)
        applied = optimizer.apply_gradients([(grad, weight)])
        for fed, expected in ((0.5, 0.5), (INF, 0.5), (0.25, 0.25)):
            accumulate(fed)
            accumulate(fed)
            session.run(applied)
            session.run(v1.assign(total, 0.0))
            assert session.value(weight) == expected
        assert session.value(optimizer.loss_scale) == 8.0


@pytest.mark.parametrize("mode", SESSIONS)
def test_a_graph_has_one_training_op_which_looks_at_the_gradients_once(mode):
    with running(mode) as session:
        adam = v1.train.AdamOptimizer(0.1)
        optimizer = LossScaleOptimizer(adam, lossscale.FixedLossScaleManager(16))
        op = optimizer.minimize(variable(1.0) * 2.0)
        assert op.name == optimizer.get_name() == "Adam"
        assert v1.get_collection(v1.GraphKeys.TRAIN_OP) == [op]
        session.run(op)
        # What a session runs for it: a quick check, and the exact one in a branch.
        runs = v1.graph_util.extract_sub_graph(op.graph.as_graph_def(), [op.name])
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


@pytest.mark.parametrize("mode", MODES)
def test_an_overflow_on_the_last_replica_skips_the_step_on_all(mode, mirrored):
    # One of its own: the other's collectives would wait for a session for ever.
    own = mode in SESSIONS
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if own else mirrored
    clips = mode not in ("eager", "session-of-1")

    def on_replica(fed):
        factor = last_replica_gets(fed, 0.25)
        pairs = optimizer.compute_gradients(lambda: weight * factor, [weight])
        pairs = clipped(pairs) if clips else pairs
        return optimizer.apply_gradients(pairs, global_step=count)

    with running(mode) as run:
        with strategy.scope():
            weight, count = tf.Variable([1.0, 2.0]), tf.Variable(0, False)
            momentum = v1.train.MomentumOptimizer(1.0, momentum=0.0)
            loss_scale = lossscale.DynamicLossScale(16, 3)
            optimizer = LossScaleOptimizer(momentum, loss_scale)
            step = run.step(lambda fed: strategy.run(on_replica, (fed,)))
        if own:  # a graph holds each variable of the loss scale once
            names = [each.name for each in v1.global_variables()]
            assert sum("current_loss_scale" in name for name in names) == 1
        seen = weight, count, loss_scale.current_loss_scale
        for fed, *after in ((INF, [1.0, 2.0], 0, 8), (0.25, [0.5, 1.5], 1, 8)):
            step(fed)
            for variable_of_all, expected in zip(seen, after):
                for each in strategy.experimental_local_results(variable_of_all):
                    assert run.value(each).tolist() == expected


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
    "abstract": lossscale.LossScaleManager,
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


def test_a_manager_of_ones_own_has_no_config():
    with pytest.raises(NotImplementedError, match="Stepwise cannot be serialized"):
        sgd(Stepwise(8.0)).loss_scale.get_config()


def test_it_turns_the_rewrite_to_float16_on_and_scales_the_loss():
    with running("session"):
        loss_scale = lossscale.DynamicLossScale(16)
        inner = v1.train.GradientDescentOptimizer(1.0)
        try:
            optimizer = enable_mixed_precision_graph_rewrite(inner, loss_scale)
            assert is_on()
        finally:
            v1.mixed_precision.disable_mixed_precision_graph_rewrite()
        assert isinstance(optimizer, MixedPrecisionLossScaleOptimizer)
        assert optimizer.loss_scale is loss_scale
        names = {each.name for each in v1.global_variables()}
        assert names == {each.name for each in loss_scale.variables}
