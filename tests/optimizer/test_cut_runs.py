"""What decides a step is in the files; what no file holds decides nothing later.

Here of optimizers that share a loss scale, and of an engine: a model's run is in
test_routes.py.
"""

from __future__ import annotations

import random

import pytest
import tensorflow as tf
from exact import of_loss
from models import build, inner_variables, variable_of

from lossscale import DynamicLossScale, LossScaleEngine, LossScaleOptimizer, SpikeGuard
from lossscale.optimizer.pending import StepState
from lossscale.runtime import keras_versions

INF, NAN = float("inf"), float("nan")
#: By letter the loss and the gradient of a step: good, a bad loss, an overflow.
STEPS = {"T": (1.0, 1.0), "N": (NAN, NAN), "O": (1.0, INF)}
SKIPS = {"nonfinite_loss": "skip"}


def gradients(scale, letter):
    """Returns the gradients of a scaled loss, of one weight."""
    loss, grad = STEPS[letter]
    return of_loss(scale, tf.constant(loss), [tf.constant([grad])])


def two_optimizers(family, guard=None):
    """Returns two that share a loss scale, by name, a step, and what it has left.

    The step takes a letter and a number: the second applies in every third step only.
    """
    scale, variables = DynamicLossScale(2.0**4, 3, search_period=1), {}
    optimizers = {
        name: LossScaleOptimizer(family.optimizers.SGD(0.0), scale, guard=one, **SKIPS)
        for name, one in (("first", None), ("second", guard))
    }
    for name, optimizer in optimizers.items():
        variables[name] = variable_of(family, [1.0])
        build(optimizer, [variables[name]])

    def step(letter, number):
        name = "second" if number % 3 == 2 else "first"
        grads = gradients(optimizers[name].scale_loss, letter)
        grads = optimizers[name].get_unscaled_gradients(grads)
        optimizers[name].apply_gradients([(grads[0], variables[name])])

    return optimizers, step, lambda: [v.numpy().tolist() for v in scale.variables]


def an_engine(_):
    scale = DynamicLossScale(2.0**4, 1000, search_period=1)
    engine, variable = LossScaleEngine(scale, **SKIPS), tf.Variable([1.0])

    def step(letter, _):
        engine.apply(gradients(engine.scale_loss, letter), [variable], lambda *_: None)

    return {"engine": engine}, step, lambda: float(scale)


@pytest.mark.parametrize("made", [two_optimizers, an_engine])
def test_a_run_that_is_cut_between_two_steps_is_the_run(family, tmp_path, made):
    letters = random.Random(3).choices("TNO", (4, 12, 1), k=48)  # noqa: S311 - no secret

    def take(step, left, first, last):
        """Returns what each step has left."""
        return [step(letters[n], n) or left() for n in range(first, last)]

    (held, *run), (used, *resumed), whole = made(family), made(family), []
    for number in range(0, 48, 6):
        tf.train.Checkpoint(**held).write(str(tmp_path / str(number)))
        whole += take(*run, number, number + 6)
    assert len({str(each) for each in whole}) > 4
    for number in range(0, 48, 6):  # each time after other steps
        tf.train.Checkpoint(**used).read(str(tmp_path / str(number))).expect_partial()
        assert take(*resumed, number, 48) == whole[number:], number


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
        optimizers, take, _ = two_optimizers(family, SpikeGuard(window=4))

    @tf.function
    def step():
        take("T", 1)
        take("T", 2)

    concrete = step.get_concrete_function()
    handles = {id(each) for each in concrete.captured_inputs}
    used = {id(v): v for v in created if id(v.handle) in handles}
    saved = []
    for optimizer in optimizers.values():
        saved += [*inner_variables(optimizer), *optimizer.engine._saved().values()]
        saved += [*optimizer.engine._state_variables(), optimizer.iterations]
        saved += optimizer.engine.record.entries[0].variables  # the weight
    for each in saved:
        used.pop(id(keras_versions.tensor_of(each)), None)
    # A checkpoint holds a legacy optimizer's arguments, which are variables, too.
    of_config = set(optimizers["first"].inner_optimizer.get_config())
    assert {v.name.split(":")[0] for v in used.values()} - of_config == NOT_SAVED


def test_nothing_that_no_file_holds_decides_a_later_step(family):
    """Each has any value here before a step that begins after a file was read."""
    (changed, *run), (_, *expected) = (
        two_optimizers(family, SpikeGuard(window=4)) for _ in range(2)
    )

    def take(step, left, letters):
        return [step(letter, n) or left() for n, letter in enumerate(letters)]

    assert take(*run, "TTTTNNNTT") == take(*expected, "TTTTNNNTT")
    engine = changed["second"].engine
    kept = {**engine.record.kept, "last_largest": engine.loss_scale.last_largest}
    for name, variable in kept.items():
        if name not in {*vars(StepState()), "overflow_seen"}:
            variable.assign(tf.ones_like(variable) * 3)
    assert take(*run, "TNTNNNNTNNNT") == take(*expected, "TNTNNNNTNNNT")
