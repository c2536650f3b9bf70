"""LossScaleOptimizer in custom loops of both kinds, on every Keras."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from exact import S, Trained, clip, gradients, heard
from limits import skip_without
from models import built, compiled, variable_of

from lossscale import (
    DynamicLossScale,
    LossScale,
    LossScaleOptimizer,
    LossScaleWarning,
)
from lossscale.runtime.keras_versions import variable_name

INF = float("inf")
#: The gradients of a step, and those with an infinity among them.
GOOD, BAD = [0.5] * 4, [INF, 0.5, 0.5, 0.5]
MODES = ["eager", "graph"]
#: For what XLA may run otherwise: branches, and what is kept from one list to the next.
AND_XLA = [*MODES, "xla"]
XLA_LATER = [*MODES, pytest.param("xla", marks=pytest.mark.slow)]
#: A loop of Keras 2 unscales, and one of Keras 3 does not.
loops = pytest.mark.parametrize(
    "get", [Trained.unscaled, Trained.scaled], ids=["keras2", "keras3"]
)


@pytest.fixture
def trained(family):
    """Returns an optimizer that is not built yet, with its variable."""
    return Trained(family)


@pytest.mark.smoke
@pytest.mark.peer_defect(24)
@pytest.mark.parametrize("mode", AND_XLA)
def test_clipping_cannot_hide_an_overflow(trained, mode):
    step = compiled(lambda factor: trained.apply(clip(trained.unscaled(factor))), mode)
    for factor, subtracted in (([-2.0] * 4, -1.0), (BAD, -1.0), (GOOD, -0.5)):
        step(tf.constant(factor))
        assert trained.subtracted() == subtracted
    assert trained.state() == (S / 2, 1, 1)


@pytest.mark.parametrize("mode", MODES)
def test_the_user_can_make_a_finite_gradient_bad(trained, mode):
    def step(spoil):
        trained.apply([grad * spoil for grad in trained.unscaled(0.5)])

    compiled(step, mode)(tf.constant(np.nan))
    assert trained.subtracted() == 0.0
    assert trained.state() == (S / 2, 0, 1)


@pytest.mark.parametrize("mode", XLA_LATER)
def test_flags_of_several_unscalings_are_anded(family, mode):
    trained = Trained(family, sizes=(4, 2))
    unscale = trained.optimizer.get_unscaled_gradients

    def step(factor):
        one, two = trained.scaled(0.5)
        one, two = unscale([one * factor]), unscale([two])
        trained.apply([*clip(one), *two])

    step = compiled(step, mode)
    for factor in (1.0, np.nan):
        step(tf.constant(factor))
        assert trained.subtracted() == [0.5, 0.5]


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("mode", XLA_LATER)
def test_two_lists_of_one_loss_are_applied_or_skipped_each(family, unscales, mode):
    """The scale grows in between. Both are divided by what multiplied the loss."""
    trained = Trained(family, DynamicLossScale(S, 1, hysteresis=5))

    def step(factor):
        (grad,) = trained.scaled(0.5)
        for grads in ([grad * factor], [grad]):
            if unscales:
                grads = trained.optimizer.get_unscaled_gradients(grads)  # noqa: PLW2901
            trained.apply(grads)

    step = compiled(step, mode)
    for factor, subtracted in ((1.0, 1.0), (INF, 1.5)):
        step(tf.constant(factor))
        assert trained.subtracted() == subtracted


@pytest.mark.parametrize("mode", MODES)
def test_a_list_applied_again_is_looked_at_again(trained, mode):
    """The second unscaling tells nothing of the first one's gradients."""

    def step(factor):
        (grad,) = trained.scaled(0.5)
        first = trained.optimizer.get_unscaled_gradients([grad * factor])
        trained.apply(first)
        trained.optimizer.get_unscaled_gradients([grad])
        trained.apply(first)

    compiled(step, mode)(tf.constant(INF))
    assert trained.subtracted() == 0.0
    assert trained.state()[2] == 2


