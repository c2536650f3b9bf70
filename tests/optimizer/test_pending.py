"""Is a division pending? What the state of a step knows where no kind is seen.

The true gradients are powers of two, so what was subtracted from a weight tells how
often its gradient was divided: see exact.py. What is seen of straight-line programs is
in provenance/test_expressions.py.
"""

import gc

import numpy as np
import pytest
import tensorflow as tf
from exact import (
    START,
    S,
    Trained,
    changes_nothing,
    gradients,
    heard,
    sharing,
    warned,
)
from models import compiled
from version_1 import running

from lossscale import DynamicLossScale, FixedLossScale, LossScaleEngine
from lossscale.runtime import replicas

INF = float("inf")
MODES = ["eager", "graph"]
WAYS = {"scaled": Trained.scaled, "unscaled": Trained.unscaled}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def eagerly(function):
    return function


def with_captured(function):
    """Calls a function in one that is given no argument, but captures it."""
    return lambda grads: tf.function(lambda: function([g * 1.0 for g in grads]))()


def scale_of(trained):
    return trained.optimizer.loss_scale


def move_scale(trained):
    """Moves the loss scale, as a step of another optimizer may."""
    scale_of(trained).current_loss_scale.assign(4.0 * S)


@pytest.mark.smoke
@pytest.mark.parametrize("mode", MODES)
def test_the_last_call_of_ours_decides_about_gradients_of_no_kind(
    family, trained, mode
):
    def scaled():
        trained.apply(changes_nothing(trained.scaled(0.5)))

    def unscaled():
        grads = changes_nothing(trained.unscaled(0.5))
        trained.apply(grads)
        trained.apply(grads)  # a second apply does what the first did

    with warned(0):
        for step, left in ((scaled, 0.5), (unscaled, 1.5), (scaled, 2.0)):
            compiled(step, mode)()
            assert trained.subtracted() == left
    # Nobody has scaled or unscaled by our functions: as this Keras's own wrapper.
    another = Trained(family)
    another.optimizer.loss_scale.has_scaled = True
    another.apply(changes_nothing([tf.fill([4], 1.0)]))
    divides = family.name == "keras3"
    assert another.subtracted() == (1.0 / S if divides else 1.0)
    assert trained.state()[2] == 0


# Steps of one function.


def two_losses(p):
    first = p.scaled(0.5)
    move_scale(p)
    last = p.scaled(0.5)
    p.apply(first)
    p.apply(last)


def unscaled_in_a_loop(p):
    total = tf.zeros([4])
    for _ in tf.range(tf.constant(3)):
        total += p.unscaled(0.5)[0]
    first, second = scale_of(p)(), scale_of(p)()  # to log it
    p.apply([total])
    return first + second


def scaled_by(p, scale):
    p.apply(gradients(scale, 0.5, p.variables))


def scaled_in_a_branch(p):
    one = lambda loss: lambda: p.optimizer.scale_loss(loss)  # noqa: E731
    scaled_by(p, lambda loss: tf.cond(loss > -1.0, one(loss), one(loss)))


def scaled_in_a_loop(p):
    def scale(loss):
        body = lambda i, total: (i + 1, total + p.optimizer.scale_loss(loss))  # noqa: E731
        is_first = lambda i, _: i < 1  # noqa: E731
        _, total = tf.while_loop(is_first, body, (0, 0.0), maximum_iterations=1)
        return total

    scaled_by(p, scale)


def divided_in_a_branch(p):
    (grad,) = p.scaled(0.5)
    divide = lambda: grad / scale_of(p)()  # noqa: E731
    p.apply([tf.cond(tf.constant(True), divide, lambda: grad)])


class ScalesEach(DynamicLossScale):
    """Multiplies each loss of a nest, and returns such a nest."""

    def scale(self, loss):
        return tf.nest.map_structure(super().scale, loss)


def several_losses(p):
    def scale(loss):
        losses = p.optimizer.scale_loss({"a": loss / 2.0, "b": [loss / 2.0]})
        return losses["a"] + losses["b"][0]

    scaled_by(p, scale)


