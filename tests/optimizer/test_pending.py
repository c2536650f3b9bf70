"""A pending division: what the state of a step knows where no kind is seen.

Each true gradient is a power of two, so what was subtracted from a weight tells how
often its gradient was divided: see exact.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from exact import (
    START,
    S,
    Trained,
    changes_nothing,
    clip,
    gradients,
    heard,
    sharing,
    warned,
)
from models import compiled

from lossscale import DynamicLossScale, FixedLossScale, LossScaleEngine
from lossscale.runtime import replicas

INF = float("inf")
MODES = ["eager", "graph"]


@pytest.mark.smoke
@pytest.mark.parametrize("mode", MODES)
def test_each_row_of_the_table(family, trained, mode):
    """The last call of ours decides what apply does with gradients of no kind."""

    def scaled():
        trained.apply(changes_nothing(trained.scaled(0.5)))

    def unscaled():
        grads = changes_nothing(trained.unscaled(0.5))
        trained.apply(grads)
        trained.apply(grads)  # a second apply does what the first did

    with warned(0):
        compiled(scaled, mode)()
        assert trained.subtracted() == 0.5
        compiled(unscaled, mode)()
        assert trained.subtracted() == 1.5
        compiled(scaled, mode)()
    assert trained.subtracted() == 2.0
    # Nobody has scaled or unscaled by our functions: as this Keras's own wrapper.
    another = Trained(family)
    another.build()
    another.optimizer.loss_scale.has_scaled = True
    another.apply(changes_nothing([tf.fill([4], 1.0)]))
    divides = family.name == "keras3"
    assert another.subtracted() == (1.0 / S if divides else 1.0)
    assert trained.state()[2] == 0


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_it_crosses_functions(trained, mode):
    compute = compiled(trained.unscaled, mode)
    apply = compiled(lambda grad: trained.apply(clip([grad])), mode)
    with warned(0):
        for factor, left in ((0.5, 0.5), (INF, 0.5), (0.5, 1.0)):
            apply(compute(tf.constant(factor))[0])
            assert trained.subtracted() == left
    assert trained.state() == (S / 2, 1, 1)


@pytest.mark.parametrize("mode", [*MODES, pytest.param("xla", marks=pytest.mark.slow)])
def test_a_list_is_divided_by_its_own_scale_and_not_by_the_last_one(trained, mode):
    scale = trained.optimizer.loss_scale.current_loss_scale

    def step():
        first = trained.scaled(0.5)
        scale.assign(S / 4)
        last = trained.scaled(0.5)
        trained.apply(first)
        trained.apply(last)

    with warned(0):
        compiled(step, mode)()
    assert trained.subtracted() == 1.0


@pytest.mark.smoke
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_no_kind_are_unscaled_by_what_multiplied_their_loss(trained, mode):
    unscale = compiled(trained.optimizer.get_unscaled_gradients, mode)
    grads = tf.function(trained.scaled)(tf.constant(0.5))
    trained.optimizer.loss_scale.current_loss_scale.assign(S / 4)
    with warned(0):
        trained.apply(unscale(grads))
    assert trained.subtracted() == 0.5


def test_a_function_that_nobody_heard_is_no_number(trained):
    """It returns scaled gradients before eager mode is listened to."""
    make = tf.function(trained.scaled)
    with warned(0):
        (first,), (second,) = make(tf.constant(2.0)), trained.scaled(0.5)
        trained.apply([first + second])
    assert trained.subtracted() == 2.5


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_each_example_are_clipped(family, mode):
    """`tf.vectorized_map` converts only what its outputs need, and no assignment."""
    trained = Trained(family, sizes=(3,))
    trained.build()
    examples = np.array([[0.25, 0.0, 0.5], [3.0, 4.0, 0.0]], np.float32)

    def of_one(example):
        (grad,) = trained.unscaled(example)
        return grad / tf.maximum(tf.norm(grad), 1.0)

    def step(examples):
        trained.apply([tf.reduce_sum(tf.vectorized_map(of_one, examples), 0)])

    step = compiled(step, mode)
    (weights,) = trained.variables
    expected = np.full([3], START, np.float32)
    with warned(0):
        for _ in range(2):
            step(tf.constant(examples))
            expected -= examples[0] + examples[1] / 5.0
            np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-5)
        # An infinity over an infinite norm is NaN, which the step sees.
        step(tf.constant(examples * [[1.0, 1.0, 1.0], [INF, 1.0, 1.0]], tf.float32))
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-5)
    assert trained.state()[2] == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "clip_to",
    [
        lambda grads, norm: tf.clip_by_global_norm(grads, norm)[0],
        lambda grads, norm: [tf.clip_by_norm(grad, norm) for grad in grads],
    ],
    ids=["global norm", "norm"],
)
def test_clipping_scaled_gradients_to_a_scaled_norm_is_not_told_of(
    trained, clip_to, mode
):
    """All that Keras 3's own wrapper allows."""

    def step():
        grads = trained.scaled(tf.constant(2.0))  # 2 in each of 4, so the norm is 4
        trained.apply(clip_to(grads, 1.0 * trained.optimizer.loss_scale))

    with warned(0):
        compiled(step, mode)()
    assert trained.subtracted() == 0.5


