"""Eager mode: what is kept of it, and that nobody else is disturbed."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from exact import S, Trained, warned
from tensorflow.python.framework import op_callbacks

from lossscale.runtime import callbacks
from lossscale.runtime.bodies import Definition
from lossscale.units import eager
from lossscale.units.unit import KEPT, UNKNOWN


@pytest.fixture
def trained(family):
    return Trained(family)


def tracker_of(trained):
    return trained.optimizer._provenance.history.values._tracker


def unit_of(trained, tensor):
    return trained.optimizer._provenance.history.values.units([tensor])[0]


def test_units_are_bounded_and_no_gradient_is_kept(trained, monkeypatch):
    monkeypatch.setattr(eager, "_UNITS", 64)
    trained.scaled(1.0)
    for applies in (False, True):
        for _ in range(30):
            grads = trained.unscaled(0.0)
            if applies:
                trained.apply(grads)
        tracker = tracker_of(trained)
        assert len(tracker._new) <= 64
        assert len(tracker._old) <= 64
    alive = weakref.ref(grads[0])
    del grads
    gc.collect()
    assert alive() is None


def test_variables_that_are_held_are_bounded(monkeypatch):
    monkeypatch.setattr(eager, "_VARIABLES", 8)
    tracker = eager.Tracker(lambda _: None, lambda: None)
    for number in range(20):
        tracker._held[number] = KEPT
    assert list(tracker._held) == list(range(12, 20))


def test_what_was_forgotten_is_not_known_and_not_wrong(trained, monkeypatch):
    monkeypatch.setattr(eager, "_UNITS", 16)
    (grad,) = trained.scaled(1.0)
    assert unit_of(trained, grad).low == 1.0
    for _ in range(5):
        trained.scaled(1.0)
    assert unit_of(trained, grad) is UNKNOWN


def heard(function):
    """Returns the kinds of operations that another callback is told of."""
    kinds = []

    def listen(kind, inputs, attrs, outputs, op_name=None, graph=None):  # noqa: ARG001
        kinds.append(kind)
        assert graph is None or outputs is not None
        return outputs

    op_callbacks.add_op_callback(listen)
    try:
        function()
    finally:
        op_callbacks.remove_op_callback(listen)
    return kinds


@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_callbacks_of_others_go_on(trained, order):
    if order == "ours first":
        trained.scaled(1.0)

    def step():
        tf.function(lambda x: x * 2.0)(tf.constant(1.0))
        trained.apply(trained.scaled(0.5))

    with warned(0):
        kinds = heard(step)
    assert {"Mul", "ReadVariableOp"} <= set(kinds)
    assert trained.subtracted() == 0.5
    with warned(0):
        trained.apply(trained.unscaled(0.5))
    assert trained.subtracted() == 1.0


def test_nobody_listens_once_nothing_is_scaled_any_more(trained, monkeypatch):
    nobody_listens()
    trained.scaled(1.0)
    assert callbacks.is_telling()
    monkeypatch.setattr(eager, "_IDLE", 10)
    compute(20)
    assert not callbacks.is_telling()
    assert tracker_of(trained)._here.silent == 0
    with warned(0):
        trained.apply(trained.scaled(0.5))
    assert trained.subtracted() == 0.5


def test_one_that_is_idle_leaves_another_listening(family, monkeypatch):
    nobody_listens()
    idle, trained = Trained(family), Trained(family)
    idle.scaled(1.0)
    monkeypatch.setattr(eager, "_IDLE", 100)
    compute(90)
    (grad,) = trained.scaled(0.5)
    compute(20)
    with warned(0):
        trained.apply([grad / trained.optimizer.loss_scale()])
    assert trained.subtracted() == 0.5


def test_who_is_gone_listens_no_longer(trained):
    nobody_listens()
    trained.scaled(1.0)
    tracker = weakref.ref(tracker_of(trained))
    trained.optimizer = None
    gc.collect()
    if tracker() is not None:
        pytest.skip("this Keras keeps its optimizers")
    compute(1)
    assert not callbacks.is_telling()


def compute(times):
    for _ in range(times):
        tf.constant(1.0) + 1.0


def nobody_listens():
    """Lets go of what other tests left."""
    callbacks._listening[:] = []
    compute(1)
    assert not callbacks.is_telling()


def test_one_that_is_gone_hides_nothing_from_another(family):
    """TensorFlow goes through its list of who listens: it must not get shorter."""
    gone, trained = Trained(family), Trained(family)
    gone.scaled(1.0)
    trained.scaled(1.0)
    gone = None
    gc.collect()
    with warned(0):
        (grad,) = trained.scaled(0.5)
        trained.apply([tf.math.divide_no_nan(grad, trained.optimizer.loss_scale())])
    assert trained.subtracted() == 0.5


def test_a_function_that_eager_mode_calls(trained):
    scaled, halved = tf.function(trained.scaled), tf.function(lambda x: x * 0.5)
    with warned(0):
        for times in (1, 2):
            (grad,) = scaled(tf.constant(1.0))
            assert unit_of(trained, grad).low == 1.0
            assert unit_of(trained, halved(grad)).low == 1.0
            trained.apply([halved(grad)])
            assert trained.subtracted() == times * 0.5


def test_each_of_several_that_go_through_one_operation(trained):
    def through(*values):
        return tf.identity_n(values)

    for function in (through, tf.function(through)):
        (grad,) = trained.scaled(1.0)
        grad, one = function(grad, tf.constant(1.0))
        assert unit_of(trained, grad).low == 1.0
        assert unit_of(trained, one) is UNKNOWN


def test_no_definition_is_kept_of_functions_that_were_looked_into(trained):
    # That of a training step is as large as all the rest that its trace leaves.
    halved = tf.function(lambda x: tf.function(tf.negative)(x) * -0.5)
    (grad,) = trained.scaled(1.0)
    assert unit_of(trained, halved(grad)).low == 1.0
    assert not any(isinstance(each, Definition) for each in gc.get_objects())


def test_a_function_within_a_function(trained):
    inner = tf.function(trained.scaled)
    outer = tf.function(lambda x: [grad * 0.5 for grad in inner(x)])
    with warned(0):
        trained.apply(outer(tf.constant(1.0)))
    assert trained.subtracted() == 0.5


def test_a_loop_and_a_branch_in_a_function(trained):
    @tf.function
    def made(x, unscales):
        total = tf.zeros([4])
        for _ in tf.range(2):
            total += trained.scaled(x)[0]
        if unscales:
            total = total / trained.optimizer.loss_scale / 2.0
        else:
            total = total / trained.optimizer.loss_scale
        return total

    with warned(0):
        trained.apply([made(tf.constant(0.5), tf.constant(True))])
        assert trained.subtracted() == 0.5
        trained.apply([made(tf.constant(0.5), tf.constant(False))])
        assert trained.subtracted() == 1.5


@pytest.mark.parametrize("way", ["scaled", "unscaled"])
def test_a_loop_over_a_dataset_in_a_function(trained, way):
    batches = tf.data.Dataset.from_tensor_slices([0.25, 0.25])

    @tf.function
    def made():
        total = tf.zeros([4])
        for factor in batches:
            total += getattr(trained, way)(factor)[0]
            if factor > 100.0:
                break
        return total

    with warned(0):
        trained.apply([made()])
    assert trained.subtracted() == 0.5


@pytest.mark.parametrize("way", ["scaled", "unscaled"])
@pytest.mark.parametrize("applies_in", ["eager", "graph"])
def test_accumulated_in_one_function_and_applied_in_another(trained, way, applies_in):
    total = tf.Variable(tf.zeros([4]), trainable=False)

    @tf.function
    def accumulate(x):
        total.assign_add(getattr(trained, way)(x)[0])

    def step():
        trained.apply([total * 0.5])
        total.assign(tf.zeros([4]))

    step = tf.function(step) if applies_in == "graph" else step
    with warned(0):
        for times in (1, 2):
            accumulate(tf.constant(0.5))
            accumulate(tf.constant(0.5))
            step()
            assert trained.subtracted() == times * 0.5


def test_a_step_traced_once_divides_by_what_scaled_the_present_sum(trained):
    total = tf.Variable(tf.zeros([4]), trainable=False)

    @tf.function
    def step():
        trained.apply([total.read_value()])

    with warned(0):
        for factor in (1.0, 2.0):
            trained.optimizer.loss_scale.current_loss_scale.assign(factor * S)
            total.assign(trained.scaled(1.0)[0])
            step()
    assert trained.subtracted() == 2.0


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_an_overflow_that_was_clipped_into_a_sum_in_a_variable(trained, mode):
    total = tf.Variable(tf.zeros([4]), trainable=False)

    def step(first, second):
        for factor in (first, second):
            (grad,) = trained.unscaled(factor)
            total.assign_add(tf.clip_by_value(grad, -1.0, 1.0))
        trained.apply([total.read_value()])
        total.assign(tf.zeros([4]))

    step = tf.function(step) if mode == "graph" else step
    with warned(0):
        step(tf.constant(float("inf")), tf.constant(0.5))
        assert trained.subtracted() == 0.0
        step(tf.constant(0.25), tf.constant(0.5))
    assert trained.subtracted() == 0.75
    assert trained.state() == (S / 2, 1, 1)


def test_weights_carry_nothing_of_the_steps_that_moved_them(trained):
    with warned(0):
        for _ in range(3):
            trained.apply(trained.unscaled(1.0))
        for value in trained.variables:
            unit = unit_of(trained, tf.convert_to_tensor(value) * 1.0)
            assert unit.from_variable
            assert unit.is_free
            assert not unit.unscalings
    assert trained.state() == (S, 3, 0)


def test_a_second_pass_that_is_not_scaled(trained):
    """Sharpness-aware minimization, whose second pass needs no scale."""

    def plain(x):
        with tf.GradientTape() as tape:
            values = [tf.convert_to_tensor(v) for v in trained.variables]
            tape.watch(values)
            loss = tf.add_n([tf.reduce_sum(x * v * v) for v in values])
        return tape.gradient(loss, values)

    with warned(0):
        norm = tf.linalg.global_norm(trained.unscaled(1.0))
        trained.apply([grad * 0.0625 for grad in plain(0.5)])
    assert np.isfinite(norm)
    assert trained.subtracted() == 0.5
