"""Loops that nobody here wrote: is a gradient still scaled, and whose check is it?

What was subtracted from a weight tells by what its gradient was divided, see exact.py.
All but a few programs run eagerly, too: AutoGraph's loops and branches are Python's.
Eagerly not everything can be known. Where it cannot, one warning says so.
"""

from __future__ import annotations

import copy
import functools
import gc

import numpy as np
import pytest
import tensorflow as tf
from exact import S, Trained, gradients, heard, sharing, warned
from limits import skip_without
from models import compiled, variable_of

from lossscale import DynamicLossScale, LossScaleOptimizer

NAN, INF = float("nan"), float("inf")

#: What XLA compiles is traced as a graph is. test_pending.py and test_loops.py have it.
every_mode = pytest.mark.parametrize("mode", ["eager", "graph"])
and_xla = pytest.mark.parametrize(
    "mode", ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow)]
)


@pytest.fixture
def trained(family):
    return Trained(family)


def by_norm(grads, norm=1.0):
    """Halves a gradient of four ones: their norm is 2."""
    return tf.clip_by_global_norm(grads, norm)[0]


def by_value(grads, size=4.0):
    return [tf.clip_by_value(grad, -size, size) for grad in grads]


def clipped(trained, factor):
    return by_value(trained.unscaled(factor))


def assert_trains(trained, step, each, good=1.0, bad=INF):
    """Takes a good step, one that overflows and a good one, none of which may warn.

    A good step subtracts `each`. The overflow counts once, and is skipped.
    """
    with warned(0):
        for factor, times in ((good, 1), (bad, 1), (good, 2)):
            step(tf.constant(factor))
            assert np.array_equal(trained.subtracted(), np.multiply(times, each))
    assert trained.state() == (S / 2, 1, 1)


#: In both kinds of loops.
gets = pytest.mark.parametrize("get", [Trained.scaled, clipped])

# Accumulation: gradients that were made in a loop, or in the branches of a tensor `if`.


def in_a_for(get, factors, size=4):
    total = tf.zeros([size])
    for i in tf.range(tf.size(factors)):
        total += get(factors[i])[0]
    return [total]


def in_both_branches(get, factors):
    if factors[0] > factors[1]:
        grads = get(tf.reduce_sum(factors))
    else:
        grads = get(factors[0] + factors[1] + factors[2])
    return grads


collections = pytest.mark.parametrize("collect", [in_a_for, in_both_branches])
SMALL = [0.25, 0.25, 0.5]


@and_xla
@collections
@pytest.mark.parametrize(
    ("get", "unscales", "change", "expected"),
    [
        (Trained.unscaled, False, by_norm, 0.5),
        (Trained.scaled, False, list, 1.0),
        (Trained.scaled, True, by_norm, 0.5),
        # Only the state on the device knows of what overflowed, and was clipped there.
        (clipped, False, list, 1.0),
    ],
    ids=["clipped", "scaled", "unscaled after", "clipped within"],
)
def test_made_in_a_loop_or_branches(
    trained, collect, get, unscales, change, expected, mode
):
    def step(factors):
        grads = collect(functools.partial(get, trained), factors)
        if unscales:
            grads = trained.optimizer.get_unscaled_gradients(grads)
        trained.apply(change(grads))

    step = compiled(step, mode)
    with warned(0):
        step(tf.constant(SMALL))
        assert trained.subtracted() == expected
        for bad in ([INF, 0.25, 0.5], [0.25, INF, 0.5], [0.25, 0.25, INF]):
            before, _, skipped = trained.state()
            step(tf.constant(bad))
            assert trained.subtracted() == expected
            assert trained.state() == (before / 2, 0, skipped + 1)
        step(tf.constant(SMALL))
        assert trained.subtracted() == 2 * expected
        assert trained.state() == (S / 8, 1, 3)


# Gradients that are looked at, or dropped, and not applied.


@every_mode
@pytest.mark.parametrize("change", [list, by_value])
def test_bad_batches_are_dropped_in_a_loop(trained, change, mode):
    """Each step after one of them is skipped, too: the loss scale has to fall."""

    def steps(factors):
        for i in tf.range(tf.size(factors)):
            grads = trained.unscaled(factors[i])
            if tf.math.is_finite(tf.linalg.global_norm(grads)):
                trained.apply(change(grads))

    with warned(0):
        compiled(steps, mode)(tf.constant([0.25, NAN, INF, 0.5, 1.0, NAN, 1.0]))
    assert trained.subtracted() == 1.25
    assert trained.state() == (S / 4, 0, 2)


# Branches.