@pytest.mark.parametrize("mode", MODES)
def test_unscaling_twice_is_an_error(trained, mode):
    def step():
        trained.optimizer.get_unscaled_gradients(trained.unscaled(0.5))

    says = "`grads` must be gradients of the scaled loss.*Unscale each gradient once"
    with pytest.raises(ValueError, match=says):
        compiled(step, mode)()


@pytest.mark.peer_defect(8)
@pytest.mark.parametrize("mode", MODES)
def test_a_loss_that_was_never_scaled_is_told_of_once(trained, mode):
    step = compiled(lambda: trained.apply([tf.constant(GOOD)]), mode)
    with heard() as told:
        for _ in range(2):
            step()
    (message,) = told
    name = variable_name(trained.variables[0])
    assert message.startswith(f"LossScaleOptimizer for {name!r}: The loss was never")
    assert "optimizer.scale_loss" in message
    assert "# <- add" in message
    assert trained.subtracted() == 1.0


@pytest.mark.peer_defect(8)
def test_unscaling_alone_is_not_scaling(trained):
    grads = trained.optimizer.get_unscaled_gradients([tf.fill([4], S)])
    with pytest.warns(LossScaleWarning, match="never scaled"):
        trained.apply(grads)
    assert trained.subtracted() == 1.0


@loops
def test_a_flag_of_one_trace_never_reaches_another(family, get):
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


@pytest.mark.parametrize("grads", [[], [None]], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_without_any_gradient_it_does_as_a_bare_optimizer(family, grads, mode):
    answers = []
    for wrap in (False, True):
        trained = Trained(family)
        trained.optimizer.scale_loss(tf.constant(1.0))
        which = trained.optimizer if wrap else family.optimizers.SGD(1.0)

        def step(which=which, variables=trained.variables):
            which.apply_gradients(list(zip(grads, variables)))

        try:
            compiled(step, mode)()
            answers.append("fine")
        except Exception as error:
            answers.append((type(error), str(error).split(":")[0][:40]))
        assert trained.subtracted() == 0.0
        assert trained.state()[2] == 0
    assert answers[0] == answers[1]


@pytest.mark.peer_defect(18)
def test_apply_gradients_tells_the_true_iterations(trained):
    for factor, expected in ((1.0, 1), (INF, 1), (1.0, 2)):
        pairs = zip(trained.scaled(factor), trained.variables)
        returned = trained.optimizer.apply_gradients(pairs)
        assert int(returned.numpy()) == expected
        assert int(trained.optimizer.iterations.numpy()) == expected


@pytest.mark.peer_defect(17)
@pytest.mark.parametrize("unscales", [True, False])
def test_float16_variables_at_a_scale_beyond_float16(family, unscales):
    optimizer = Trained(family, DynamicLossScale(2.0**26)).optimizer
    variable = variable_of(family, [1.0], "float16")
    scaled = optimizer.scale_loss(tf.constant(2.0, tf.float16))
    assert float(scaled) == 2.0**27
    grads = [tf.reshape(tf.cast(scaled * 2.0**-12, tf.float16), [1])]
    if unscales:
        grads = optimizer.get_unscaled_gradients(grads)
    optimizer.apply_gradients(zip(grads, [variable]))
    assert float(np.array(variable.numpy())[0]) == float(np.float16(1 - 2.0**-11))


def test_a_function_as_loss_is_scaled_when_it_is_called(trained):
    scaled = trained.optimizer.get_scaled_loss(lambda: tf.constant(2.0))
    assert float(scaled()) == 2.0 * S


@pytest.mark.parametrize("mode", MODES)
def test_minimize(family, trained, mode):
    skip_without("minimize", family)
    (variable,) = trained.variables

    def loss():
        return tf.reduce_sum(variable**2) / 4.0

    def step():
        trained.optimizer.minimize(loss, [variable])

    compiled(step, mode)()
    assert trained.subtracted() == 4.0


@pytest.mark.parametrize("mode", MODES)
def test_a_fixed_scale_builds_no_branch_and_no_check(family, mode):
    trained = Trained(family, 8.5)
    step = compiled(lambda: trained.apply(trained.scaled(0.5)), mode)
    step()
    np.testing.assert_allclose(trained.subtracted(), 0.5)
    if mode == "graph":
        graph = step.get_concrete_function().graph
        types = {op.type for op in graph.get_operations()}
        assert not types & {"If", "StatelessIf", "IsFinite"}


class Doubling(LossScale):
    """Overrides `update` whole, as TensorFlow's interface allowed."""

    def __init__(self):
        super().__init__()
        self._scale = self._add_weight("scale", 8.0, tf.float32)

    def __call__(self):
        return tf.convert_to_tensor(self._scale)

    def update(self, grads):
        is_finite = tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(grad)) for grad in tf.nest.flatten(grads)]
        )
        new = tf.where(is_finite, self._scale * 2, self._scale / 2)
        return self._scale.assign(new, read_value=False), is_finite

    def get_config(self):
        return {}


