"""What find_nonfinite says of a step is true, and whoever follows it trains.

This holds `causes.py`, `step.py`, `nonfinite.py` and `runtime/derivatives.py`. The
models are in `support/nonfinite_models.py`.
"""

import re
import threading
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from limits import skip_without
from models import assert_same
from nonfinite_models import (
    CASES,
    HEALTHY,
    LIMITED,
    OWN_STEPS,
    Told,
    made,
    masks_gradients,
    minimizing,
    mse,
    own,
    update,
)

from lossscale import find_nonfinite, forward_ranges, gradient_ranges

QUICK = (
    *("0/0", "log(-1)", "sqrt'(0)", "0/1e-8", "0/0 of what was lost", "seam"),
    *("integers", "casts itself", "fixed scale", "weights"),
    *("gan", "penalty", "summed", "cast and summed", "cold cell", "cold masked"),
)
MARKS = dict.fromkeys(QUICK, ())
# Where TensorFlow does not say whose derivative it computes, it is one of the forward
# pass.
MARKS["sqrt'(1e-8)"] = pytest.mark.each_version


def rows(table):
    named = [pytest.param(n, marks=MARKS.get(n, pytest.mark.slow)) for n in table]
    return pytest.mark.parametrize("name", named)


def applied(model, x, y, steps):
    """Trains, and returns how many steps were applied, 0 if the loss is not finite."""

    def repeated(array):
        return np.concatenate([array] * steps)

    size = len(tf.nest.flatten(y)[0])
    x, y = tf.nest.map_structure(repeated, (x, y))
    losses = model.fit(x, y, batch_size=size, shuffle=False, verbose=0).history["loss"]
    is_finite = np.isfinite(losses).all()
    return int(model.optimizer.applied_steps.numpy()) if is_finite else 0


@pytest.mark.every
@rows({**CASES, **OWN_STEPS})
def test_what_is_said_is_true_and_helps(family, name):
    if name in LIMITED:
        skip_without(LIMITED[name], family)
    case = {**CASES, **OWN_STEPS}[name]
    told = Told(family)
    model, x, y = made(family, case.build, told)
    found = find_nonfinite(model, x, y)
    place = f"{found.where} {str(found.layer).split('/')[-1]}"
    assert re.fullmatch(case.place, place)
    assert re.search(case.says, str(found)), str(found)
    assert bool(found) == (found.where != "scale")
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
    held = [*model.weights, *getattr(model, "sums", ())]
    find_nonfinite(model, x, y)  # which may create weights
    before = [np.array(variable.numpy()) for variable in held]
    found = find_nonfinite(model, x, y)
    assert found.where is found.layer is None, str(found)
    assert "Nothing is at fault" in str(found)
    ranges = forward_ranges(model, x, y, verbose=0, batches=1)
    assert ranges.need_float32 == ranges.need_cast == ranges.inside == (), str(ranges)
    assert ranges.is_inside_known
    grads = gradient_ranges(model, x, y, verbose=0, batches=1)
    assert not grads.nonfinite.any(), str(grads)
    assert_same(before, [np.array(variable.numpy()) for variable in held])
    assert getattr(model, "steps", 0) == 0
    assert applied(model, x, y, 20) > 12


def chain_of(*computed):
    """Returns what makes a model with layers "c0" and so on that compute in float16."""

    def build(m):
        layers = [
            m.computing(lambda x, _, f=f: f(x), f"c{number}")
            for number, f in enumerate(computed)
        ]
        model, x, _ = m.chain(m.before(), *layers, m.out())
        return model, x[2:], np.ones_like(x[2:, :1])

    return build


def hands_back(number):
    @tf.custom_gradient
    def broken(x):
        return x, lambda upstream: upstream * 0 + number

    return broken