@and_xla
def test_one_branch_clips_and_the_other_does_not(trained, mode):
    def step(factor, flag):
        grads = trained.scaled(factor)
        if flag:
            trained.apply(by_norm(trained.optimizer.get_unscaled_gradients(grads)))
        else:
            trained.apply(grads)

    runs = [(1.0, False, 1.0), (1.0, True, 1.5), (1.0, False, 2.5)]
    runs += [(INF, True, 2.5), (INF, False, 2.5), (1.0, True, 3.0)]
    step = compiled(step, mode)
    with warned(0):
        for factor, flag, expected in runs:
            step(tf.constant(factor), tf.constant(flag))
            assert trained.subtracted() == expected
    assert trained.state() == (S / 4, 1, 2)


# Several lists of gradients of one loss, and several optimizers with one loss scale.

UNSCALED, APPLIED, AS_IT_CAME, BOTH = "unscale a", "apply a", "apply b", "apply both"


@pytest.mark.parametrize(
    ("order", "mode"),
    [
        ((UNSCALED, APPLIED, AS_IT_CAME), "eager"),
        ((UNSCALED, APPLIED, AS_IT_CAME), "graph"),
        ((AS_IT_CAME, UNSCALED, APPLIED), "eager"),
        ((AS_IT_CAME, UNSCALED, APPLIED), "graph"),
        # Eagerly what came, applied before the unscaled list, may be that one, changed.
        ((UNSCALED, AS_IT_CAME, APPLIED), "graph"),
        ((UNSCALED, BOTH), "graph"),
    ],
)
def test_one_list_is_unscaled_and_the_other_is_not(family, order, mode):
    trained = Trained(family, sizes=(4, 9))
    optimizer, (first, second) = trained.optimizer, trained.variables
    trained.build()

    def step(factor):
        one, two = trained.scaled(factor)
        for what in order:
            if what == UNSCALED:
                (one,) = optimizer.get_unscaled_gradients([one])
            elif what == APPLIED:
                optimizer.apply_gradients(zip(by_norm([one]), [first]))
            elif what == AS_IT_CAME:
                optimizer.apply_gradients([(two, second)])
            else:
                trained.apply([*by_norm([one]), two])

    step = compiled(step, mode)
    with warned(0):
        for times in (1, 2):
            step(tf.constant(1.0))
            assert trained.subtracted() == [times * 0.5, times * 1.0]
        step(tf.constant(INF))
    assert trained.subtracted() == [1.0, 2.0]
    assert trained.state()[2] == order.count(APPLIED) + 1


# Other functions, and other ways to multiply a loss.


@pytest.mark.peer_defect(8)
@pytest.mark.parametrize("differentiates", ["eager", "graph"])
def test_apply_is_traced_before_anything_was_scaled(family, differentiates):
    """Its gradients are arguments: what Keras's own `apply` does is done.

    It warns, since most programs that get here have forgotten to scale the loss.
    """
    trained = Trained(family)
    trained.build()
    apply = tf.function(lambda grad: trained.apply([grad]))
    with heard() as told:
        for _ in range(2):
            apply(tf.fill([4], 0.5))
    (message,) = told
    assert "# <- add" in message
    before = 1.0 / S if family.name == "keras3" else 1.0
    assert trained.subtracted() == before
    get = trained.scaled if family.name == "keras3" else trained.unscaled
    differentiate = compiled(lambda factor: get(factor)[0], differentiates)
    for times in (1, 2):
        apply(differentiate(tf.constant(0.5)))
        assert trained.subtracted() == before + times * 0.5
    good = trained.state()[1]
    apply(differentiate(tf.constant(INF)))
    assert trained.subtracted() == before + 1.0
    assert (good, *trained.state()) == (4, S / 2, 0, 1)


def by_hand(divide):
    def divide_all(grads, optimizer):
        return [divide(grad, optimizer.loss_scale) for grad in grads]

    return divide_all


#: How a list of gradients is divided by S. None: by `apply_gradients`.
DIVISIONS = {
    "by apply": None,
    "get_unscaled_gradients": lambda grads, by: by.get_unscaled_gradients(grads),
    "LossScale.unscale": lambda grads, by: by.loss_scale.unscale(grads),
    "quotient": by_hand(lambda grad, scale: grad / scale),
    "of its value": by_hand(lambda grad, scale: grad / scale()),
    "reciprocal": by_hand(lambda grad, scale: grad * (1.0 / scale)),
    "power": by_hand(lambda grad, scale: grad * scale**-1),
    "of a maximum": by_hand(lambda grad, scale: grad / tf.maximum(scale, 1.0)),
    "of the variable": by_hand(lambda grad, scale: grad / scale.current_loss_scale),
}


@every_mode
@pytest.mark.parametrize("multiplies", [True, False], ids=["product", "scale"])
@pytest.mark.parametrize("divide", DIVISIONS.values(), ids=DIVISIONS)
def test_other_ways_to_multiply_and_to_divide(trained, multiplies, divide, mode):
    loss_scale = trained.optimizer.loss_scale

    def scale(loss):
        return loss * loss_scale if multiplies else loss_scale.scale(loss)

    def step(factor):
        grads = gradients(scale, factor, trained.variables)
        if divide is not None:
            grads = by_norm(divide(grads, trained.optimizer))
        trained.apply(grads)

    each = 1.0 if divide is None else 0.5
    assert_trains(trained, compiled(step, mode), each)


