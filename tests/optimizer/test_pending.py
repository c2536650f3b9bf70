"""A pending division: what the state of a step knows where no kind is seen."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from exact import START, S, Trained, sharing, warned
from models import compiled

pytestmark = [pytest.mark.compiled_once, pytest.mark.either_keras2]

INF = float("inf")
MODES = ["eager", "graph"]


@pytest.fixture
def trained(family):
    trained = Trained(family)
    trained.build()
    return trained


def clip(grads):
    return [tf.clip_by_value(grad, -1.0, 1.0) for grad in grads]


def changes_nothing(grads):
    """A function of its own: what it returns is of no kind."""
    return tf.function(lambda *values: [value * 1.0 for value in values])(*grads)


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


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_it_crosses_functions(trained, mode):
    compute = compiled(trained.unscaled, mode)
    apply = compiled(lambda grad: trained.apply(clip([grad])), mode)
    with warned(0):
        for factor, left in ((0.5, 0.5), (INF, 0.5), (0.5, 1.0)):
            apply(compute(tf.constant(factor))[0])
            assert trained.subtracted() == left
    assert trained.state() == (S / 2, 1, 1)


@pytest.mark.parametrize("mode", [*MODES, "xla"])
def test_an_overflow_counts_once(trained, mode):
    """And in each apply of its step: of two halves of a list, none is applied."""

    def step(factor):
        (grad,) = changes_nothing(clip(trained.unscaled(factor)))
        trained.apply([grad])
        trained.apply([grad])

    step = compiled(step, mode)
    with warned(0):
        step(tf.constant(INF))
        assert trained.subtracted() == 0.0
        step(tf.constant(0.5))
    assert trained.subtracted() == 1.0


@pytest.mark.parametrize("mode", [*MODES, "xla"])
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("then", [list, changes_nothing], ids=["known", "unknown"])
def test_an_overflow_that_was_counted_ends_with_its_step(trained, then, mode):
    """A norm is logged now and then: the steps between unscale nothing."""

    def unscaled(factor):
        trained.apply(clip(trained.unscaled(factor)))

    def scaled(factor):
        trained.apply(then(trained.scaled(factor)))

    unscaled, scaled = compiled(unscaled, mode), compiled(scaled, mode)
    with warned(0):
        unscaled(tf.constant(INF))
        for times in (1, 2):
            scaled(tf.constant(0.5))
            assert trained.subtracted() == times * 0.5
    assert trained.state() == (S / 2, 2, 1)


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


@pytest.mark.parametrize("mode", MODES)
def test_what_is_clipped_while_it_is_scaled_is_told_once(trained, mode):
    step = compiled(lambda: trained.apply(clip(trained.scaled(0.5))), mode)
    with warned(1):
        step()
    with warned(0):
        step()


def test_it_is_in_no_checkpoint_and_in_no_list_of_variables(trained, tmp_path):
    trained.apply(trained.unscaled(0.5))
    optimizer = trained.optimizer
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "saved"))
    saved = [name for name, _ in tf.train.list_variables(path)]
    state = {"pending", "overflow_seen"}
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


def test_two_that_share_a_loss_scale_have_a_state_each(family):
    first, second = sharing(family)
    for each in (first, second):
        each.build()

    @tf.function
    def both(a, b):
        unscaled = clip(first.unscaled(a))
        scaled = second.scaled(b)
        return unscaled, scaled

    with warned(0):
        for a, left in ((0.5, 0.5), (INF, 0.5)):
            unscaled, scaled = both(tf.constant(a), tf.constant(0.5))
            second.apply(scaled)
            first.optimizer.get_unscaled_gradients([tf.zeros([8])])
            first.apply(unscaled)
            assert first.subtracted() == left
