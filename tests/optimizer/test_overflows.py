"""The memory of an overflow: it costs its own step, and no step after that."""

from __future__ import annotations

import pytest
import tensorflow as tf
from exact import S, Trained, changes_nothing, clip, warned
from models import compiled

INF = float("inf")
MODES = ["eager", "graph"]
#: The slow tests have graphs of what a loop carries on in Python.
IN_PYTHON = ["eager", pytest.param("graph", marks=pytest.mark.slow)]
FACTORS = [0.5, 0.5, INF, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]


@pytest.mark.smoke
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


@pytest.mark.parametrize("mode", ["graph", pytest.param("xla", marks=pytest.mark.slow)])
def test_functions_that_apply_parts_of_a_list_count_its_overflow_in_each(family, mode):
    """The first function counts it, and the next one sees only the state of the step.

    One function unscales and clips, so what the others are given is of no kind.
    """
    trained = Trained(family, sizes=(1, 1))
    trained.build()
    compute = compiled(lambda factor: clip(trained.unscaled(factor)), mode)

    def applying(variable):
        def apply_part(grad):
            trained.optimizer.apply_gradients([(grad, variable)])

        return compiled(apply_part, mode)

    functions = list(map(applying, trained.variables))
    with warned(0):
        for factor, left in ((0.5, 0.5), (INF, 0.5), (0.5, 1.0)):
            for apply_part, grad in zip(functions, compute(tf.constant(factor))):
                apply_part(grad)
            assert trained.subtracted() == [left, left]


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


@pytest.mark.parametrize("mode", MODES)
def test_an_overflow_that_was_counted_is_not_of_gradients_still_scaled(trained, mode):
    def step():
        bad, good = trained.scaled(INF), trained.scaled(0.5)
        trained.apply(clip(trained.optimizer.get_unscaled_gradients(bad)))
        trained.apply(good)

    compiled(step, mode)()
    assert trained.subtracted() == 0.5


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


@pytest.mark.parametrize("mode", IN_PYTHON)
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


@pytest.mark.smoke
@pytest.mark.parametrize("mode", IN_PYTHON)
def test_the_rest_of_a_list_is_of_the_same_step(family, mode):
    trained = Trained(family, sizes=(4, 4))
    trained.build()

    def step():
        bad, good = trained.unscaled(INF)[0], trained.unscaled(0.5)[1]
        total = tf.minimum(tf.norm(bad), 1.0)
        pairs = list(zip([clip([bad])[0], good * total], trained.variables))
        for pair in pairs:
            trained.optimizer.apply_gradients([pair])

    compiled(step, mode)()
    assert trained.subtracted() == [0.0, 0.0]


@pytest.mark.parametrize("mode", IN_PYTHON)
def test_another_optimizer_decides_for_itself(pair, mode):
    """Both are clipped by one norm."""
    first, second = pair

    def step():
        bad, good = first.unscaled(INF)[0], second.unscaled(0.5)[0]
        total = tf.minimum(tf.norm(tf.concat([bad, good], 0)), 1.0)
        first.apply([clip([bad])[0]])
        second.apply([good * total])

    compiled(step, mode)()
    assert first.subtracted() == second.subtracted() == 0.0


def test_a_norm_is_asked_now_and_then(trained):
    """As GradNorm does. The overflow counts at once, and in no step after it."""
    compute = tf.function(trained.scaled)
    with warned(0):
        for number in range(11):
            grads = compute(tf.constant(INF if number == 3 else 0.5))
            if number % 4 == 3:
                unscaled = trained.optimizer.get_unscaled_gradients(grads)
                tf.linalg.global_norm(unscaled)
            trained.apply(grads)
    assert trained.subtracted() == 5.0
    assert trained.state() == (S / 2, 7, 1)


@pytest.mark.parametrize("apart", [False, True])
def test_the_loss_scale_unscales_after_an_overflow_was_counted(trained, apart):
    compute, apply = tf.function(trained.scaled), tf.function(trained.apply)
    change = tf.function(clip)
    unscale = trained.optimizer.loss_scale.unscale
    unscale = tf.function(unscale) if apart else unscale
    bad = compute(tf.constant(INF))
    with warned(0):
        apply(change(trained.optimizer.get_unscaled_gradients(bad)))
        for _ in range(11):
            apply(change(unscale(compute(tf.constant(0.5)))))
    assert trained.subtracted() == 5.5
    assert trained.state() == (S / 2, 11, 1)


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_an_overflow_waits_over_any_number_of_losses(trained, mode):
    """Gradients are added up over batches, each clipped."""
    total = tf.Variable(tf.zeros([4]))
    add = compiled(
        lambda factor: total.assign_add(clip(trained.unscaled(factor))[0]), mode
    )
    apply = compiled(lambda: trained.apply([total]), mode)
    with warned(0):
        for factors in ((INF, 0.5, 0.5), (0.5, 0.5, 0.5)):
            for factor in factors:
                add(tf.constant(factor))
            apply()
            total.assign(tf.zeros([4]))
    assert trained.subtracted() == 1.5
    assert trained.state() == (S / 2, 1, 1)


def test_an_overflow_of_what_two_scaled_counts_for_both(pair):
    a, b = pair

    @tf.function
    def compute(of_a, of_b):
        grads = [*a.scaled(of_a), *b.scaled(of_b)]
        return clip(a.optimizer.get_unscaled_gradients(grads))

    for factors in ((0.5, INF), (0.5, 0.5)):
        of_a, of_b = compute(*map(tf.constant, factors))
        a.apply([of_a])
        b.apply([of_b])
    assert a.subtracted() == b.subtracted() == 0.5