class Bare(Doubling):
    """Returns its variable, as one writes it without a thought."""

    def __call__(self):
        return self._scale


class Shrugging(Doubling):
    """Applies every step, and says so with the Python value True."""

    def update(self, grads):
        super().update(grads)
        return None, True


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("divides", ["apply", "unscaled", "by hand"])
def test_a_loss_scale_that_returns_its_variable(family, divides, mode):
    trained = Trained(family, Bare())

    def step():
        scale = trained.optimizer.loss_scale
        grads = gradients(lambda loss: loss * scale, 0.5, trained.variables)
        if divides == "unscaled":
            grads = trained.optimizer.get_unscaled_gradients(grads)
        if divides == "by hand":
            grads = [grad / scale for grad in grads]
        trained.apply(grads)

    step = compiled(step, mode)
    for _ in range(2):
        step()
    assert trained.subtracted() == 1.0
    assert float(trained.optimizer.loss_scale) == 32.0


@pytest.mark.parametrize("mode", MODES)
def test_an_update_that_says_true_applies_every_finite_step(family, mode):
    trained = Trained(family, Shrugging())
    step = compiled(lambda c: trained.apply(trained.scaled(c)), mode)
    for coefficient in (1.0, INF, 1.0):
        step(tf.constant(coefficient))
    assert trained.subtracted() == 2.0


def make_step_of_rows(optimizer, table, unscales, mode):
    """Returns a step with a gradient of some rows of a table of 5 x 2."""

    def step(values, indices):
        scale = tf.cast(optimizer.scale_loss(tf.constant(1.0)), values.dtype)
        grads = [tf.IndexedSlices(values * scale, indices, tf.constant([5, 2]))]
        if unscales:
            grads = optimizer.get_unscaled_gradients(grads)
            assert isinstance(grads[0], tf.IndexedSlices)
        optimizer.apply_gradients(zip(grads, [table]))

    return compiled(step, mode)