def two_layers_with_one_input(m):
    given = m.keras.Input([8])
    hidden = m.before()(given)
    root = m.computing(lambda x, _: tf.sqrt(tf.nn.relu(x) * 0), "root")
    both = [root(hidden), m.layer("Dense", 4, name="innocent")(hidden)]
    model = m.keras.Model(given, m.out()(m.keras.layers.Add()(both)))
    model.compile(m.optimizer(), loss="mse")
    return model, np.ones([4, 8], np.float32), np.ones([4, 1], np.float32)


def one_small_error(m):
    """A low loss scale rounds it to zero, and the other rows train."""
    model, x, y = chain_of(lambda x: tf.sqrt(tf.abs(x)))(m)
    x[0], y[0] = 0.0, 2.0**-18
    return model, x, y


def beside_random_numbers(compute, m):
    """A generator that is in no layer goes on drawing: no two steps are equal."""
    generator = tf.random.Generator.from_seed(1)

    def drawing(x):
        return compute(x) * tf.cast(generator.normal(tf.shape(x)), x.dtype)

    return chain_of(drawing)(m)


def hidden(x):
    return tf.where(x < 1e3, x, tf.stop_gradient(tf.exp(x * 0 + 12)))


def masked(x):
    """Its product is -inf everywhere but in the first column."""
    mask = 2.0 * tf.constant([[0.0, -6e4, -6e4, -6e4]], x.dtype)
    return x * tf.nn.softmax(x + mask)


def times_a_constant(x):
    """A constant in float16 meets float32 as soon as the layer computes in it."""
    return tf.raw_ops.Mul(x=x + 3, y=tf.constant(6e4, tf.float16)) * 6e4


