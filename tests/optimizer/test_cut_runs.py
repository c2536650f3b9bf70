"""What decides a step is in the files; what no file holds decides nothing later.

Here of optimizers that share a loss scale, and of an engine: a model's run is in
test_routes.py.
"""

import pytest
import tensorflow as tf
from exact import of_loss
from models import build, inner_variables, variable_of

from lossscale import DynamicLossScale, LossScaleEngine, LossScaleOptimizer, SpikeGuard
from lossscale.runtime import keras_versions

INF, NAN = float("inf"), float("nan")
#: By letter the loss and the gradient of a step: good, a bad loss, an overflow, and
#: one that a guard leaves out.
STEPS = {"T": (1.0, 1.0), "N": (NAN, NAN), "O": (1.0, INF), "S": (1.0, 2.0**9)}
SKIPS = {"nonfinite_loss": "skip"}


def two_optimizers(family):
    """Returns two that share a loss scale, by name, a step of each, and what it left.

    The second one applies in every third step only.
    """
    scale, optimizers = DynamicLossScale(2.0**4, 3, search_period=1), {}

    def step_of(name, guard):
        inner, variable = family.optimizers.SGD(0.0), variable_of(family, [1.0])
        optimizer = LossScaleOptimizer(inner, scale, guard=guard, **SKIPS)
        optimizers[name] = optimizer
        build(optimizer, [variable])

        def step(loss, grad):
            grads = of_loss(optimizer.scale_loss, loss, [grad])
            grads = optimizer.get_unscaled_gradients(grads)
            optimizer.apply_gradients([(grads[0], variable)])

        return step

    first, second = step_of("first", None), step_of("second", SpikeGuard(window=4))
    return optimizers, [first, first, second], scale


def an_engine(_):
    scale = DynamicLossScale(2.0**4, 1000, search_period=1)
    engine, variable = LossScaleEngine(scale, **SKIPS), tf.Variable([1.0])

    def step(loss, grad):
        grads = of_loss(engine.scale_loss, loss, [grad])
        engine.apply(grads, [variable], lambda *_: None)

    return {"engine": engine}, [step] * 3, scale


def taken(steps, scale, letters, first=0):
    """Takes steps from one on, and returns the state of the loss scale after each."""
    states = []
    for number, letter in enumerate(letters[first:], first):
        loss, grad = STEPS[letter]
        steps[number % 3](tf.constant(loss), tf.constant([grad]))
        states.append([float(scale), *(v.numpy().tolist() for v in scale.variables)])
    return states


@pytest.mark.parametrize("made", [two_optimizers, an_engine])
def test_a_run_that_is_cut_between_two_steps_is_the_run(family, tmp_path, made):
    # So many that the level of bad losses is known at the cuts, and decides after them.
    letters, cuts = "TTTTTTNNNNNNNNNNNNTTTNNNNNNNNNOTSTTT", (0, 9, 21, 30)
    (held, *run), (used, *resumed), whole = made(family), made(family), []
    for number, end in zip(cuts, (*cuts[1:], len(letters))):
        tf.train.Checkpoint(**held).write(str(tmp_path / str(number)))
        whole += taken(*run, letters[:end], number)
    assert len({scale for scale, *_ in whole}) > 4
    for number in cuts[1:]:  # each time after other steps
        tf.train.Checkpoint(**used).read(str(tmp_path / str(number))).expect_partial()
        assert taken(*resumed, letters, number) == whole[number:], number


#: Names of variables that a step uses and no file holds. None decides a later step: the
#: run above goes on from a file whatever they are.
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
        optimizers, steps, _ = two_optimizers(family)
    like = tf.TensorSpec([]), tf.TensorSpec([1])
    concrete = [tf.function(step).get_concrete_function(*like) for step in steps[1:]]
    handles = {id(handle) for each in concrete for handle in each.captured_inputs}
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