@pytest.mark.parametrize("number", [float, lambda scale: scale.numpy()])
def test_a_division_by_a_number_is_told(trained, number):
    with warned(1):
        for _ in range(2):
            grads = trained.scaled(0.5)
            s = number(trained.optimizer.loss_scale)
            trained.apply([grad / s for grad in grads])
    assert trained.subtracted() == 2 * 0.5 / S


def test_a_number_that_is_logged_between_steps_is_not_told(trained):
    with warned(0):
        for _ in range(2):
            trained.apply(trained.scaled(0.5))
            float(trained.optimizer.loss_scale)
            trained.optimizer.loss_scale()


@pytest.mark.parametrize("log", [float, lambda scale: scale()])
def test_a_scale_that_is_logged_after_each_step_of_a_function_is_not_told(trained, log):
    """Python sees the loss only while the function is traced."""
    compute = tf.function(trained.scaled)
    with warned(0):
        for _ in range(3):
            trained.apply(compute(tf.constant(0.5)))
            log(trained.optimizer.loss_scale)
    assert trained.subtracted() == 1.5


def test_a_list_is_recognized_though_its_first_number_is_zero(family):
    trained = Trained(family, sizes=(4, 4))
    trained.build()
    mask = tf.constant([0.0, 1.0, 1.0, 1.0])
    with warned(0):
        one, other = tf.function(trained.scaled)(0.5)
        grads = changes_nothing([one, other * mask])
        norm_of(trained, grads)
        tf.function(trained.apply)(grads)
        first = [START - variable.numpy() for variable in trained.variables]
    np.testing.assert_array_equal(first, [[0.5] * 4, [0.0, 0.5, 0.5, 0.5]])


def test_a_scale_that_is_logged_after_a_loop_unscaled_is_not_told(trained):
    def step(count):
        total = tf.zeros([4])
        for _ in tf.range(count):
            total += trained.unscaled(0.5)[0]
        first, second = trained.optimizer.loss_scale(), trained.optimizer.loss_scale()
        trained.apply([total])
        return first + second

    step = tf.function(step)
    with warned(0):
        step(tf.constant(3))
        step(tf.constant(2))
    assert trained.subtracted() == 2.5


def test_it_is_in_no_checkpoint_and_in_no_list_of_variables(trained, tmp_path):
    trained.apply(trained.unscaled(0.5))
    optimizer = trained.optimizer
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "saved"))
    saved = [name for name, _ in tf.train.list_variables(path)]
    state = {"pending", "overflow_seen", "waiting", "given"}
    assert not [name for name in saved if state & set(name.split("/"))]
    variables = optimizer.variables
    variables = variables() if callable(variables) else variables
    assert not [v for v in variables if v.name.split(":")[0] in state]


def test_a_training_step_that_was_exported_goes_on(family, trained, tmp_path):
    if family.name == "keras3":
        pytest.skip("a SavedModel tracks no variable of Keras 3's")
    module, (weight,) = tf.Module(), trained.variables
    module.weight, module.optimizer = weight, trained.optimizer

    @tf.function(input_signature=[tf.TensorSpec([])])
    def step(factor):
        trained.apply(changes_nothing(clip(trained.unscaled(factor))))
        return tf.identity(weight)

    module.step = step
    step(tf.constant(0.5))
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    for factor, left in ((INF, 0.5), (0.5, 1.0)):
        found = loaded.step(tf.constant(factor)).numpy()
        np.testing.assert_array_equal(found, START - left)


