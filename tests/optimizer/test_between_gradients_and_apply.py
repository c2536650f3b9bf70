"""What users do to gradients before they apply them: a function at a time.

Each is called with gradients that are still scaled, that were unscaled, and that were
divided by the loss scale by hand. What is applied must be what it makes of the true
gradient, or one warning says that it is not.

Each trains a weight of its own with SGD(1.0), so what was subtracted from the weight is
the gradient as it was applied. Building a step takes most of the time: many functions
are in one graph, and where an infinity is looked for, in one step.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import tensorflow as tf
from between import (
    FUNCTIONS,
    GRADIENT,
    WEIGHT,
    WITH_WEIGHT,
    bare,
    call,
    degree,
    names,
)
from exact import S, gradients, heard, warned
from installed import families
from limits import TENSORFLOW
from models import variable_of

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer

slow = pytest.mark.slow
#: What is between belongs to TensorFlow: one Keras tries all of it.
FIRST = families()[0]
#: What quick tests try.
SOME = [
    "where(g > 0, 1, -1)",
    "where(g > 0.1, g, 0)",
    "round",
    "g + 0.1 * w",
    "argsort",
]
#: How many functions are in one graph.
CHUNK = 32

# What cannot be known of a function.

#: They have degree 0 or 1, and nobody can see it: a warning is right.
OPAQUE = {
    "(abs(g) ** 3) ** (1 / 3)",
    "exp(log(abs(g)))",
    "nextafter",
    "bitcast and back",
    "py_function",
    "numpy_function halves",
    "fake_quant of its own range",
    "trust ratio",  # it has a constant for norms of 0
}
#: A number is computed, or drawn, in a graph: nobody knows there that it is not small.
NUMBERS = {"cholesky of gram + 1", "noise + g", "ones_like(g)"}
#: Python runs or chooses there in eager mode, which no operation tells of.
BRANCHES = {
    "cond of a sign",
    "cond(all is_finite, g, 0)",
    "while halves",
    "numpy_function halves",
}
#: What is done within them is not seen. By hand, they are divided again, and told.
BODIES = {
    "a function clips",
    "cond clips",
    "cond of a sign",
    "cond(all is_finite, g, 0)",
    "cond(norm > 1)",
    "matrix_exp",
    "scan",
    "vectorized_map",
    "while adds",
    "while halves",
    "zero_fraction",
}
#: Matrix functions and products of scaled gradients: some are told without need, the
#: others are divided by S in silence, as by Keras 2 and Keras 3.
MATRICES = {"pinv"}
#: A number stands beside scaled gradients, and is divided with them in silence.
BESIDE = {
    "bitcast and back",
    "concat with w",
    "g + 0.1 * sign(w)",
    "g + 0.1 * w",
    "tensor_scatter_nd_add with 1",
    "where(constant, g, 1)",
    "where(g > 0, g, 1)",
}


def start_of(name):
    """Returns where a weight begins: at 0 nothing is lost when it is subtracted."""
    return WEIGHT if name in WITH_WEIGHT else np.zeros_like(WEIGHT)


def changed_gradient(optimizer, weight, gradient, state, name):
    """Returns what a function makes of the gradient of a weight's loss."""
    grads = gradients(optimizer.scale_loss, gradient, [weight])
    if state == "unscaled":
        grads = optimizer.get_unscaled_gradients(grads)
    elif state == "by hand":
        grads = [grads[0] / optimizer.loss_scale]
    return call(name, grads[0], tf.convert_to_tensor(weight))


def is_right(name, weight):
    """Tells whether a weight moved by what the function makes of the true gradient."""
    subtracted = start_of(name) - np.array(weight.numpy())
    wanted = bare(name, GRADIENT)
    size = np.max(np.abs(wanted))
    return np.allclose(subtracted, wanted, rtol=2e-3, atol=2e-5 * size)


def chunks(every):
    return [every[at : at + CHUNK] for at in range(0, len(every), CHUNK)]


