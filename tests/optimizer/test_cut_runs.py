"""A run that is cut after any step, and resumed from a file, is the run without a cut.

What decides a step is in the file, or is put right when the file is read. So this holds
for a new model, and for one that has taken other steps before. What no file holds
decides nothing between two steps: the last tests say what that is.
"""

from __future__ import annotations

import random

import golden
import numpy as np
import pytest
import tensorflow as tf
from exact import of_loss
from models import inner_variables, variable_of
from routes import ROUTES, there

from lossscale import DynamicLossScale, LossScaleEngine, LossScaleOptimizer, SpikeGuard
from lossscale.optimizer.pending import StepState
from lossscale.runtime import keras_versions

INF, NAN = float("inf"), float("nan")
#: By letter the input of a step: good, with a bad loss, and one that overflows.
INPUTS = {"T": 1.0, "N": NAN, "O": 2.0**62}
#: 25 steps. Until the bad loss at 14, which counts as an overflow and ends the search,
#: the loss scale grows at each good step.
RUN = "TNTNNNNTNNNTNNNNNTONNNNNN"
#: After these the loss scale is lower.
FALLS = [14, 18]
SCALES = {
    "search": lambda: DynamicLossScale(2.0**4, 1000, search_period=1),
    "guard": lambda: DynamicLossScale(2.0**4, 2, search_period=1),
}


def make(family, scale="search", how="skip"):
    """Returns a model of one weight, 1, that is trained at a rate of 0."""
    optimizer = LossScaleOptimizer(
        family.optimizers.SGD(0.0),
        SCALES[scale](),
        nonfinite_loss=how,
        guard=SpikeGuard(window=4) if scale == "guard" else None,
    )
    model = golden.compiled_model(family, optimizer)
    model.set_weights([np.ones([1, 1], np.float32)])
    optimizer.build(model.trainable_variables)
    return model


def take(model, run):
    """Takes the steps of a run. Returns the state after each."""
    found = []
    for letter in run:
        x = np.full([1, 1], INPUTS[letter], np.float32)
        model.train_on_batch(x, np.zeros([1, 1], np.float32))
        found.append(state(model))
    return found


def state(model):
    """Returns the loss scale and its counters, the level, and the applied steps."""
    optimizer = model.optimizer
    scale = {v.name: v.numpy().tolist() for v in optimizer.loss_scale.variables}
    saved = {k: v.numpy().item() for k, v in optimizer.engine._saved().items()}
    return {**scale, **saved, "iterations": int(optimizer.iterations.numpy())}


#: By one route a run is cut after each step, by the others after a few: they hold the
#: same. The quick tests have one, and checkpoints of an engine.
CUTS = {"checkpoint": range(25)}
QUICK = ("set_weights",)


@pytest.mark.every
@pytest.mark.parametrize(
    "route",
    [pytest.param(r, marks=[pytest.mark.slow] * (r not in QUICK)) for r in ROUTES],
)
def test_a_run_that_is_cut_is_the_run(family, tmp_path, route):
    cuts = CUTS.get(route, (9, 14, 20))
    model, whole, route = make(family), [], there(family, route)
    for number, letter in enumerate(RUN):
        if number in cuts:
            route.write(model, tmp_path / str(number))
        whole += take(model, letter)
    scales = [each["current_loss_scale:0"] for each in whole]
    assert [n for n in range(1, 25) if scales[n] < scales[n - 1]] == FALLS
    assert scales[11] == 2.0**8  # ignored losses do not end the search
    used = make(family)
    take(used, "TNNOTNNNNNN")
    for number in cuts:
        other = route.read(family, tmp_path / str(number), used)
        assert take(other, RUN[number:]) == whole[number:], number


def gradients(scale, letter):
    """Returns the gradients of a scaled loss, of one weight."""
    loss, grad = {"T": (1.0, 1.0), "N": (NAN, NAN), "O": (1.0, INF)}[letter]
    return of_loss(scale, tf.constant(loss), [tf.constant([grad])])


def steps_of_two(family):
    """Returns two optimizers that share a loss scale, and a function that steps."""
    scale, every = SCALES["search"](), []
    for _ in range(2):
        inner = family.optimizers.SGD(0.0)
        optimizer = LossScaleOptimizer(inner, scale, nonfinite_loss="skip")
        variable = variable_of(family, [1.0])
        optimizer.build([variable])
        optimizer.iterations  # noqa: B018 - Keras 2 makes it when it is asked for
        every.append((optimizer, variable))

    def step(letter, number):
        optimizer, variable = every[number]
        grads = gradients(optimizer.scale_loss, letter)
        optimizer.apply_gradients([(grads[0], variable)])
        return [float(scale), int(scale.skipped_steps.numpy())]

    return [one for one, _ in every], step