@pytest.mark.peer_defect(19)
@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradients(family, unscales, mode):
    optimizer, table = built(family, DynamicLossScale(8.0), np.ones([5, 2]))
    step = make_step_of_rows(optimizer, table, unscales, mode)
    rows = tf.constant([1, 3])
    if mode == "graph" and family.name == "keras3":
        graph = step.get_concrete_function(tf.ones([2, 2]), rows).graph
        made = [output.shape for op in graph.get_operations() for output in op.outputs]
        assert [5, 2] not in made  # nothing is made dense
    expected = np.array([[1, 1], [0.5, 0.5], [1, 1], [0.75, 0.75], [1, 1]])
    for last in (0.25, np.nan):
        step(tf.constant([[0.5, 0.5], [0.25, last]]), rows)
        np.testing.assert_array_equal(table.numpy(), expected)


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("mode", XLA_LATER)
def test_equal_rows_of_float16_that_add_up_to_infinity(family, unscales, mode):
    scale, ones = DynamicLossScale(1), np.ones([5, 2])
    optimizer, table = built(family, scale, ones, 2.0**-10, "float16")
    step = make_step_of_rows(optimizer, table, unscales, mode)
    values = tf.constant([[4e4, 0], [4e4, 1]], tf.float16)
    step(values, tf.constant([3, 3]))
    np.testing.assert_array_equal(table.numpy(), ones)
    assert scale.skipped_steps.numpy() == 1
    (found,) = optimizer.nonfinite_gradients()
    assert (found.kind, found.variable) == ("inf", table)
    step(values, tf.constant([3, 1]))
    assert scale.skipped_steps.numpy() == 1
    np.testing.assert_array_equal(table.numpy()[3], [1 - 40000 / 1024, 1])


@pytest.mark.peer_defect(15)
@pytest.mark.parametrize(
    "name",
    ["clipnorm", "global_clipnorm", "clipvalue", "weight_decay", "learning_rate"],
)
def test_settings_of_the_wrapper_are_the_inner_optimizers(family, name):
    if name == "weight_decay":
        skip_without(name, family)
    trained = Trained(family, sizes=(1,))
    setattr(trained.optimizer, name, 0.125)
    for optimizer in (trained.optimizer, trained.optimizer.inner_optimizer):
        assert float(np.array(getattr(optimizer, name))) == 0.125
    if "clip" in name:
        trained.apply(trained.scaled(4.0))
        assert trained.subtracted() == 0.125


def test_a_loss_scale_factor_on_the_wrapper_is_refused(family, trained):
    skip_without("loss_scale_factor", family)
    with pytest.raises(AttributeError, match=r"got 2.0 for .*, or, to set the value"):
        trained.optimizer.loss_scale_factor = 2.0


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("mode", XLA_LATER)
def test_a_variable_that_accumulates_may_be_reset_before_the_apply(
    trained, clips, mode
):
    optimizer, total = trained.optimizer, tf.Variable(tf.zeros([4]))

    def step(factor):
        total.assign_add(trained.scaled(factor)[0])
        grads = optimizer.get_unscaled_gradients([total])
        total.assign(tf.zeros([4]))
        trained.apply(clip(grads) if clips else grads)

    step = compiled(step, mode)
    for factor in (1.0, INF, 1.0):
        step(tf.constant(factor))
        optimizer.loss_scale.current_loss_scale.assign(S)
    assert trained.subtracted() == 2.0
    assert trained.state()[2] == 1
    assert [each.kind for each in optimizer.nonfinite_gradients()] == ["inf"]


# tf.compat.v1 graphs: Keras 2's legacy optimizers only, newer ones cannot.


@pytest.mark.every
@pytest.mark.parametrize("clips", [False, True])
def test_what_is_finite_is_applied_though_its_sum_is_not(family, clips):
    skip_without("a tf.compat.v1 graph", family)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.Variable([0.0, 0.0])
        loss_scale = DynamicLossScale(1.0)
        optimizer = LossScaleOptimizer(family.optimizers.SGD(1.0), loss_scale)
        factor = tf.compat.v1.placeholder(tf.float32, [2])
        loss = optimizer.scale_loss(tf.reduce_sum(factor * variable))
        grads = optimizer.get_unscaled_gradients(tf.gradients(loss, [variable]))
        if clips:
            grads = [tf.clip_by_value(grad, -1.0, 1.0) for grad in grads]
        train = optimizer.apply_gradients([(grads[0], variable)])
        session.run(tf.compat.v1.global_variables_initializer())
        for value, skipped in (([3e38, 3e38], 0), ([np.inf, 1.0], 1)):
            session.run(train, {factor: value})
            assert session.run(loss_scale.skipped_steps) == skipped
            assert (session.run(variable) < 0.0).all()
