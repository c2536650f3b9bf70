"""What is said where two answers are possible, and that it is said once."""

from __future__ import annotations

import warnings

import pytest
import tensorflow as tf
from exact import S, Trained, warned
from models import compiled

from lossscale import LossScaleWarning
from lossscale.runtime import mode

MODES = ["eager", "graph", "xla"]


@pytest.fixture
def trained(family):
    return Trained(family)


def told(function):
    """Returns what a user is told, each text once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    ours = [w for w in caught if issubclass(w.category, LossScaleWarning)]
    return [str(each.message) for each in ours]


def clipped_by_value(grads):
    return [tf.clip_by_value(grad, -(2.0**20), 2.0**20) for grad in grads]


@pytest.mark.parametrize("run", MODES)
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (clipped_by_value, "Minimum or Maximum with a number"),
        (lambda grads: tf.clip_by_global_norm(grads, 2.0**20)[0], "with a number"),
        (lambda grads: [tf.where(tf.tanh(g) < 2, g, 0 * g) for g in grads], "no power"),
        (lambda grads: [tf.where(g > 0, g, tf.tanh(g)) for g in grads], "no power"),
    ],
    ids=["by value", "by norm", "a condition", "tanh"],
)
def test_changed_while_scaled_is_done_as_keras_does(
    family, trained, change, cause, run, request
):
    # Of a condition it is known what it chooses among.
    divides = family.name == "keras3" or "condition" in request.node.callspec.id

    def step():
        trained.apply(change(trained.scaled(1.0)))

    step = compiled(step, run)
    messages = told(lambda: [step(), step()])
    assert cause in messages[0]
    assert "get_unscaled_gradients(grads)" in messages[0]
    assert ("They are divided" in messages[0]) == divides
    assert len(messages) == 1
    assert trained.subtracted() == 2 * (1.0 if divides else S)


@pytest.mark.parametrize("run", MODES)
def test_scaled_twice_is_told(family, trained, run):
    def step():
        grads = trained.scaled(1.0)
        trained.apply([grad * trained.optimizer.loss_scale for grad in grads])

    (message,) = told(compiled(step, run))
    assert "to the power of 2" in message
    # As that Keras's own wrapper would: Keras 3's divides.
    assert trained.subtracted() == (S if family.name == "keras3" else S**2)


def test_a_number_that_nobody_can_see(trained):
    def step():
        grads = trained.scaled(1.0)
        number = float(trained.optimizer.loss_scale)
        trained.apply([grad / number for grad in grads])

    (message,) = told(step)
    assert "Python number" in message


def test_a_number_that_is_only_shown_or_read_between_steps(trained):
    with warned(0):
        for _ in range(3):
            grads = trained.scaled(1.0)
            assert f"{trained.optimizer.loss_scale:.0f}" == "1024"
            trained.apply(grads)
            assert float(trained.optimizer.loss_scale) == S


def test_an_overflow_that_was_clipped_where_nobody_can_ask(trained):
    if not mode.VECTORIZES_MARKED:
        pytest.skip("before TensorFlow 2.8 a function keeps no mark of an unscaling")
    made = tf.function(lambda x: clipped_by_value(trained.unscaled(x)))
    (message,) = told(lambda: trained.apply(made(1.0)))
    assert "clipping by value" in message
    assert trained.subtracted() == 1.0


def test_an_overflow_that_a_norm_shows_is_no_secret(trained):
    made = tf.function(lambda x: tf.clip_by_global_norm(trained.unscaled(x), 1.0)[0])
    with warned(0):
        trained.apply(made(tf.constant(1.0)))
        assert trained.subtracted() == 0.5
        trained.apply(made(tf.constant(float("inf"))))
    assert trained.subtracted() == 0.5


def test_gradients_that_went_through_numpy(family, trained):
    divides = family.name == "keras3"

    def step():
        trained.apply([tf.constant(grad.numpy()) for grad in trained.scaled(1.0)])

    messages = told(lambda: [step(), step()])
    assert len(messages) == (
        0 if divides else 1
    )  # as that Keras would: Keras 3 divides
    assert trained.subtracted() == 2 * (1.0 if divides else S)


@pytest.mark.parametrize("run", MODES)
def test_zeros_need_no_division(trained, run):
    def step():
        trained.scaled(1.0)
        trained.apply([tf.zeros([4])])

    with warned(0):
        compiled(step, run)()
    assert trained.subtracted() == 0.0


def test_what_is_free_of_the_loss_scale_is_not_divided_when_it_is_unscaled(trained):
    (grad,) = trained.scaled(1.0)
    with warned(0):
        unscaled = trained.optimizer.get_unscaled_gradients([grad / tf.norm(grad)])
        trained.apply(unscaled)
    assert trained.subtracted() == 0.5


def test_of_the_loss_scales_that_multiplied_parts_of_it_the_last_divides(trained):
    (before,) = trained.scaled(1.0)
    trained.optimizer.loss_scale.current_loss_scale.assign(2 * S)
    (grad,) = trained.scaled(1.0)
    with warned(0):
        trained.apply([0.0 * before + grad])  # a sum that forgets what was before
    assert trained.subtracted() == 1.0