def test_a_run_of_two_that_share_a_loss_scale(family, tmp_path):
    """In eager mode: the second optimizer applies in every third step only."""
    draw = random.Random(3)  # noqa: S311 - no secret
    run = [(draw.choice("TNNN"), number % 3 == 2) for number in range(60)]

    def checkpoint(optimizers):
        names = ("first", "second")
        return tf.train.Checkpoint(**dict(zip(names, optimizers)))

    optimizers, step = steps_of_two(family)
    seen, paths = [], []
    for letter, is_second in run:
        if not is_second:  # between two steps
            paths.append(checkpoint(optimizers).write(str(tmp_path / str(len(seen)))))
        else:
            paths.append(None)
        seen.append(step(letter, int(is_second)))
    assert len({scale for scale, _ in seen}) > 3
    for number, is_used in ((16, True), (46, False)):
        others, resumed = steps_of_two(family)
        for _ in range(9 * is_used):
            resumed("N", 0)
            resumed("N", 1)
        checkpoint(others).read(paths[number]).expect_partial()
        found = [resumed(letter, int(second)) for letter, second in run[number:]]
        assert found == seen[number:], number


def test_a_run_of_an_engine(tmp_path):
    variable = tf.Variable([1.0])

    def made():
        return LossScaleEngine(SCALES["search"](), nonfinite_loss="skip")

    def take(engine, run):
        seen = []
        for letter in run:
            grads = gradients(engine.scale_loss, letter)
            engine.apply(grads, [variable], lambda *_: None)
            seen.append(float(engine.loss_scale))
        return seen

    engine, used = made(), made()
    whole = []
    take(used, "NNNNNTO")
    for number, letter in enumerate(RUN):
        if number % 4 == 0:
            tf.train.Checkpoint(engine=engine).write(str(tmp_path / str(number)))
        whole += take(engine, letter)
    for number in range(0, 25, 4):
        path = str(tmp_path / str(number))
        tf.train.Checkpoint(engine=used).read(path).assert_consumed()
        assert take(used, RUN[number:]) == whole[number:]


# What no file holds


#: Names of variables that a step uses and no file holds.
NOT_SAVED = {
    # The state of a step that has begun.
    "pending",
    "overflow_seen",
    "waiting",
    "given",
    # Only reports read these.
    "nonfinite_gradients",
    "spiking_gradients",
    "skipped_last",
    "bad_losses_counted",
    # The greatest magnitude of the last step, which a step writes.
    "last_largest",
    "greatest_so_far",
}


def test_what_no_file_holds(family):
    """Of the variables of a step. `docs/saving.md` lists them in words."""
    created = []

    def creator(create, **kwargs):
        created.append(create(**kwargs))
        return created[-1]

    with tf.variable_creator_scope(creator):
        scale = SCALES["guard"]()
        both = [
            LossScaleOptimizer(
                family.optimizers.SGD(0.5),
                scale,
                guard=SpikeGuard(window=4),
                nonfinite_loss="skip",
            )
            for _ in range(2)
        ]
        variables = [variable_of(family, [1.0]) for _ in both]
        for optimizer, variable in zip(both, variables):
            optimizer.build([variable])
            optimizer.iterations  # noqa: B018 - Keras 2 makes it when it is asked for

    @tf.function
    def step():
        for optimizer, variable in zip(both, variables):
            grads = gradients(optimizer.scale_loss, "T")
            grads = optimizer.get_unscaled_gradients(grads)
            optimizer.apply_gradients(list(zip(grads, [variable])))

    concrete = step.get_concrete_function()
    handles = {id(each) for each in concrete.captured_inputs}
    used = {id(v): v for v in created if id(v.handle) in handles}
    assert len(used) == sum(
        each.dtype == tf.resource for each in concrete.captured_inputs
    )
    saved = [*variables]
    for optimizer in both:
        saved += [*inner_variables(optimizer), *optimizer.engine._saved().values()]
        saved += [*optimizer.engine._state_variables(), optimizer.iterations]
    for each in saved:
        used.pop(id(keras_versions.tensor_of(each)), None)
    # A checkpoint holds a legacy optimizer's arguments, which are variables, too.
    of_config = set(both[0].inner_optimizer.get_config())
    assert {v.name.split(":")[0] for v in used.values()} - of_config == NOT_SAVED


def test_nothing_that_no_file_holds_decides_a_later_step(family):
    """Each has any value here before a step that begins after a file was read."""
    model, expected = make(family, "guard"), make(family, "guard")
    for each in (model, expected):
        take(each, "TTTTNNN")
    optimizer = model.optimizer
    kept = {**optimizer.engine.record.kept}
    kept["last_largest"] = optimizer.loss_scale.last_largest
    of_a_step = set(vars(StepState()))
    for name, variable in kept.items():
        if name not in of_a_step and name != "overflow_seen":
            variable.assign(tf.ones_like(variable) * 3)
    run = RUN[:12]
    assert take(model, run) == take(expected, run)
