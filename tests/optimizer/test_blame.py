"""Which loss is at fault of a bad step, and that no loss scale is held up for ever.

Each of the first five programs once held a loss scale up for ever. What a random
program does, `blamed.py` says. A seed that fails is in the message.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from blamed import offence
from installed import families
from models import compiled, variable_of
from strategies import last_replica_gets, scope_of

from lossscale import DynamicLossScale, LossScaleOptimizer

INF, NAN = float("inf"), float("nan")
MODES = ["eager", "graph", "xla"]
XLA_LATER = ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow)]
#: The gradients of four float16 weights, ones, are finite up to 2**15.
START, FITS = 2.0**20, 2.0**15


def wrapped(family, scale, how="skip"):
    """Returns an optimizer with four weights, and what a tape knows of them."""
    optimizer = LossScaleOptimizer(
        family.optimizers.SGD(2.0**-10), scale, nonfinite_loss=how
    )
    variable = variable_of(family, np.ones([4]), "float16")
    optimizer.build([variable])
    optimizer.iterations  # noqa: B018 - Keras 2 makes it when it is asked for
    return optimizer, variable


def scaled(optimizer, variable, factor=1.0):
    """Returns the gradients of a loss that is as bad as a factor of its value.

    They overflow while the loss scale is larger than `FITS`.
    """
    tensor = getattr(variable, "value", variable) if is_keras3(variable) else variable
    with tf.GradientTape() as tape:
        total = tf.cast(tf.reduce_sum(tensor), tf.float32)
        loss = optimizer.scale_loss(total * factor)
    return tape.gradient(loss, [tensor])


def is_keras3(variable):
    return not isinstance(variable, tf.Variable)


def apply(optimizer, variable, grads):
    optimizer.apply_gradients(list(zip(grads, [variable])))


def applied(optimizer):
    return int(optimizer.applied_steps.numpy())


@pytest.mark.smoke
def test_a_loss_of_an_eager_step_is_no_later_steps(family):
    """`run_functions_eagerly` for one batch, then a function and an eager apply."""
    optimizer, variable = wrapped(family, DynamicLossScale(START))
    gradients = tf.function(lambda factor: scaled(optimizer, variable, factor))
    apply(optimizer, variable, scaled(optimizer, variable, NAN))
    assert float(optimizer.loss_scale) == START
    assert optimizer.nonfinite_loss() == "nan"
    for _ in range(8):
        apply(optimizer, variable, gradients(tf.constant(1.0)))
    assert (float(optimizer.loss_scale), applied(optimizer)) == (FITS, 3)
    assert optimizer.nonfinite_loss() is None


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["skip", "backoff"])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_was_dropped_is_at_fault_of_nothing(family, mode, how):
    optimizer, variable = wrapped(family, DynamicLossScale(START), how)

    def step(factor):
        scaled(optimizer, variable, factor)  # and dropped
        apply(optimizer, variable, scaled(optimizer, variable))

    step = compiled(step, mode)
    for _ in range(8):
        step(tf.constant(NAN))
    assert (float(optimizer.loss_scale), applied(optimizer)) == (FITS, 3)
    assert optimizer.nonfinite_loss() is None


@pytest.mark.parametrize("mode", [*XLA_LATER, "mirrored"])
def test_another_optimizers_bad_loss_is_its_own(family, mode, request):
    mirrored = request.getfixturevalue("mirrored") if mode == "mirrored" else None
    with scope_of(mirrored):
        scale = DynamicLossScale(START)
        (first, x), (second, y) = (wrapped(family, scale) for _ in range(2))

    def step(factor):
        if mirrored:
            factor = last_replica_gets(factor, 1.0)
        grads, others = scaled(first, x, factor), scaled(second, y)
        apply(first, x, grads)
        apply(second, y, others)

    if mirrored:
        run = tf.function(lambda factor: mirrored.run(step, (factor,)))
    else:
        run = compiled(step, mode)
    for _ in range(8):
        run(tf.constant(NAN))
    assert (float(scale), applied(first), applied(second)) == (FITS, 0, 3)
    assert first.nonfinite_loss() == "nan"
    assert second.nonfinite_loss() is None
    run(tf.constant(NAN))  # nothing overflows now: the rule is told nothing
    assert float(scale) == FITS


def test_a_loss_within_a_branch_is_not_known_outside(family):
    optimizer, variable = wrapped(family, DynamicLossScale(START))

    @tf.function
    def step(factor, is_on):
        first = scaled(optimizer, variable, factor)
        apply(optimizer, variable, first)
        second = tf.cond(
            is_on,
            lambda: scaled(optimizer, variable),
            lambda: [tf.identity(each) for each in first],
        )
        apply(optimizer, variable, second)

    for _ in range(8):
        step(tf.constant(NAN), tf.constant(True))
    assert (float(optimizer.loss_scale), applied(optimizer)) == (FITS, 3)


@pytest.mark.parametrize("mode", XLA_LATER)
def test_rows_that_are_masked_later_do_not_stick(family, mode):
    """The loss that was scaled is infinite on purpose, at every step."""
    optimizer, variable = wrapped(family, DynamicLossScale(START))
    tensor = variable.value if is_keras3(variable) else variable

    def step(rows):
        with tf.GradientTape() as tape:
            each = 2.0 * tf.cast(tf.reduce_sum(tensor), tf.float32) + rows
            each = optimizer.scale_loss(each)
            loss = tf.reduce_mean(tf.where(tf.math.is_finite(rows), each, 0.0))
        grads = tape.gradient(loss, [tensor])
        apply(optimizer, variable, grads)

    step = compiled(step, mode)
    for number in range(1, 52):
        step(tf.constant([0.0, INF]))
        assert float(optimizer.loss_scale) == START / 2.0 ** min(number // 10, 5)
    assert applied(optimizer) == 1


# Of ten in a row at most nine are ignored


@pytest.mark.parametrize(
    "mode", [*XLA_LATER, pytest.param("mirrored", marks=pytest.mark.slow)]
)
def test_the_tenth_in_a_row_counts(family, mode, request):
    """A burst of nine is forgotten after 36 steps that were applied."""
    mirrored = request.getfixturevalue("mirrored") if mode == "mirrored" else None
    with scope_of(mirrored):
        optimizer, variable = wrapped(family, DynamicLossScale(FITS))

    def step(factor):
        factor = last_replica_gets(factor, 1.0) if mirrored else factor
        apply(optimizer, variable, scaled(optimizer, variable, factor))

    if mirrored:
        run = tf.function(lambda factor: mirrored.run(step, (factor,)))
    else:
        run = compiled(step, mode)
    for bad, good, halved in ((9, 36, 0), (9, 36, 0), (10, 1, 1), (20, 1, 3)):
        for _ in range(bad):
            run(tf.constant(NAN))
        assert optimizer.nonfinite_loss() == "nan"
        for _ in range(good):
            run(tf.constant(1.0))
        assert float(optimizer.loss_scale) == FITS / 2.0**halved
    assert applied(optimizer) == 74


def test_many_bad_losses_in_a_session():
    legacy = [each for each in families() if each.name == "keras2-legacy"]
    if not legacy:
        pytest.skip("no others take a step in a session")
    family = legacy[0]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        inner, scale = family.optimizers.SGD(0.5), DynamicLossScale(FITS)
        optimizer = LossScaleOptimizer(inner, scale, nonfinite_loss="skip")
        weight = tf.Variable([1.0])
        factor = tf.compat.v1.placeholder(tf.float32, [])
        loss = optimizer.scale_loss(tf.reduce_sum(weight) * factor)
        (grad,) = tf.compat.v1.gradients(loss, weight)
        done, value = optimizer.apply_gradients([(grad, weight)]), scale()
        session.run(tf.compat.v1.global_variables_initializer())
        run = [NAN] * 10 + [1.0, NAN] * 13 + [NAN]
        for number, given in enumerate(run, 1):
            session.run(done, {factor: given})
            counted = (number > 9) + (number > 35)  # the last of the 13, too
            assert session.run(value) == FITS / 2.0**counted


@pytest.mark.parametrize("mode", XLA_LATER)
def test_an_overflow_between_bad_losses_takes_nothing_from_their_level(family, mode):
    """Steps that were applied before the overflow lower the level, too."""
    optimizer, variable = wrapped(family, DynamicLossScale(FITS, 10**6))

    def step(factor, size):
        grads = [grad * size for grad in scaled(optimizer, variable, factor)]
        apply(optimizer, variable, grads)

    step = compiled(step, mode)
    bad, good, overflow = (NAN, 1.0), (1.0, 1.0), (1.0, INF)
    # The level is 36, 36 - 8, and after two more 36: only a third one counts.
    for factor, size in [bad] * 9 + [good] * 8 + [overflow] + [bad] * 2:
        step(tf.constant(factor), tf.constant(size, tf.float16))
    assert float(optimizer.loss_scale) == FITS / 2
    step(*(tf.constant(bad[0]), tf.constant(bad[1], tf.float16)))
    assert float(optimizer.loss_scale) == FITS / 4


# Random programs


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 38), marks=pytest.mark.slow)]
)
def test_a_loss_scale_is_lowered_by_what_an_oracle_says(seeds):
    every = families()
    found = [offence(every[seed % len(every)], seed) for seed in seeds]
    assert not any(found), "\n".join(filter(None, found))