# One loss scale for two optimizers: its state.


@pytest.mark.parametrize("factor", [0.5, INF])
def test_a_checkpoint_that_is_restored_between_two_applies_stays(
    family, tmp_path, factor
):
    first, second = sharing(family)
    loss_scale = first.optimizer.loss_scale
    loss_scale.current_loss_scale.assign(4096.0)
    loss_scale.good_steps.assign(5)
    checkpoint = tf.train.Checkpoint(loss_scale=loss_scale)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    loss_scale.current_loss_scale.assign(S)
    loss_scale.good_steps.assign(0)
    for trained in (first, second, first):
        trained.apply(trained.scaled(tf.constant(0.5)))
    checkpoint.read(path).assert_consumed()
    second.apply(second.scaled(tf.constant(factor)))
    good = (4096.0, 6, 0)
    assert first.state() == (good if factor == 0.5 else (2048.0, 0, 1))


@every_mode
@gets
@pytest.mark.parametrize("first_leads", [True, False], ids=["D first", "G first"])
@pytest.mark.parametrize("scaled_within", [True, False], ids=["within", "outside"])
def test_one_of_two_is_trained_now_and_then(
    family, get, first_leads, scaled_within, mode
):
    first, second = sharing(family)

    def train_second(factor, now):
        grads = None if scaled_within else get(second, factor)
        if now:
            second.apply(get(second, factor) if scaled_within else grads)

    def step(factors, now):
        if not first_leads:
            train_second(factors[1], now)
        first.apply(get(first, factors[0]))
        if first_leads:
            train_second(factors[1], now)

    # Eagerly, the second one may have been trained after the first one's last step.
    is_told = mode != "eager" or first_leads
    step = compiled(step, mode)
    with warned(0):
        for number in range(3):
            step(tf.constant([0.25, 0.5]), tf.constant(number == 2))
            assert first.state() == (S, number + 1, 0)
        assert (first.subtracted(), second.subtracted()) == (0.75, 0.5)
        step(tf.constant([0.25, INF]), tf.constant(True))
        assert first.state() == (S / 2, int(not is_told), 1)
        step(tf.constant([INF, 0.5]), tf.constant(False))
        assert first.state() == (S / 4, 0, 2)
        step(tf.constant([0.25, 0.5]), tf.constant(False))
        assert first.state() == (S / 4, 1, 2)
        if is_told:
            step(tf.constant([INF, INF]), tf.constant(True))
            assert first.state() == (S / 8, 0, 3)


# What is handed over.


@pytest.mark.every
@every_mode
def test_an_inner_optimizer_that_was_built_before(family, mode):
    if family.name != "keras3":
        pytest.skip("Keras 3's apply")
    trained = Trained(family)
    inner = family.optimizers.SGD(1.0)
    inner.build(trained.variables)
    trained.optimizer = LossScaleOptimizer(inner, DynamicLossScale(S, 1000))

    def step(factor):
        trained.optimizer.apply(clipped(trained, factor))

    assert_trains(trained, compiled(step, mode), each=1.0)


# Copies, and bounds.


def test_copies_of_two_that_share_do_share(family):
    skip_without("copying", family)
    first, second = sharing(family)
    for trained in (first, second):
        trained.apply(trained.scaled(tf.constant(0.5)))
    copies_of_two = copy.deepcopy((first, second))
    scales = [each.optimizer.loss_scale for each in copies_of_two]
    assert scales[0] is scales[1] is not first.optimizer.loss_scale
    assert copies_of_two[0].state() == (S, 1, 0)
    for factor, state in ((0.5, (S, 2, 0)), (INF, (S / 2, 0, 1))):
        for each in copies_of_two:
            each.variables = [variable_of(family, np.ones([8], np.float32))]
            each.optimizer.inner_optimizer.build(each.variables)
            each.apply(each.scaled(tf.constant(factor)))
        assert copies_of_two[0].state() == state
    assert first.state() == (S, 1, 0)


@pytest.mark.slow
def test_nothing_grows_with_the_steps(trained):
    """Of all that is remembered there is a bound."""

    def once():
        trained.scaled(tf.constant(2.0**-20))  # and never applied
        grads = trained.unscaled(tf.constant(2.0**-20))
        inner = trained.optimizer.inner_optimizer
        inner.apply_gradients(zip(grads, trained.variables))
        trained.unscaled(tf.constant(NAN))  # and dropped
        trained.optimizer.get_unscaled_gradients([tf.zeros([4])])

    def count():
        gc.collect()
        return len(gc.get_objects())

    for _ in range(20):
        once()
    before = count()
    for _ in range(100):
        once()
    assert count() - before < 100
