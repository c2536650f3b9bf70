"""What a custom loop may do with a wrapped optimizer, on every Keras.

That both kinds of loops train in every mode is in test_loops_in_every_mode.py.
"""

import numpy as np
import pytest
import tensorflow as tf
from exact import S, Trained, clip, gradients, heard
from models import built, compiled
from strategies import last_replica_gets, scope_of

from lossscale import DynamicLossScale
from lossscale.runtime.keras_versions import variable_name

INF, NAN = float("inf"), float("nan")
MODES = ["eager", "graph"]


# What a step makes of a list of gradients, or of two.


def spoil(trained, factor):
    """The user's own operations can make a finite gradient bad."""
    trained.apply([grad * factor for grad in trained.unscaled(0.5)])


def unscale_in_parts(trained, factor):
    """One part is bad, and clipped: the list is skipped."""
    unscale = trained.optimizer.get_unscaled_gradients
    one, two = trained.scaled(0.5)
    one, two = unscale([one * factor]), unscale([two])
    trained.apply([*clip(one), *two])


def apply_two_lists(trained, factor, unscale=list):
    """Of one loss: each is applied or skipped, and divided by what multiplied it."""
    good = trained.scaled(0.5)
    for grads in ([grad * factor for grad in good], good):
        trained.apply(unscale(grads))


def unscale_and_apply_two_lists(trained, factor):
    apply_two_lists(trained, factor, trained.optimizer.get_unscaled_gradients)


def apply_a_list_again(trained, factor):
    """The second unscaling tells nothing of the first one's gradients."""
    good = trained.scaled(0.5)
    bad = trained.optimizer.get_unscaled_gradients([grad * factor for grad in good])
    trained.apply(bad)
    trained.optimizer.get_unscaled_gradients(good)
    trained.apply(bad)


def reset_what_accumulates(trained, factor, change=list):
    """Before the apply: what was unscaled is what the variable held then."""
    for total, grad in zip(trained.totals, trained.scaled(factor)):
        total.assign_add(grad)
    grads = trained.optimizer.get_unscaled_gradients(trained.totals)
    for total in trained.totals:
        total.assign(tf.zeros_like(total))
    trained.apply(change(grads))


def reset_and_clip(trained, factor):
    reset_what_accumulates(trained, factor, clip)


