"""What the reports say of a step is true, and whoever follows it trains.

This holds `causes.py`, `step.py` and half of `nonfinite.py`. The models are in
`support/nonfinite_models.py`.
"""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
import tensorflow as tf
from models import assert_same
from nonfinite_models import (
    CASES,
    HEALTHY,
    OWN_STEPS,
    Told,
    made,
    masks_gradients,
    mse,
    own,
    update,
)

from lossscale import find_nonfinite, forward_ranges, gradient_ranges
from lossscale.runtime import op_callbacks
from lossscale.runtime.derivatives import derivative

QUICK = {
    *("0/0", "log(-1)", "sqrt'(0)", "0/1e-8", "0/0 of what was lost", "seam"),
    *("sum in float16", "integers", "casts itself", "gan", "penalty", "summed"),
}


def rows(table):
    """Returns the names in a table, of which few are quick."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        "name",
        [name if name in QUICK else pytest.param(name, marks=slow) for name in table],
    )


def applied(model, x, y, steps):
    """Trains, and returns how many steps were applied, 0 if the loss is not finite."""

    def repeated(array):
        return np.concatenate([array] * steps)

    x, y = tf.nest.map_structure(repeated, (x, y))
    size = len(x) // steps
    losses = model.fit(x, y, batch_size=size, shuffle=False, verbose=0).history["loss"]
    is_finite = np.isfinite(losses).all()
    return int(model.optimizer.applied_steps.numpy()) if is_finite else 0


@pytest.mark.every
@rows({**CASES, **OWN_STEPS})
def test_what_is_said_is_true_and_helps(family, name):
    case = {**CASES, **OWN_STEPS}[name]
    told = Told(family)
    model, x, y = made(family, case.build, told)
    found = find_nonfinite(model, x, y)
    place = f"{found.where} {str(found.layer).split('/')[-1]}"
    assert re.fullmatch(case.place, place)
    assert re.search(case.says, str(found)), str(found)
    if not case.is_promised:
        return
    assert applied(model, x, y, 8) < 4
    while told.follow(str(found)):
        # All layers that need float32 are named at once, and no other.
        assert told.names in (set(), set(case.needs))
        found = find_nonfinite(*made(family, case.build, told))
    assert not found or "lower" in told.said, str(found)
    assert told.names == set(case.needs)
    model, x, y = made(family, case.build, told)
    before = model.get_weights()
    assert applied(model, x, y, 60) > 40
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert any(np.abs(b - a).max() for a, b in zip(before, model.get_weights()))


@pytest.mark.every
@rows(HEALTHY)
def test_nothing_is_said_of_a_healthy_model(family, name):
    model, x, y = made(family, HEALTHY[name])
    held = [*model.weights, *getattr(model, "averages", ())]
    find_nonfinite(model, x, y)  # which may create weights
    before = [np.array(variable.numpy()) for variable in held]
    found = find_nonfinite(model, x, y)
    assert found.where is None, str(found)
    ranges = forward_ranges(model, x, y, verbose=0, batches=1)
    assert ranges.need_float32 == ranges.need_cast == (), str(ranges)
    assert ranges.is_inside_known
    grads = gradient_ranges(model, x, y, verbose=0, batches=1)
    assert not grads.nonfinite.any(), str(grads)
    assert_same(before, [np.array(variable.numpy()) for variable in held])
    assert getattr(model, "steps", 0) == 0
    assert applied(model, x, y, 20) > 12


def test_gradients_that_a_step_throws_away_are_no_fault(family):
    assert find_nonfinite(*made(family, masks_gradients)).where is None


def test_forward_and_gradient_ranges_see_the_layers_of_a_step_of_ones_own(family):
    model, x, y = made(family, OWN_STEPS["gan"].build)
    found = forward_ranges(model, x, y, verbose=0)
    assert [path.split("/")[-1] for path in found.need_float32] == ["bad"]
    names = gradient_ranges(model, x, y, activations=True, verbose=0).names
    assert any("before" in name for name in names)  # of the generator
    assert any("out/" in name for name in names)  # of the critic
    assert any("output of bad" in name for name in names)


def test_a_thread_that_trains_meanwhile_is_not_stopped(family):
    """Optimizers' methods are replaced in their classes, for one thread only."""
    other, x, y = made(family, HEALTHY["where(log)"])
    begun, ended = threading.Event(), threading.Event()

    def train():
        begun.wait()
        other.train_on_batch(x, y)
        ended.set()

    def step(model, x, _):
        begun.set()
        assert ended.wait(100)
        return update(model.optimizer, lambda: mse(network(x), 0.0), network)

    other.train_on_batch(x, y)
    thread = threading.Thread(target=train)
    thread.start()

    def build(m):
        nonlocal network
        network = m.sequential(m.before())
        return own(m, step, network=network)

    network = None
    assert find_nonfinite(*made(family, build)).where is None
    thread.join()
    assert int(other.optimizer.applied_steps.numpy()) == 2