#: What is done: a pattern of `where`, layer, kind and operation, what is said, and what
#: is not.
PROGRAMS = {
    **{
        f"{kind} comes back": (
            *(chain_of(hands_back(float(kind))), rf"gradient c0 {kind} \w+"),
            *("No loss scale helps", never),
        )
        for kind, never in (("inf", "-inf"), ("-inf", "NaN "), ("nan", "inf "))
    },
    "two layers with one input": (
        *(two_layers_with_one_input, "gradient root inf SqrtGrad"),
        *("argument holds zeros", "innocent"),
    ),
    "a layer is given too much": (
        chain_of(lambda x: tf.cast(x, tf.float32) * 1e9, tf.identity),
        *("forward c1 -?inf Cast", "before they were cast to float16", "its gradient"),
    ),
    "a function that is compiled": (
        chain_of(tf.function(lambda x: x * 3e4 * 3e4)),
        *("forward c0 -?inf Mul", "c0", "could not"),
    ),
    # At 2**-24 all gradients are finite, and zero: the steps would be applied.
    "a loss scale at which no gradient arrives is not advised": (
        chain_of(lambda x: tf.sqrt(tf.nn.relu(x * 0))),
        *("gradient c0 inf SqrtGrad", "argument holds zeros", r"2\*\*-24|Write"),
    ),
    "a low loss scale does not help against an infinite derivative": (
        *(one_small_error, "gradient c0 -?inf SqrtGrad"),
        *("argument holds zeros", "min_loss_scale"),
    ),
    # The line for the one is confirmed, and the other gets none.
    "two faults of which float32 helps against one": (
        chain_of(
            lambda x: (x + 3) * 3e4 * 3 * 1e-5,
            lambda x: x / tf.reduce_sum(x * 0, -1, True),
        ),
        "forward c0 inf Mul",
        r"name='c0'\)(.|\n)*This alone is not enough. With it, another fault is left: "
        "c1 (.|\n)*divisor holds zeros",
        "name='c1'",
    ),
    "what cannot be tried": (
        *(chain_of(times_a_constant), "forward c0 inf Mul"),
        *("could not be tried", "undecided"),
    ),
    "gradients that are zero in float32, too": (
        chain_of(lambda x: x * 0 + tf.exp(x * 0 + 12)),
        *("forward c0 inf Exp", r"name='c0'\)(.|\n)*Whether it is enough is undecided"),
        "could not be tried",
    ),
    "an overflow beside random numbers": (
        *(partial(beside_random_numbers, hidden), "forward c0 inf Exp"),
        *("Whether they are wrong is undecided", "Later layers hide it"),
    ),
    "a mask beside random numbers": (
        *(partial(beside_random_numbers, masked), "None None None None"),
        *("Nothing is at fault", "undecided"),
    ),
    "gradients that a step throws away": (
        *(masks_gradients, "None None None None"),
        *("Nothing is at fault", "bad"),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_said_of_a_program(family, name):
    build, place, says, never = PROGRAMS[name]
    found = find_nonfinite(*made(family, build))
    where = (found.where, found.layer, found.kind, found.operation)
    assert re.fullmatch(place, " ".join(map(str, where)))
    assert re.search(says, str(found)), str(found)
    assert not re.search(never, str(found)), str(found)


def test_forward_and_gradient_ranges_see_the_layers_of_a_step_of_ones_own(family):
    model, x, y = made(family, OWN_STEPS["gan"].build)
    found = forward_ranges(model, x, y, verbose=0)
    assert [path.split("/")[-1] for path in found.need_float32] == ["bad"]
    names = gradient_ranges(model, x, y, activations=True, verbose=0).names
    assert any("before" in name for name in names)  # of the generator
    assert any("out/" in name for name in names)  # of the critic
    assert any("output of bad" in name for name in names)


def test_a_loss_that_overflows_by_its_many_rows_is_found(family):
    def summed(y, predicted):
        return tf.reduce_sum(tf.cast(predicted - y, tf.float16))

    keras = family.keras
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(family.optimizers.SGD(), summed)
    x = np.full([256, 1], 1000.0, np.float32)
    model.set_weights([np.ones([1, 1]), np.zeros([1])])
    assert find_nonfinite(model, x, 0.0 * x).where == "loss"
    many = np.repeat(x, 5, axis=0)  # no batch any more: it may not fit into memory
    for arrays, size in ((x, 32), (many, None)):
        found = find_nonfinite(model, arrays, 0.0 * arrays, batch_size=size)
        assert "In this batch of 32 rows the loss is finite" in str(found)


def test_a_batch_may_begin_with_its_number(family):
    class Numbered(family.keras.Sequential):
        def train_step(self, batch):
            return super().train_step(batch[1])

    model = Numbered([family.keras.Input((1,)), family.keras.layers.Dense(1)])
    model.compile(family.optimizers.SGD(), "mse")
    x = tf.data.Dataset.from_tensor_slices((np.ones([4, 1]), np.ones([4, 1])))
    found = find_nonfinite(model, x.batch(4).enumerate())
    assert "In this batch of 4 rows the loss is finite" in str(found)


def test_a_thread_that_trains_meanwhile_is_not_stopped(family):
    """Optimizers' methods are replaced in their classes, for one thread only."""
    other, *batch = made(family, HEALTHY["where(log)"])

    def loss(network, x, _):
        thread = threading.Thread(target=other.train_on_batch, args=batch)
        thread.start()
        thread.join()
        return mse(network(x), 0.0)

    other.train_on_batch(*batch)
    model = made(family, lambda m: minimizing(loss, m, m.before()))
    assert find_nonfinite(*model).where is None
    assert int(other.optimizer.applied_steps.numpy()) == 2


def test_an_optimizer_of_ones_own_changes_nothing(family):
    class Own:
        def __init__(self):
            self.steps = 0

        def apply_gradients(self, pairs):
            self.steps += len(list(pairs))

        def scale_loss(self, loss):
            return loss

    def step(model, x, y):
        return update(model.mine, lambda: mse(model.network(x), y), model.network)

    model, x, y = made(family, lambda m: own(m, step, network=m.sequential(m.before())))
    object.__setattr__(model, "mine", Own())
    assert find_nonfinite(model, x, y).where is None
    assert model.mine.steps == 0
