"""What a loop carries from step to step in Python: momentum, norms, elements of data.

An overflow costs the step that it happens in, and no step after it.
"""

from __future__ import annotations

import pytest
import tensorflow as tf
from exact import S, Trained, sharing, warned
from models import compiled

from lossscale import FixedLossScale

pytestmark = [pytest.mark.compiled_once, pytest.mark.either_keras2]

MODES = ["eager", pytest.param("graph", marks=pytest.mark.slow)]
FACTORS = [0.5, 0.5, float("inf"), 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]


@pytest.fixture
def trained(family):
    return Trained(family)


def momentum(grad, state):
    """Keeps a mean of gradients, which bad ones leave as it is."""
    before = tf.zeros_like(grad) if state is None else state
    is_finite = tf.reduce_all(tf.math.is_finite(grad))
    after = tf.where(is_finite, 0.5 * before + grad, before)
    return after, after


def last_norms(grad, state):
    """Clips to the mean of the last norms, as AutoClip does."""
    norms = [*(state or []), tf.minimum(tf.norm(grad), 10.0)][-5:]
    return tf.clip_by_norm(grad, tf.reduce_mean(tf.stack(norms))), norms


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", [momentum, last_norms])
def test_an_overflow_costs_one_step(trained, change, mode):
    trained.build()

    def steps():
        state = None
        for factor in FACTORS:
            (grad,) = trained.unscaled(factor)
            grad, state = change(grad, state)
            trained.apply([grad])

    with warned(0):
        compiled(steps, mode)()
    assert trained.state() == (S / 2, len(FACTORS) - 3, 1)
    assert int(trained.optimizer.iterations.numpy()) == len(FACTORS) - 1


def clip(grad):
    return tf.clip_by_value(grad, -1.0, 1.0)


@pytest.mark.parametrize("mode", MODES)
def test_the_rest_of_a_list_is_of_the_same_step(family, mode):
    trained = Trained(family, sizes=(4, 4))
    trained.build()

    def step():
        bad, good = trained.unscaled(tf.constant([float("inf")]))[0], None
        good = trained.unscaled(0.5)[1]
        total = tf.minimum(tf.norm(bad), 1.0)
        pairs = list(zip([clip(bad), good * total], trained.variables))
        for pair in pairs:
            trained.optimizer.apply_gradients([pair])

    compiled(step, mode)()
    assert trained.subtracted() == [0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_another_optimizer_decides_for_itself(family, mode):
    """Both are clipped by one norm."""
    first, second = sharing(family)
    for each in (first, second):
        each.build()

    def step():
        bad, good = first.unscaled(float("inf"))[0], second.unscaled(0.5)[0]
        total = tf.minimum(tf.norm(tf.concat([bad, good], 0)), 1.0)
        first.apply([clip(bad)])
        second.apply([good * total])

    compiled(step, mode)()
    assert first.subtracted() == second.subtracted() == 0.0


@pytest.mark.parametrize("function", [tf.identity, tf.negative])
def test_a_division_by_hand_into_a_variable_is_told(trained, function):
    total = tf.Variable(tf.zeros([4]))
    total.assign(trained.scaled(0.5)[0] / trained.optimizer.loss_scale())
    with warned(1):
        trained.apply([function(total)])
    assert abs(trained.subtracted()) == 0.5 / S


@pytest.mark.parametrize("unscales", [False, True])
def test_elements_of_a_dataset_are_divided_by_what_multiplied_them(trained, unscales):
    elements = tf.data.Dataset.range(3).map(lambda _: trained.scaled(0.5)[0])
    with warned(0):
        for grad in elements:
            unscale = trained.optimizer.get_unscaled_gradients if unscales else list
            trained.apply(unscale([grad]))
    assert trained.subtracted() == 1.5


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
            return trained.optimizer.scale_loss(total * 0.5)

        if where == "branch":
            return tf.cond(total > -1.0, one, one)
        return tf.while_loop(
            lambda count, _: count < 1,
            lambda count, loss: (count + 1, loss + one()),
            (0, 0.0),
            maximum_iterations=1,
        )[1]

    def step():
        variables = [tf.convert_to_tensor(v) for v in trained.variables]
        with tf.GradientTape() as tape:
            tape.watch(variables)
            loss = loss_of(tf.reduce_sum(variables[0]))
        trained.apply(tape.gradient(loss, variables))

    with warned(0):
        compiled(step, mode)()
    assert trained.subtracted() == 0.5


@pytest.mark.parametrize("stops", [False, True])
def test_a_loop_over_a_dataset_that_carries_a_scaled_loss_on(trained, stops):
    """The last call of ours in the loop decides, out of a loop with a break too."""
    batches = tf.data.Dataset.from_tensor_slices([0.5, 0.25, 8.0])
    trained.build()

    @tf.function
    def step():
        gradient, loss = tf.zeros([4]), tf.constant(0.0)
        for factor in batches:
            if stops and factor > 1.0:
                break
            loss += trained.optimizer.scale_loss(factor)
            gradient += trained.unscaled(factor)[0]
        trained.apply([gradient])
        return loss

    with warned(0):
        assert float(step()) == S * (0.75 if stops else 8.75)
    assert trained.subtracted() == (0.75 if stops else 8.75)