def offenders(family, state, mode, every):
    """Returns the broken promises, each with the functions that break it."""
    is_open = NUMBERS | (BRANCHES if mode == "eager" else set())
    if state != "unscaled":
        is_open = is_open | BODIES | MATRICES | BESIDE
    broken = defaultdict(list)
    for chunk in chunks(every):
        for name, (right, told) in applied(family, state, mode, chunk).items():
            if name in is_open:
                continue
            if not (right or told):
                broken["wrong in silence"].append(name)
            if told > 1:
                broken["warned of more than once"].append(name)
            if told and (state == "unscaled" or is_seen(name, state)):
                broken["warned of without need"].append(name)
    return dict(broken)


def is_seen(name, state):
    """Tells whether a function can be seen to hand S on as it is, or not at all."""
    return name not in OPAQUE and (state == "by hand" or degree(name) in (0.0, 1.0))


def applied(family, state, mode, every):
    """Returns for each function whether it came out right, and how often we warned."""
    loss_scale, trained, told = FixedLossScale(S), {}, {}
    for name in every:
        optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), loss_scale)
        weight = variable_of(family, start_of(name))
        optimizer.build([weight])
        trained[name] = optimizer, weight

    def steps(gradient):
        for name, (optimizer, weight) in trained.items():
            with heard() as told[name]:
                grad = changed_gradient(optimizer, weight, gradient, state, name)
                optimizer.apply_gradients([(grad, weight)])

    steps = tf.function(steps, autograph=False) if mode == "graph" else steps
    steps(tf.constant(GRADIENT))
    return {
        name: (is_right(name, weight), len(told[name]))
        for name, (_, weight) in trained.items()
    }


@slow
@pytest.mark.parametrize(
    ("state", "mode"),
    [("scaled", "graph"), ("by hand", "graph"), ("scaled", "eager")],
)
def test_what_is_applied_is_right_or_told(state, mode):
    assert {*names()} == {*FUNCTIONS} or TENSORFLOW < (2, 21)
    assert not offenders(FIRST, state, mode, names())


def test_some_of_what_is_applied_is_right_or_told(family):
    for state in ("unscaled", "scaled", "by hand"):
        assert not offenders(family, state, "graph", SOME)


def overflowed(infinity):
    """Returns the gradient with an infinity in its last element."""
    gradient = GRADIENT.copy()
    gradient[-1, -1] = infinity
    return gradient


def of_infinity(name, infinity):
    """Returns what a function makes of an infinity, None if it refuses it."""
    try:
        return bare(name, overflowed(infinity))
    except Exception:
        return None


def broken_once_unscaled(every):
    """Returns a line for each function that comes out wrong, and each missed infinity.

    Each has an unscaling of its own. Nothing is to be said of what was unscaled.
    """
    loss_scale = DynamicLossScale(S, 1000)
    optimizer = LossScaleOptimizer(FIRST.optimizers.SGD(1.0), loss_scale)
    weights = [variable_of(FIRST, start_of(name)) for name in every]
    optimizer.build(weights)

    @tf.function(autograph=False)
    def step(true):
        grads = [
            changed_gradient(optimizer, weight, true[at], "unscaled", name)
            for at, (name, weight) in enumerate(zip(every, weights))
        ]
        optimizer.apply_gradients(list(zip(grads, weights)))

    true = np.stack([GRADIENT] * len(every))
    with warned(0):
        step(tf.constant(true))
    pairs = zip(every, weights)
    broken = [f"wrong: {name}" for name, weight in pairs if not is_right(name, weight)]
    for at, name in enumerate(every):
        made = {each: of_infinity(name, each) for each in (np.inf, -np.inf)}
        hides = [one is None or np.isfinite(one).all() for one in made.values()]
        for infinity in made if any(hides) else ():
            bad = true.copy()
            bad[at] = overflowed(infinity)
            loss_scale.current_loss_scale.assign(S)
            before = int(loss_scale.skipped_steps.numpy())
            try:
                step(tf.constant(bad))
            except Exception:
                if made[infinity] is not None:
                    raise
            else:
                if int(loss_scale.skipped_steps.numpy()) == before:
                    broken.append(f"missed: {name}")
    return broken


@slow
def test_unscaled_all_come_out_right_and_no_overflow_is_missed():
    every = [name for name in names() if name not in NUMBERS]
    for chunk in chunks(every):
        assert not broken_once_unscaled(chunk)
