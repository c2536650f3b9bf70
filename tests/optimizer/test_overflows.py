"""The memory of an overflow: it costs its own step, and no step after that."""

import pytest
import tensorflow as tf
from exact import S, Trained, changes_nothing, clip, warned
from models import compiled

INF = float("inf")


# A loop is called with `Trained` and with `of`, which makes a function of its own of a
# function, or leaves it as it is. It returns a step of one factor, the true gradient.


def two_halves(ours, of):
    """Of two halves of a list, none is applied."""

    def step(factor):
        (grad,) = changes_nothing(clip(ours.unscaled(factor)))
        ours.apply([grad])
        ours.apply([grad])

    return of(step)


def a_norm_at_first(ours, of):
    """The first step unscales, and those after it do not."""
    unscaled = of(lambda factor: ours.apply(clip(ours.unscaled(factor))))
    scaled = of(lambda factor: ours.apply(changes_nothing(ours.scaled(factor))))
    return lambda factor: (unscaled if factor == INF else scaled)(factor)


def another_list(ours, of):
    """One list overflows and is counted, and the other one is still scaled."""

    def step(factor):
        bad, good = ours.scaled(factor), ours.scaled(0.5)
        ours.apply(clip(ours.optimizer.get_unscaled_gradients(bad)))
        ours.apply(good)

    return of(step)


def a_mean(ours, of):
    """All steps are in one function, and each hands a mean of gradients on."""
    factors = []

    def steps():
        mean = tf.zeros([4])
        for factor in factors:
            (grad,) = ours.unscaled(factor)
            is_finite = tf.reduce_all(tf.math.is_finite(grad))
            mean = tf.where(is_finite, 0.5 * mean + 0.5 * grad, mean)
            ours.apply([mean])

    def step(factor):
        factors.append(factor)
        if len(factors) == 5:
            of(steps)()

    return step


def grad_norm(ours, of):
    """Asks for a norm of unscaled gradients at each fourth step."""
    compute, number = of(ours.scaled), iter(range(99))

    def step(factor):
        grads = compute(factor)
        if next(number) % 4 == 3:
            tf.linalg.global_norm(ours.optimizer.get_unscaled_gradients(grads))
        ours.apply(grads)

    return step


def the_loss_scale_unscales(ours, of):
    """But the first time, the optimizer does."""
    compute, apply, change = of(ours.scaled), of(ours.apply), of(clip)
    first = ours.optimizer.get_unscaled_gradients
    then = of(ours.optimizer.loss_scale.unscale)

    def step(factor):
        unscale = first if factor == INF else then
        apply(change(unscale(compute(factor))))

    return step


def batches(ours, of):
    """Gradients are added up over three batches, each clipped."""
    total, number = tf.Variable(tf.zeros([4])), iter(range(1, 99))
    add = of(lambda factor: total.assign_add(clip(ours.unscaled(factor))[0]))
    apply = of(lambda: ours.apply([total]))

    def step(factor):
        add(factor)
        if next(number) % 3 == 0:
            apply()
            total.assign(tf.zeros([4]))

    return step


#: A loop, its factors, what they have subtracted from the weights, how many steps were
#: good since the last one that was skipped, and how many were skipped.
CASES = {
    "two halves of a list": (two_halves, [INF, 0.5], 1.0, 2, 2),
    "a norm is asked for at first": (a_norm_at_first, [INF, 0.5, 0.5], 1.0, 2, 1),
    "another list": (another_list, [INF], 0.5, 1, 1),
    "a mean": (a_mean, [0.5, INF, 0.5, 0.5, 0.5], 1.53125, 3, 1),
    "GradNorm": (grad_norm, [0.5, 0.5, 0.5, INF, *[0.5] * 7], 5.0, 7, 1),
    "the loss scale": (the_loss_scale_unscales, [INF, *[0.5] * 5], 2.5, 5, 1),
    "batches that are added up": (batches, [INF, *[0.5] * 5], 1.5, 1, 1),
}


@pytest.mark.smoke
@pytest.mark.every
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_overflow_costs_its_own_step_and_no_other_one(trained, case, mode):
    loop, factors, subtracted, good, skipped = case
    step = loop(trained, lambda function: compiled(function, mode))
    with warned(0):
        for factor in factors:
            step(tf.constant(factor))
    assert trained.subtracted() == subtracted
    assert trained.state() == (S / 2.0**skipped, good, skipped)


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_rest_of_a_list_is_of_the_same_step(family, mode):
    trained = Trained(family, sizes=(4, 4))

    def step():
        bad, good = trained.unscaled(INF)[0], trained.unscaled(0.5)[1]
        rest = good * tf.minimum(tf.norm(bad), 1.0)
        for pair in zip([*clip([bad]), rest], trained.variables):
            trained.optimizer.apply_gradients([pair])

    compiled(step, mode)()
    assert trained.subtracted() == [0.0, 0.0]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_another_optimizer_decides_for_itself(pair, mode):
    """Both are clipped by one norm."""
    first, second = pair

    def step():
        bad, good = first.unscaled(INF)[0], second.unscaled(0.5)[0]
        total = tf.minimum(tf.norm(tf.concat([bad, good], 0)), 1.0)
        first.apply(clip([bad]))
        second.apply([good * total])

    compiled(step, mode)()
    assert first.subtracted() == second.subtracted() == 0.0


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