def test_an_optimizer_of_ones_own_changes_nothing(family):
    class Own:
        def __init__(self):
            self.steps = 0

        def apply_gradients(self, pairs):
            self.steps += len(list(pairs))

    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = mse(model.network(x), y)
        weights = model.network.trainable_variables
        model.mine.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    def build(m):
        model, x, y = own(m, step, network=m.sequential(m.before()))
        object.__setattr__(model, "mine", Own())
        return model, x, y

    model, x, y = made(family, build)
    assert find_nonfinite(model, x, y).where is None
    assert model.mine.steps == 0


@pytest.mark.each_version
def test_tensorflow_says_whose_derivative_it_computes():
    """Without it, a fault on the way back is taken for one of the forward pass."""
    found = []

    class Listener:
        def note_op(self, kind, *_):
            found.append((kind, derivative(__file__)))
            return bool(found)

    listener = Listener()
    x = tf.constant([2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.sqrt(x)
    op_callbacks.add(listener)
    tape.gradient(y, x)
    kinds = dict(found)
    found.clear()
    listener.note_op = lambda *_: False
    tf.sqrt(x)
    assert kinds["SqrtGrad"]["op_name"] == "Sqrt"
    assert [tensor is y for tensor in kinds["SqrtGrad"]["outputs"]] == [True]


def chain(family, *computed):
    """Returns a model of a dense layer and layers in float16, with data and targets."""

    def build(m):
        layers = [
            m.own(f"c{i}", lambda x, _, f=f: f(x)) for i, f in enumerate(computed)
        ]
        model, x, _ = m.chain(m.before(), *layers, m.out())
        return model, x[2:], np.ones_like(x[2:, :1])

    return made(family, build)


def test_a_loss_scale_at_which_no_gradient_arrives_is_not_advised(family):
    """At 2**-24 all gradients are finite, and zero: the steps would be applied."""
    found = find_nonfinite(*chain(family, lambda x: tf.sqrt(tf.nn.relu(x * 0))))
    assert (found.where, found.layer, found.operation) == ("gradient", "c0", "SqrtGrad")
    assert "2**-24" not in found.to_write
    assert "Write" not in found.to_write


def test_a_low_loss_scale_does_not_help_against_an_infinite_derivative(family):
    """It rounds the error of the row at fault to zero, and the other rows train."""
    model, x, y = chain(family, lambda x: tf.sqrt(tf.abs(x)))
    x[0], y[0] = 0.0, 2.0**-18
    found = find_nonfinite(model, x, y)
    assert (found.where, found.layer) == ("gradient", "c0")
    assert "min_loss_scale" not in found.to_write


def test_two_faults_of_which_float32_helps_against_one(family):
    """The line for the one is confirmed, and the other gets none."""
    model = chain(
        family,
        lambda x: (x + 3) * 3e4 * 3 * 1e-5,
        lambda x: x / tf.reduce_sum(x * 0, -1, True),
    )
    said = str(find_nonfinite(*model))
    assert re.findall(r"name='(\w+)'\)", said) == ["c0"]
    assert "This alone is not enough. With it, another fault is left: c1 " in said
    assert "divisor holds zeros" in said


def test_what_cannot_be_tried_is_said_to_be_undecided(family):
    """A constant in float16 meets float32 as soon as the layer computes in it."""

    def compute(x):
        return tf.raw_ops.Mul(x=x, y=tf.constant(6e4, tf.float16)) * 6e4

    said = str(find_nonfinite(*chain(family, lambda x: compute(x + 3))))
    assert "could not be tried" in said


def test_gradients_that_are_zero_in_float32_too_decide_nothing(family):
    said = str(find_nonfinite(*chain(family, lambda x: x * 0 + tf.exp(x * 0 + 12))))
    assert "name='c0')" in said
    assert "Whether it is enough is undecided" in said


def test_a_hidden_overflow_beside_random_numbers_is_undecided(family):
    """A generator that is in no layer goes on drawing."""
    generator = tf.random.Generator.from_seed(1)

    def compute(x):
        hidden = tf.where(x < 1e3, x, tf.stop_gradient(tf.exp(x * 0 + 12)))
        return hidden * tf.cast(generator.normal(tf.shape(x)), x.dtype)

    found = find_nonfinite(*chain(family, compute))
    assert "Whether they are wrong is undecided" in str(found)
    assert not found.is_hidden
