"""Loops that nobody here wrote: is a gradient still scaled, and whose check is it?

What was subtracted from a weight tells by what its gradient was divided, see exact.py.
No loop here may be warned of, unless its test says so.
"""

import copy
import gc

import numpy as np
import pytest
import tensorflow as tf
from exact import S, Trained, heard, sharing, warned
from limits import skip_without
from models import variable_of

NAN, INF = float("nan"), float("inf")


def by_norm(grads):
    """Halves a gradient of four ones: their norm is 2."""
    return tf.clip_by_global_norm(grads, 1.0)[0]


def by_value(grads):
    return [tf.clip_by_value(grad, -4.0, 4.0) for grad in grads]


def clipped(trained, factor):
    return by_value(trained.unscaled(factor))


# `get` makes gradients. AutoGraph makes loops and branches of these.


def in_a_for(get, factors):
    total = tf.zeros([4])
    for i in tf.range(tf.size(factors)):
        total += get(factors[i])[0]
    return [total]


def in_both_branches(get, factors):
    if factors[0] > factors[1]:
        grads = get(tf.reduce_sum(factors))
    else:
        grads = get(factors[0] + factors[1] + factors[2])
    return grads


@pytest.mark.parametrize("collect", [in_a_for, in_both_branches])
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
def test_gradients_may_be_made_in_a_loop_or_in_branches(
    trained, collect, get, unscales, change, expected
):
    @tf.function
    def step(factors):
        grads = collect(lambda factor: get(trained, factor), factors)
        if unscales:
            grads = trained.optimizer.get_unscaled_gradients(grads)
        trained.apply(change(grads))

    with warned(0):
        step(tf.constant([0.25, 0.25, 0.5]))
        for skipped in (1, 2, 3):
            step(tf.constant(np.insert([0.25, 0.5], skipped - 1, INF), tf.float32))
            assert trained.subtracted() == expected
            assert trained.state() == (S / 2**skipped, 0, skipped)
        step(tf.constant([0.25, 0.25, 0.5]))
        assert trained.subtracted() == 2 * expected
        assert trained.state() == (S / 8, 1, 3)


@pytest.mark.parametrize("change", [list, by_value])
def test_bad_batches_are_dropped_in_a_loop(trained, change):
    """Each step after one of them is skipped, too: the loss scale has to fall."""

    @tf.function
    def steps(factors):
        for i in tf.range(tf.size(factors)):
            grads = trained.unscaled(factors[i])
            if tf.math.is_finite(tf.linalg.global_norm(grads)):
                trained.apply(change(grads))

    with warned(0):
        steps(tf.constant([0.25, NAN, INF, 0.5, 1.0, NAN, 1.0]))
    assert trained.subtracted() == 1.25
    assert trained.state() == (S / 4, 0, 2)


UNSCALED, APPLIED, AS_IT_CAME, BOTH = "unscale a", "apply a", "apply b", "apply both"


@pytest.mark.parametrize(
    "order",
    [
        (UNSCALED, APPLIED, AS_IT_CAME),
        (AS_IT_CAME, UNSCALED, APPLIED),
        (UNSCALED, AS_IT_CAME, APPLIED),
        (UNSCALED, BOTH),
    ],
    ids=", ".join,
)
def test_one_list_of_a_loss_is_unscaled_and_the_other_is_not(family, order):
    trained = Trained(family, sizes=(4, 9))
    optimizer, (first, second) = trained.optimizer, trained.variables

    @tf.function
    def step(factor):
        one, two = trained.scaled(factor)
        for what in order:
            if what == UNSCALED:
                (one,) = by_norm(optimizer.get_unscaled_gradients([one]))
            elif what == APPLIED:
                optimizer.apply_gradients([(one, first)])
            elif what == AS_IT_CAME:
                optimizer.apply_gradients([(two, second)])
            else:
                trained.apply([one, two])

    with warned(0):
        for factor, left in ((1.0, [0.5, 1.0]), (1.0, [1.0, 2.0]), (INF, [1.0, 2.0])):
            step(tf.constant(factor))
            assert trained.subtracted() == left
    assert trained.state()[2] == order.count(APPLIED) + 1