#: A step -> what was subtracted after a step with each factor, and the skipped steps.
STEPS = {
    spoil: ({1.0: 0.5, NAN: 0.5}, 1),
    unscale_in_parts: ({1.0: 0.5, NAN: 0.5}, 1),
    apply_two_lists: ({1.0: 1.0, INF: 1.5}, 1),
    unscale_and_apply_two_lists: ({1.0: 1.0, INF: 1.5}, 1),
    apply_a_list_again: ({INF: 0.0, 1.0: 1.0}, 2),
    reset_what_accumulates: ({1.0: 1.0, INF: 1.0, 0.5: 1.5}, 1),
    reset_and_clip: ({1.0: 1.0, INF: 1.0, 0.5: 1.5}, 1),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_what_is_bad_is_skipped_whatever_a_step_does_with_its_lists(family, step, mode):
    """The loss scale grows with each apply: no number fits but the loss's own."""
    expected, skipped = STEPS[step]
    trained = Trained(family, DynamicLossScale(S, 1, hysteresis=5), sizes=(4, 2))
    trained.totals = [tf.Variable(tf.zeros([size])) for size in (4, 2)]
    take = compiled(lambda factor: step(trained, factor), mode)
    for factor, subtracted in expected.items():
        take(tf.constant(factor))
        assert trained.subtracted() == [subtracted] * 2
    assert trained.state()[2] == skipped
    assert float(trained.optimizer.loss_scale) > S


@pytest.mark.parametrize("mode", MODES)
def test_unscaling_twice_is_an_error(trained, mode):
    def step():
        trained.optimizer.get_unscaled_gradients(trained.unscaled(0.5))

    says = "`grads` must be gradients of the scaled loss.*Unscale each gradient once"
    with pytest.raises(ValueError, match=says):
        compiled(step, mode)()


@pytest.mark.peer_defect(8)
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_loss_that_was_never_scaled_is_told_of_once(trained, mode, unscales):
    def step():
        grads = [tf.fill([4], S if unscales else 1.0)]
        if unscales:  # that is no scaling
            grads = trained.optimizer.get_unscaled_gradients(grads)
        trained.apply(grads)

    step = compiled(step, mode)
    with heard() as told:
        for _ in range(2):
            step()
    (message,) = told
    name = variable_name(trained.variables[0])
    assert message.startswith(f"LossScaleOptimizer for {name!r}: The loss was never")
    assert "optimizer.scale_loss" in message
    assert "# <- add" in message
    assert trained.subtracted() == 2.0


@pytest.mark.parametrize(
    "get", [Trained.unscaled, Trained.scaled], ids=["keras2", "keras3"]
)
def test_what_one_trace_has_seen_never_reaches_another(family, get):
    trained = Trained(family, DynamicLossScale(S, 1))

    def abandoned():  # scaled, never applied
        get(trained, 1.0)

    for mode in MODES:
        step = compiled(lambda: trained.apply(get(trained, 0.5)), mode)
        for abandon in (abandoned, tf.function(abandoned)):
            abandon()
            before = trained.subtracted()
            step()
            assert trained.subtracted() == before + 0.5


# What apply returns, and what it refuses.


@pytest.mark.each_keras
@pytest.mark.parametrize("grads", [[], [None]], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_without_any_gradient_it_does_as_a_bare_optimizer(family, grads, mode):
    trained = Trained(family)
    trained.optimizer.scale_loss(tf.constant(1.0))

    def answer(optimizer):
        def step():
            optimizer.apply_gradients(list(zip(grads, trained.variables)))

        try:
            compiled(step, mode)()
        except Exception as error:
            return type(error), str(error).split(":")[0][:40]
        return "fine"

    assert answer(trained.optimizer) == answer(family.optimizers.SGD(1.0))
    assert (trained.subtracted(), trained.state()[2]) == (0.0, 0)


@pytest.mark.each_keras
@pytest.mark.peer_defect(18)
def test_apply_gradients_tells_the_true_iterations(trained):
    for factor, expected in ((1.0, 1), (INF, 1), (1.0, 2)):
        pairs = zip(trained.scaled(factor), trained.variables)
        returned = trained.optimizer.apply_gradients(pairs)
        assert int(returned.numpy()) == expected
        assert int(trained.optimizer.iterations.numpy()) == expected
    # A function is scaled when it is called.
    scaled = trained.optimizer.get_scaled_loss(lambda: tf.constant(2.0))
    assert float(scaled()) == 2.0 * trained.state()[0]


def test_a_fixed_scale_builds_no_branch_and_no_check(family):
    trained = Trained(family, 8.5)
    step = tf.function(lambda: trained.apply(trained.scaled(0.5)))
    step()
    np.testing.assert_allclose(trained.subtracted(), 0.5)
    operations = step.get_concrete_function().graph.get_operations()
    assert not {op.type for op in operations} & {"If", "StatelessIf", "IsFinite"}


# Loss scales that override `update`: one that returns a flag is in scales/test_own.py.


class Doubling(DynamicLossScale):
    """Returns its variable, as one writes it without a thought."""

    def __call__(self):
        return self.current_loss_scale

    def update(self, grads):
        del grads
        doubled = 2.0 * self.current_loss_scale
        return self.current_loss_scale.assign(doubled, read_value=False), True


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("divides", ["apply", "unscaled", "by hand"])
def test_a_loss_scale_that_returns_its_variable(family, divides, mode):
    trained = Trained(family, Doubling(8.0))
    scale = trained.optimizer.loss_scale

    def step(factor):
        grads = gradients(lambda loss: loss * scale, factor, trained.variables)
        if divides == "unscaled":
            grads = trained.optimizer.get_unscaled_gradients(grads)
        if divides == "by hand":
            grads = [grad / scale for grad in grads]
        trained.apply(grads)

    step = compiled(step, mode)
    for factor, subtracted in ((0.5, 0.5), (INF, 0.5), (0.5, 1.0)):
        step(tf.constant(factor))  # it says True, but no infinity is applied
        assert trained.subtracted() == subtracted
    assert float(scale) == 64.0


# Rows of a table.


def apply_rows(optimizer, table, values, indices, unscales):
    """Takes a step with a gradient of some rows of a table of 5 x 2."""
    scale = tf.cast(optimizer.scale_loss(tf.constant(1.0)), values.dtype)
    grads = [tf.IndexedSlices(values * scale, indices, tf.constant([5, 2]))]
    if unscales:
        grads = optimizer.get_unscaled_gradients(grads)
        assert isinstance(grads[0], tf.IndexedSlices)
    optimizer.apply_gradients(zip(grads, [table]))


@pytest.mark.peer_defect(19)
@pytest.mark.parametrize("unscales", [True, False])
def test_rows_are_looked_at_without_the_rest_of_the_table(family, unscales):
    optimizer, table = built(family, DynamicLossScale(8.0), np.ones([5, 2]))
    step = tf.function(lambda *rows: apply_rows(optimizer, table, *rows, unscales))
    rows = tf.constant([1, 3])
    if family.name == "keras3":
        graph = step.get_concrete_function(tf.ones([2, 2]), rows).graph
        made = [output.shape for op in graph.get_operations() for output in op.outputs]
        assert [5, 2] not in made  # nothing is made dense
    expected = np.array([[1, 1], [0.5, 0.5], [1, 1], [0.75, 0.75], [1, 1]])
    for last in (0.25, NAN):
        step(tf.constant([[0.5, 0.5], [0.25, last]]), rows)
        np.testing.assert_array_equal(table.numpy(), expected)


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("on", ["one replica", "two"])
def test_equal_rows_of_float16_that_add_up_to_infinity(family, mirrored, unscales, on):
    """On one replica, or on all together."""
    strategy = mirrored if on == "two" else None
    with scope_of(strategy):
        scale, ones = DynamicLossScale(1), np.ones([5, 2])
        optimizer, table = built(family, scale, ones, 2.0**-10, "float16")

    def step(indices, of_last, special):
        value = 4e4 / tf.distribute.get_replica_context().num_replicas_in_sync
        values = tf.constant([[value, 0.0], [value, 1.0]])
        values = tf.cast(values + last_replica_gets(special, 0.0), tf.float16)
        indices = last_replica_gets(of_last, indices)
        apply_rows(optimizer, table, values, indices, unscales)

    on_each = lambda *args: strategy.run(step, args)  # noqa: E731
    run = tf.function(on_each if strategy else step)
    for indices, of_last, special, skipped in (
        ([3, 3], [1, 3], 0.0, 0),  # at most 6e4
        ([3, 3], [3, 3], 0.0, 1),  # 8e4
        ([0, 1], [3, 2], INF, 2),
    ):
        before = table.numpy()
        run(*map(tf.constant, (indices, of_last, special)))
        assert scale.skipped_steps.numpy() == skipped
        assert np.array_equal(table.numpy(), before) == (skipped > 0)
        faults = optimizer.nonfinite_gradients()
        assert [each.kind for each in faults] == ["inf"] * (skipped > 0)