@pytest.mark.parametrize(
    "mode", ["graph", pytest.param("eager", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("step", "scale", "subtracted", "told"),
    [
        (two_losses, None, 1.0, 0),
        (unscaled_in_a_loop, None, 1.5, 0),
        (scaled_in_a_branch, None, 0.5, 0),
        (scaled_in_a_branch, FixedLossScale, 0.5, 0),
        (scaled_in_a_loop, FixedLossScale, 0.5, 0),
        (several_losses, ScalesEach, 0.5, 0),
        # In a branch nobody sees what its read of S is for.
        (divided_in_a_branch, None, 0.5 / S, 1),
        (divided_in_a_branch, FixedLossScale, 0.5 / S, 1),
    ],
)
def test_a_step_divides_each_gradient_once_or_tells(
    family, step, scale, subtracted, told, mode
):
    trained = Trained(family, scale and scale(S))
    is_seen = mode == "eager" and step is divided_in_a_branch
    with warned(0 if is_seen else told):
        compiled(lambda: (step(trained), None)[1], mode)()
    assert trained.subtracted() == (0.5 if is_seen else subtracted)


# Programs of several functions, or of one that runs eagerly.


def unscaled_later(p, function):
    grads = tf.function(p.scaled)(0.5)
    move_scale(p)
    p.apply(function(p.optimizer.get_unscaled_gradients)(grads))


def added_to_another_functions(p, _):
    """It returns scaled gradients before eager mode is listened to."""
    (first,), (second,) = tf.function(p.scaled)(2.0), p.scaled(0.5)
    p.apply([first + second])


def divided_by_a_number(p, number):
    grads = p.scaled(0.5)
    s = number(scale_of(p))
    p.apply([grad / s for grad in grads])


def logged_between_steps(p, log):
    for _ in range(2):
        p.apply(p.scaled(0.5))
        log(scale_of(p))


def logged_after_a_function(p, log):
    """Python sees the loss only while the function is traced."""
    compute = tf.function(p.scaled)
    for _ in range(3):
        p.apply(compute(tf.constant(0.5)))
        log(scale_of(p))


def divided_into_a_variable(p, change):
    total = tf.Variable(p.scaled(0.5)[0] / scale_of(p)())
    p.apply([change(total)])


@pytest.mark.parametrize(
    ("program", "how", "subtracted", "told"),
    [
        (unscaled_later, tf.function, 0.5, 0),
        (unscaled_later, eagerly, 0.5, 0),
        (unscaled_later, with_captured, 0.5, 0),
        (added_to_another_functions, None, 2.5, 0),
        (divided_by_a_number, float, 0.5 / S, 1),
        (logged_between_steps, lambda scale: (float(scale), scale()), 1.0, 0),
        (logged_after_a_function, float, 1.5, 0),
        (logged_after_a_function, lambda scale: scale(), 1.5, 0),
        (divided_into_a_variable, tf.identity, 0.5 / S, 1),
        (divided_into_a_variable, tf.negative, -0.5 / S, 1),
    ],
)
def test_a_program_of_parts_divides_each_gradient_once_or_is_told(
    trained, program, how, subtracted, told
):
    with warned(told):
        program(trained, how)
    assert trained.subtracted() == subtracted


def of_batches(make):
    return tf.data.Dataset.range(3).reduce(tf.zeros([4]), lambda x, _: x + make())


def of_mapped_batches(make):
    mapped = tf.data.Dataset.range(3).map(lambda _: make(), num_parallel_calls=2)
    return mapped.reduce(tf.zeros([4]), lambda x, y: x + y)


def of_python(make):
    return tf.ensure_shape(tf.py_function(lambda x: x * 3.0, [make()], tf.float32), [4])


def of_numpy(make):
    returned = tf.numpy_function(lambda x: x * 3, [make()], tf.float32)
    return tf.ensure_shape(returned, [4])


@each_way
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", [of_batches, of_mapped_batches, of_python, of_numpy])
def test_the_state_decides_of_what_nobody_can_follow(trained, way, source, mode):
    def step():
        trained.apply([source(lambda: way(trained, 0.5)[0])])

    with warned(0):
        for left in (1.5, 3.0):
            compiled(step, mode)()
            assert trained.subtracted() == left
            move_scale(trained)


@pytest.mark.smoke
@pytest.mark.parametrize("applies", [tf.function, eagerly])
@pytest.mark.parametrize("asks", [tf.function, eagerly])
@pytest.mark.parametrize(
    "route",
    [
        list,
        changes_nothing,
        lambda grads: [tf.constant(grad.numpy()) for grad in grads],
        lambda grads: [tf.Variable(grad) for grad in grads],
    ],
    ids=["direct", "function", "NumPy", "variable"],
)
def test_a_list_whose_norm_was_asked_is_recognized(trained, route, asks, applies):
    """Though its first number is zero."""
    mask = np.float32([0.0, 1.0, 1.0, 1.0])
    with warned(0):
        grads = tf.function(lambda: [grad * mask for grad in trained.scaled(0.5)])()
        unscale = trained.optimizer.get_unscaled_gradients
        asks(lambda grads: tf.linalg.global_norm(unscale(grads)))(grads)
        applies(trained.apply)(route(grads))
    np.testing.assert_array_equal(START - trained.variables[0].numpy(), 0.5 * mask)


def test_gradients_of_each_example_are_clipped(family):
    """`tf.vectorized_map` converts only what its outputs need, and no assignment."""
    trained = Trained(family, sizes=(3,))

    def of_one(example):
        (grad,) = trained.unscaled(example)
        return grad / tf.maximum(tf.norm(grad), 1.0)

    @tf.function
    def step(examples):
        trained.apply([tf.reduce_sum(tf.vectorized_map(of_one, examples), 0)])

    (weights,), left = trained.variables, START - np.float32([0.85, 0.8, 0.5])
    with warned(0):
        step(tf.constant([[0.25, 0.0, 0.5], [3.0, 4.0, 0.0]]))
        np.testing.assert_allclose(weights.numpy(), left, rtol=1e-5)
        # An infinity over an infinite norm is NaN, which the step sees.
        step(tf.constant([[0.25, 0.0, 0.5], [INF, 4.0, 0.0]]))
    np.testing.assert_allclose(weights.numpy(), left, rtol=1e-5)
    assert trained.state()[2] == 1


# Two optimizers that share a loss scale.


def one_unscales_for_both(a, b, b_scales):
    """If that one never scaled a loss of its own, nobody can know that: it is told."""

    @tf.function
    def compute():
        grads = [*a.scaled(0.5), *(b if b_scales else a).scaled(0.5)]
        return a.optimizer.get_unscaled_gradients(grads)

    of_a, of_b = compute()
    tf.function(a.apply)([of_a])
    tf.function(b.apply)([of_b])


def the_scale_unscales_for_one(a, b, function):
    """What a function returns may be of either: the list itself is recognized."""
    of_b, of_a = tf.function(b.scaled)(0.25), tf.function(a.scaled)(0.5)
    of_a = function(scale_of(a).unscale)(of_a)
    with warned(0):
        a.apply(of_a)
    b.apply(of_b)


def the_scale_unscales_after_it_has_moved(a, b, by_itself):
    """As in a step of another optimizer."""
    scale = scale_of(a).scale if by_itself else a.optimizer.scale_loss
    grads = tf.function(lambda: gradients(scale, 0.5, a.variables))()
    move_scale(b)
    a.apply(scale_of(a).unscale(grads))


def the_scale_unscales_those_of_the_own_loss(a, b, _):
    scale = scale_of(a)
    others = tf.function(lambda: gradients(scale.scale, 0.5, a.variables))()
    grads = b.scaled(0.25)
    b.apply(scale.unscale(grads))
    a.apply(others)


def one_applies_all_that_it_has_unscaled(a, b, _):
    scale, held = scale_of(a).scale, tf.Variable(tf.zeros([8]))
    held.assign(gradients(scale, 0.5, a.variables)[0])
    grads = gradients(scale, 0.25, b.variables)
    b.apply(tf.function(b.optimizer.get_unscaled_gradients)(grads))
    a.apply([held])


def one_scales_for_one_that_has_applied(a, b, function):
    scale = b.optimizer.scale_loss
    make = tf.function(lambda: gradients(scale, 0.25, a.variables))
    a.apply(changes_nothing(a.unscaled(0.5)))
    function(lambda: a.apply(changes_nothing(make())))()


def one_scales_while_one_waits(a, b, _):
    """Nobody can see where these numbers come from."""
    unscaled = [tf.constant(grad.numpy()) for grad in a.unscaled(0.5)]
    tf.function(b.scaled)(tf.constant(0.25))
    a.apply(unscaled)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("program", "how", "subtracted", "told"),
    [
        (one_unscales_for_both, True, [0.5, 0.5], {0}),
        (one_unscales_for_both, False, [0.5, 0.5 / S], {1}),
        (the_scale_unscales_for_one, eagerly, [0.5, 0.25], {0, 1}),
        (the_scale_unscales_for_one, tf.function, [0.5, 0.25], {0, 1}),
        (the_scale_unscales_after_it_has_moved, False, [0.5, 0.0], {0}),
        (the_scale_unscales_after_it_has_moved, True, [0.5, 0.0], {0}),
        (the_scale_unscales_those_of_the_own_loss, None, [0.5, 0.25], {0}),
        (one_applies_all_that_it_has_unscaled, None, [0.5, 0.25], {0}),
        # In these nobody can see whose gradients are applied.
        (one_scales_for_one_that_has_applied, eagerly, [0.75, 0.0], {0, 1}),
        (one_scales_for_one_that_has_applied, tf.function, [0.75, 0.0], {0, 1}),
        (one_scales_while_one_waits, None, [0.5, 0.0], {0, 1}),
    ],
)
def test_the_state_of_a_step_belongs_to_one_optimizer(
    pair, program, how, subtracted, told
):
    with heard() as messages:
        program(*pair, how)
    assert [each.subtracted() for each in pair] == subtracted
    assert len(messages) in told, messages


@each_way
def test_an_optimizer_is_made_after_the_function_was_traced(family, way):
    first = Trained(family)
    make = tf.function(lambda: way(first, 0.5))
    first.apply(make())
    second = Trained(family, scale_of(first))
    is_scaled = way is Trained.scaled
    with warned(0 if is_scaled else 1):
        tf.function(second.apply)(make())
    assert second.subtracted() == (0.5 if is_scaled else 0.5 / S)


class OwnScale(DynamicLossScale):
    """Multiplies by itself, in a way of its own."""

    def scale(self, loss):
        return tf.cast(loss, tf.float32) * self()


def test_one_optimizer_unscales_what_two_have_scaled_in_a_way_of_their_own(family):
    pair = sharing(family, OwnScale(S, 1000))
    one_unscales_for_both(*pair, b_scales=True)
    assert [each.subtracted() for each in pair] == [0.5, 0.5]
    assert scale_of(pair[0]).has_scaled


def test_an_optimizer_that_was_deleted_no_longer_counts(family):
    """Whether it waits is written only while another one shares the loss scale."""
    first, second = sharing(family)
    del second
    gc.collect()
    assert not first.optimizer.engine.division.uses.has_several


# Where there is no state.


def test_a_session_divides_what_is_of_unknown_origin_by_what_multiplied_the_loss():
    """S has moved when the gradients are applied."""
    with running("session") as run:
        engine = LossScaleEngine(DynamicLossScale(S))
        value = engine.loss_scale.current_loss_scale
        weight, held = tf.Variable(START), tf.Variable(0.0)
        scaled_loss = engine.scale_loss(tf.constant(0.5))
        with tf.control_dependencies([held.assign(scaled_loss, read_value=False)]):
            moved = value.assign(4.0 * S, read_value=False)
        with tf.control_dependencies([moved]):
            grads = [held.read_value()]
            descend = lambda grads, _: weight.assign_sub(grads[0])  # noqa: E731
            done = engine.apply(grads, [weight], descend)
        run.run(done)
        assert run.value(weight) == START - 0.5


def test_parameter_servers_refuse_gradients_of_unknown_origin(family, monkeypatch):
    """Another worker may move S between loss and apply, and no state knows."""
    with monkeypatch.context() as patched:
        patched.setattr(replicas, "train_apart", lambda: True)
        trained = Trained(family)
    assert trained.optimizer.engine.division.state is None
    held = tf.Variable(tf.zeros([4]))

    @tf.function
    def step():
        held.assign(trained.scaled(0.5)[0])
        trained.apply([held.read_value()])

    with pytest.raises(ValueError, match="`grads` must be seen to come from one"):
        step()
    assert trained.subtracted() == 0.0