def test_the_fault_of_a_list_is_not_told_of_a_variable_of_another_one(family):
    trained = Trained(family, sizes=(4, 4))

    @tf.function
    def step():
        one, two = trained.scaled(0.5)
        first, _ = trained.optimizer.get_unscaled_gradients([one, INF * two])
        _, second = trained.unscaled(0.5)
        trained.apply([first, second])

    step()
    assert trained.subtracted() == [0.0, 0.0]
    assert trained.optimizer.nonfinite_gradients() == []


@pytest.mark.peer_defect(8)
def test_apply_is_traced_before_anything_was_scaled(family, trained):
    """Its gradients are arguments: what Keras's own `apply` does is done.

    It warns, since most programs that get here have forgotten to scale the loss.
    """
    apply = tf.function(lambda grad: trained.apply([grad]))
    with heard() as told:
        for _ in range(2):
            apply(tf.fill([4], 0.5))
    (message,) = told
    assert "# <- add" in message
    before = 1.0 / S if family.name == "keras3" else 1.0
    assert trained.subtracted() == before
    get = trained.scaled if family.name == "keras3" else trained.unscaled
    differentiate = tf.function(lambda factor: get(factor)[0])
    for factor, left, state in ((0.5, 0.5, (S, 3, 0)), (INF, 0.5, (S / 2, 0, 1))):
        apply(differentiate(tf.constant(factor)))
        assert trained.subtracted() == before + left
        assert trained.state() == state


# One loss scale for two optimizers: its state.


@pytest.mark.parametrize("factor", [0.5, INF])
def test_a_checkpoint_that_is_restored_between_two_applies_stays(
    pair, tmp_path, factor
):
    first, second = pair
    scale = first.optimizer.loss_scale
    scale.current_loss_scale.assign(4096.0)
    scale.good_steps.assign(5)
    checkpoint = tf.train.Checkpoint(loss_scale=scale)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    scale.current_loss_scale.assign(S)
    scale.good_steps.assign(0)
    for trained in (first, second, first):
        trained.apply(trained.scaled(tf.constant(0.5)))
    checkpoint.read(path).assert_consumed()
    second.apply(second.scaled(tf.constant(factor)))
    good = (4096.0, 6, 0)
    assert first.state() == (good if factor == 0.5 else (2048.0, 0, 1))


def test_copies_of_two_that_share_do_share(family):
    skip_without("copying", family)
    pair = sharing(family)
    for trained in pair:
        trained.apply(trained.scaled(tf.constant(0.5)))
    copies = copy.deepcopy(pair)
    scales = [each.optimizer.loss_scale for each in copies]
    assert scales[0] is scales[1] is not pair[0].optimizer.loss_scale
    assert copies[0].state() == (S, 1, 0)
    for factor, state in ((0.5, (S, 2, 0)), (INF, (S / 2, 0, 1))):
        for each in copies:
            each.variables = [variable_of(family, np.ones([8], np.float32))]
            each.optimizer.inner_optimizer.build(each.variables)
            each.apply(each.scaled(tf.constant(factor)))
        assert copies[0].state() == state
    assert pair[0].state() == (S, 1, 0)


@pytest.mark.slow
def test_nothing_grows_with_the_steps(trained):
    """Of all that is remembered there is a bound."""

    def objects_after(times):
        for _ in range(times):
            trained.scaled(tf.constant(2.0**-20))  # and never applied
            grads = trained.unscaled(tf.constant(2.0**-20))
            inner = trained.optimizer.inner_optimizer
            inner.apply_gradients(zip(grads, trained.variables))
            trained.unscaled(tf.constant(NAN))  # and dropped
            trained.optimizer.get_unscaled_gradients([tf.zeros([4])])
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(20)
    assert objects_after(100) - before < 100