@pytest.mark.parametrize("function", [tf.identity, tf.negative])
def test_a_division_by_hand_into_a_variable_is_told(trained, function):
    total = tf.Variable(tf.zeros([4]))
    total.assign(trained.scaled(0.5)[0] / trained.optimizer.loss_scale())
    with warned(1):
        trained.apply([function(total)])
    assert abs(trained.subtracted()) == 0.5 / S


@pytest.mark.parametrize("way", ["scaled", "unscaled"])
@pytest.mark.parametrize("maps", [False, True])
def test_what_a_dataset_was_reduced_to(trained, way, maps):
    def made():
        return getattr(trained, way)(0.5)[0]

    batches = tf.data.Dataset.range(3)
    with warned(0):
        for times in (1, 2):
            if maps:
                mapped = batches.map(lambda _: made(), num_parallel_calls=2)
                total = mapped.reduce(tf.zeros([4]), lambda x, y: x + y)
            else:
                total = batches.reduce(tf.zeros([4]), lambda x, _: x + made())
            trained.apply([total])
            assert trained.subtracted() == times * 1.5
            trained.optimizer.loss_scale.current_loss_scale.assign(4.0 * S)


@pytest.mark.parametrize("mode", ["graph", pytest.param("xla", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("where", "is_fixed"), [("branch", False), ("branch", True), ("loop", True)]
)
def test_a_loss_that_is_scaled_in_a_branch_or_a_loop(family, where, is_fixed, mode):
    trained = Trained(family, FixedLossScale(S) if is_fixed else None)
    trained.build()

    def loss_of(total):
        def one():
            return trained.optimizer.scale_loss(total)

        if where == "branch":
            return tf.cond(total > -1.0, one, one)
        return tf.while_loop(
            lambda count, _: count < 1,
            lambda count, loss: (count + 1, loss + one()),
            (0, 0.0),
            maximum_iterations=1,
        )[1]

    def step():
        trained.apply(gradients(loss_of, 0.5, trained.variables))

    with warned(0):
        compiled(step, mode)()
    assert trained.subtracted() == 0.5


# Two lists of gradients, and two optimizers that share a loss scale.


def norm_of(trained, grads):
    """Asks for the true norm of scaled gradients, as one does to log it."""
    return tf.linalg.global_norm(trained.optimizer.get_unscaled_gradients(grads))


#: What a program makes of a scaled gradient by its true norm, which is 1.
BODIES = {
    "cond": lambda n, g: tf.cond(n > 100.0, lambda: tf.zeros_like(g), lambda: g),
    "loop": lambda n, g: tf.while_loop(
        lambda n, _: n > 100.0, lambda n, g: (n / 2.0, tf.zeros_like(g)), (n, g)
    )[1],
    "switch": lambda n, g: tf.switch_case(
        tf.cast(n > 100.0, tf.int32), [lambda: g, lambda: tf.zeros_like(g)]
    ),
    "function": lambda _, g: tf.function(lambda g: g * 1.0)(g),
    "norm in a cond": lambda n, g: tf.cond(n > 0.5, lambda: g / n, lambda: g),
    "norm in a function": lambda n, g: tf.function(lambda g, n: g / n)(g, n),
    "norm in a loop": lambda n, g: tf.while_loop(
        lambda i, _: i < 3, lambda i, g: (i + 1, g / n), (0, g)
    )[1],
}


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("body", BODIES)
def test_scaled_gradients_are_applied_after_their_norm_was_asked(trained, body, mode):
    def step():
        grads = trained.scaled(0.5)
        norm = norm_of(trained, grads)
        trained.apply([BODIES[body](norm, grad) for grad in grads])

    with warned(0):
        compiled(step, mode)()
    assert trained.subtracted() == 0.5


#: How scaled gradients come from where they were asked for to the apply.
WAYS = {
    "as they are": list,
    "NumPy": lambda grads: [tf.constant(grad.numpy()) for grad in grads],
    "function": changes_nothing,
    "variable": lambda grads: [tf.Variable(grad) for grad in grads],
}


@pytest.mark.smoke
@pytest.mark.parametrize("applies", ["eager", "function"])
@pytest.mark.parametrize("asks", ["eager", "function"])
@pytest.mark.parametrize("way", WAYS)
def test_a_function_returns_them_and_their_norm_is_asked(trained, way, asks, applies):
    ask = lambda grads: norm_of(trained, grads)  # noqa: E731
    ask = tf.function(ask) if asks == "function" else ask
    apply = tf.function(trained.apply) if applies == "function" else trained.apply
    with warned(0):
        grads = tf.function(trained.scaled)(0.5)
        ask(grads)
        apply(WAYS[way](grads))
    assert trained.subtracted() == 0.5


@pytest.mark.smoke
@pytest.mark.parametrize("both", [True, False])
def test_one_unscales_a_list_of_which_the_other_applies_a_part(pair, both):
    """If it never scaled a loss of its own, nobody can know that: it is told."""
    a, b = pair

    @tf.function
    def compute():
        grads = [*a.scaled(0.5), *(b if both else a).scaled(0.5)]
        return a.optimizer.get_unscaled_gradients(grads)

    of_a, of_b = compute()
    with warned(0):
        tf.function(a.apply)([of_a])
    with warned(0 if both else 1):
        tf.function(b.apply)([of_b])
    assert a.subtracted() == 0.5
    assert b.subtracted() == (0.5 if both else 0.5 / S)


@pytest.mark.parametrize("is_seen", [True, False])
def test_the_loss_scale_unscales_for_one_of_two_that_wait(pair, is_seen):
    """What a function returns may be of either: the list itself is recognized."""
    a, b = pair
    unscale = a.optimizer.loss_scale.unscale
    of_b, of_a = tf.function(b.scaled)(0.25), tf.function(a.scaled)(0.5)
    of_a = unscale(of_a) if is_seen else tf.function(unscale)(of_a)
    with warned(0):
        a.apply(of_a)
    with heard():
        b.apply(of_b)
    assert (a.subtracted(), b.subtracted()) == (0.5, 0.25)


@pytest.mark.parametrize("by", ["optimizer", "loss scale"])
@pytest.mark.parametrize("is_seen", [True, False])
def test_the_loss_scale_unscales_by_what_multiplied_the_loss(pair, is_seen, by):
    """Another optimizer's step has moved the loss scale in between."""
    first, _ = pair
    scale = first.optimizer.loss_scale
    multiply = first.optimizer.scale_loss if by == "optimizer" else scale.scale
    make = lambda: gradients(multiply, 0.5, first.variables)  # noqa: E731
    with warned(0):
        grads = make() if is_seen else tf.function(make)()
        scale.current_loss_scale.assign(4.0 * S)
        first.apply(scale.unscale(grads))
    assert first.subtracted() == 0.5


def test_the_loss_scale_unscales_for_the_one_whose_own_loss_waits(pair):
    first, second = pair
    scale = first.optimizer.loss_scale
    others = tf.function(lambda: gradients(scale.scale, 0.5, first.variables))()
    with warned(0):
        grads = second.scaled(0.25)
        second.apply(scale.unscale(grads))
        first.apply(others)
    assert (first.subtracted(), second.subtracted()) == (0.5, 0.25)


def test_one_that_applies_all_that_it_has_unscaled_leaves_nothing_unclear(pair):
    first, second = pair
    scale = first.optimizer.loss_scale.scale
    held = tf.Variable(tf.zeros([8]))
    held.assign(gradients(scale, 0.5, first.variables)[0])
    with warned(0):
        grads = gradients(scale, 0.25, second.variables)
        second.apply(tf.function(second.optimizer.get_unscaled_gradients)(grads))
        first.apply([held])
    assert (first.subtracted(), second.subtracted()) == (0.5, 0.25)


@pytest.mark.parametrize("way", ["scaled", "unscaled"])
def test_an_optimizer_is_made_after_the_function_was_traced(family, way):
    first = Trained(family)
    first.build()
    make = tf.function(lambda: getattr(first, way)(0.5))
    first.apply(make())
    second = Trained(family, first.optimizer.loss_scale)
    second.build()
    with warned(0 if way == "scaled" else 1):
        tf.function(second.apply)(make())
    assert second.subtracted() == (0.5 if way == "scaled" else 0.5 / S)


@pytest.mark.parametrize("known", ["py_function", "numpy_function"])
@pytest.mark.parametrize("way", ["scaled", "unscaled"])
def test_the_state_decides_of_what_python_returns(trained, known, way):
    @tf.function
    def step():
        (grad,) = getattr(trained, way)(0.5)
        grad = getattr(tf, known)(lambda x: x, [grad], tf.float32)
        trained.apply([tf.ensure_shape(grad, [4])])

    with warned(0):
        step()
    assert trained.subtracted() == 0.5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["scaled", "unscaled"])
def test_the_bits_of_a_gradient_are_of_its_kind(trained, way, mode):
    def step():
        (grad,) = getattr(trained, way)(0.5)
        bits = tf.bitcast(grad, tf.int32)
        noise = tf.bitwise.bitwise_and(tf.ones_like(bits), 65535)
        bits = tf.bitwise.bitwise_and(bits + noise, -65536)
        trained.apply([tf.bitcast(bits, tf.float32)])

    with warned(0):
        compiled(step, mode)()
    assert trained.subtracted() == 0.5


#: Values of unscaled and scaled gradients together.
MIXTURES = {
    "a function of a norm": lambda u, g: tf.function(lambda x: x * 1.0)(
        tf.abs(tf.norm(tf.stack([tf.norm(u), tf.norm(g)])))
    ),
    "a norm of a cond": lambda u, g: tf.norm(
        tf.stack([tf.norm(u), tf.norm(tf.cond(u[0] > 0.0, lambda: g, lambda: g * 2.0))])
    ),
    "concat": lambda u, g: tf.concat([u, g], 0)[2:6],
    "sum": lambda u, g: u + g,
    "where": lambda u, g: tf.where([True, False, True, False], u, g),
}


@pytest.mark.smoke
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixed_values_are_divided_and_told(trained, mixture, mode):
    def step():
        scaled = trained.scaled(0.5)
        unscaled = trained.optimizer.get_unscaled_gradients(scaled)
        trained.apply([tf.ones([4]) * MIXTURES[mixture](unscaled[0], scaled[0])])

    with heard() as told:
        compiled(step, mode)()
    (message,) = told
    assert "mixed with unscaled values" in message
    (weight,) = trained.variables
    assert np.all(np.abs(START - weight.numpy()) <= 2.0)


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("is_outside", [False, True])
def test_a_division_by_hand_in_a_branch(family, is_outside, is_fixed):
    """By a tensor of S from outside it is seen, by one of the branch it is told."""
    trained = Trained(family, FixedLossScale(S) if is_fixed else None)
    trained.build()
    scale = trained.optimizer.loss_scale

    @tf.function
    def step(is_true):
        (grad,) = trained.scaled(0.5)
        s = scale()
        divide = lambda: grad / (s if is_outside else scale())  # noqa: E731
        trained.apply([tf.cond(is_true, divide, lambda: tf.zeros_like(grad))])

    with warned(0 if is_outside else 1):
        step(tf.constant(True))
    assert trained.subtracted() == (0.5 if is_outside else 0.5 / S)


@pytest.mark.parametrize("way", ["scaled", "unscaled"])
def test_what_a_checkpoint_does_not_hold_is_told(family, trained, way, tmp_path):
    """Saved after gradients were computed, restored in a new run before the apply."""
    total = tf.Variable(getattr(trained, way)(0.5)[0])
    checkpoint = tf.train.Checkpoint(optimizer=trained.optimizer, total=total)
    path = checkpoint.save(str(tmp_path / "saved"))
    again, total = Trained(family), tf.Variable(tf.zeros([4]))
    again.build()
    checkpoint = tf.train.Checkpoint(optimizer=again.optimizer, total=total)
    checkpoint.restore(path).expect_partial()
    with heard() as told:
        again.apply([total])
    (message,) = told
    assert "The loss was never scaled" in message
    assert again.subtracted() == (0.5 if way == "unscaled" else 0.5 * S)


def test_a_session_divides_what_is_of_unknown_origin_by_what_multiplied_the_loss():
    """It has no state of the step. S has moved when the gradients are applied."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        scale = DynamicLossScale(S)
        engine = LossScaleEngine(scale)
        weight, held = tf.Variable(START), tf.Variable(0.0)
        scaled_loss = engine.scale_loss(tf.constant(0.5))
        with tf.control_dependencies([held.assign(scaled_loss, read_value=False)]):
            moved = scale.current_loss_scale.assign(4.0 * S, read_value=False)
        with tf.control_dependencies([moved]):
            grads = [held.read_value()]
            done = engine.apply(
                grads, [weight], lambda grads, _: weight.assign_sub(grads[0])
            )
        session.run(v1.global_variables_initializer())
        session.run(done)
        assert session.run(weight) == START - 0.5


def test_parameter_servers_refuse_gradients_of_unknown_origin(family, monkeypatch):
    """Another worker may move S between loss and apply, and no state knows."""
    with monkeypatch.context() as patched:
        patched.setattr(replicas, "train_apart", lambda: True)
        trained = Trained(family)
    trained.build()
    assert trained.optimizer.engine.division.state is None
    held = tf.Variable(tf.zeros([4]))

    @tf.function
    def step():
        held.assign(trained.scaled(0.5)[0])
        trained.apply([held.read_value()])

    with pytest.raises(ValueError, match="`grads` must be seen to come from one"):
        step()
    assert trained.subtracted() == 0.0


class OwnScale(DynamicLossScale):
    """Multiplies in its own way, by the base's method or by itself."""

    multiplies = "by the base"

    def scale(self, loss):
        if self.multiplies == "by the base":
            return super().scale(loss)
        return tf.cast(loss, tf.float32) * self()


class ScalesEach(DynamicLossScale):
    """Multiplies each loss of a nest, and returns such a nest."""

    def scale(self, loss):
        return tf.nest.map_structure(super().scale, loss)


@pytest.mark.parametrize("nest", [list, lambda losses: dict(zip("ab", losses))])
@pytest.mark.parametrize("mode", MODES)
def test_a_subclass_may_scale_several_losses(family, mode, nest):
    trained = Trained(family, ScalesEach(S, 1000))
    trained.build()

    def scaled(loss):
        losses = nest([loss, loss])
        return tf.add_n(tf.nest.flatten(trained.optimizer.scale_loss(losses)))

    def step():
        trained.apply(gradients(scaled, 0.25, trained.variables))

    with warned(0):
        compiled(step, mode)()
    assert trained.subtracted() == 0.5


@pytest.mark.parametrize("multiplies", ["by the base", "by itself"])
@pytest.mark.parametrize("mode", MODES)
def test_one_optimizer_unscales_what_two_have_scaled_in_a_way_of_their_own(
    family, multiplies, mode
):
    scale = OwnScale(S, 1000)
    scale.multiplies = multiplies
    first, second = sharing(family, scale)
    for each in (first, second):
        each.build()
    halves = tf.function(lambda grads: [grad * 1.0 for grad in grads])

    def unscaled():
        grads = [*first.scaled(0.5), *second.scaled(0.25)]
        return first.optimizer.get_unscaled_gradients(grads)

    for _ in range(2):
        one, other = halves(compiled(unscaled, mode)())
        first.apply([one])
        second.apply([other])
    assert (first.subtracted(), second.subtracted()) == (1.0, 0.5)
    assert scale.has_scaled


@pytest.mark.smoke
@pytest.mark.parametrize("mode", MODES)
def test_one_that_has_applied_does_not_wait_when_another_one_scales_for_it(pair, mode):
    first, second = pair
    scale = second.optimizer.scale_loss
    make = tf.function(lambda: gradients(scale, 0.25, first.variables))
    first.apply(changes_nothing(first.unscaled(0.5)))
    with heard():  # nobody can see whose gradients these are
        compiled(lambda: first.apply(changes_nothing(make())), mode)()
    assert first.subtracted() == 0.75


@pytest.mark.smoke
def test_one_that_waits_is_not_moved_when_another_one_scales(pair):
    first, second = pair
    # It waits, and nobody can see where these numbers come from.
    unscaled = [tf.constant(grad.numpy()) for grad in first.unscaled(0.5)]
    tf.function(second.scaled)(tf.constant(0.25))
    with heard():
        first.apply(unscaled)
    assert first.subtracted() == 0.5
