"""LossScaleOptimizer in custom loops of both kinds, on every Keras."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from exact import gradients as gradients_of
from exact import heard
from limits import skip_without
from models import compiled, variable_of

from lossscale import (
    DynamicLossScale,
    LossScale,
    LossScaleManager,
    LossScaleOptimizer,
    LossScaleWarning,
)

MODES = ["eager", "graph"]
#: For what XLA may run otherwise: branches, and what is kept from one list to the next.
AND_XLA = [*MODES, "xla"]
LOOPS = ["keras2", "keras3"]


def sgd(family, loss_scale=None, rate=1.0):
    if loss_scale is None:
        loss_scale = DynamicLossScale(8.0, 1000)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(rate), loss_scale)
    variable = variable_of(family, [1.0, 2.0])
    return optimizer, variable


def value(variable):
    return np.array(variable.numpy())


def gradients(optimizer, variable, factor, loop, clip=None):
    """Returns a step's gradients as the loop hands them in: d(factor * v)/dv."""
    grads = gradients_of(optimizer.scale_loss, factor, [variable])
    if loop == "keras2":
        grads = optimizer.get_unscaled_gradients(grads)
        if clip:
            grads = [tf.clip_by_value(grad, -clip, clip) for grad in grads]
    return grads


def make_step(optimizer, variable, loop, mode, clip=None):
    def step(factor):
        grads = gradients(optimizer, variable, factor, loop, clip)
        optimizer.apply_gradients(zip(grads, [variable]))

    return compiled(step, mode)


@pytest.mark.peer_defect(16)
@pytest.mark.parametrize("mode", AND_XLA)
@pytest.mark.parametrize("loop", LOOPS)
def test_either_loop_runs_on_either_keras(family, loop, mode):
    optimizer, variable = sgd(family)
    step = make_step(optimizer, variable, loop, mode)
    step(tf.constant([0.25, 0.5]))
    np.testing.assert_array_equal(value(variable), [0.75, 1.5])
    step(tf.constant([np.inf, 0.5]))
    np.testing.assert_array_equal(value(variable), [0.75, 1.5])
    assert float(optimizer.loss_scale) == 4.0
    step(tf.constant([0.25, 0.5]))
    np.testing.assert_array_equal(value(variable), [0.5, 1.0])
    assert int(optimizer.iterations.numpy()) == 2


@pytest.mark.peer_defect(24)
@pytest.mark.parametrize("mode", AND_XLA)
def test_clipping_cannot_hide_an_overflow(family, mode):
    optimizer, variable = sgd(family)
    step = make_step(optimizer, variable, "keras2", mode, clip=0.125)
    step(tf.constant([0.25, -0.5]))
    np.testing.assert_array_equal(value(variable), [0.875, 2.125])
    step(tf.constant([np.inf, 0.5]))
    np.testing.assert_array_equal(value(variable), [0.875, 2.125])
    assert optimizer.loss_scale.skipped_steps.numpy() == 1
    step(tf.constant([0.25, -0.5]))
    np.testing.assert_array_equal(value(variable), [0.75, 2.25])


@pytest.mark.parametrize("mode", MODES)
def test_the_user_can_make_a_finite_gradient_bad(family, mode):
    optimizer, variable = sgd(family)

    def step(spoil):
        grads = gradients(optimizer, variable, tf.constant([1.0, 1.0]), "keras2")
        optimizer.apply_gradients([(grads[0] * spoil, variable)])

    compiled(step, mode)(tf.constant(np.nan))
    np.testing.assert_array_equal(value(variable), [1.0, 2.0])
    assert optimizer.loss_scale.skipped_steps.numpy() == 1


@pytest.mark.parametrize("mode", AND_XLA)
def test_flags_of_several_unscalings_are_anded(family, mode):
    optimizer, first = sgd(family)
    second = variable_of(family, [4.0])

    def step(factor):
        optimizer.scale_loss(tf.constant(1.0))
        one = optimizer.get_unscaled_gradients([factor * 8.0 * tf.ones([2])])
        two = optimizer.get_unscaled_gradients([tf.constant([8.0])])
        one = [tf.clip_by_value(one[0], -1.0, 1.0)]
        optimizer.apply_gradients(zip([*one, *two], [first, second]))

    step = compiled(step, mode)
    step(tf.constant(0.5))
    np.testing.assert_array_equal(value(first), [0.5, 1.5])
    np.testing.assert_array_equal(value(second), [3.0])
    step(tf.constant(np.nan))
    np.testing.assert_array_equal(value(first), [0.5, 1.5])
    np.testing.assert_array_equal(value(second), [3.0])


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("mode", AND_XLA)
def test_two_lists_of_one_loss_are_applied_or_skipped_each(family, loop, mode):
    # The scale grows in between; both belong to a loss multiplied by 8.
    optimizer, variable = sgd(family, DynamicLossScale(8.0, 1, hysteresis=5))

    def step(first):
        one = optimizer.scale_loss(tf.constant(1.0))
        for true in (first, tf.constant([0.0, 1.0])):
            grads = [true * one]
            if loop == "keras2":
                grads = optimizer.get_unscaled_gradients(grads)
            optimizer.apply_gradients(zip(grads, [variable]))

    step = compiled(step, mode)
    step(tf.constant([1.0, 0.0]))
    np.testing.assert_array_equal(value(variable), [0.0, 1.0])
    step(tf.constant([np.inf, 0.0]))
    np.testing.assert_array_equal(value(variable), [0.0, 0.0])


@pytest.mark.parametrize("mode", MODES)
def test_a_list_applied_again_is_looked_at_again(family, mode):
    # The second unscaling tells nothing of the first one's gradients.
    optimizer, variable = sgd(family, DynamicLossScale(8.0, 1000))

    def step(special):
        optimizer.scale_loss(tf.constant(1.0))
        first = optimizer.get_unscaled_gradients([special])
        optimizer.apply_gradients(zip(first, [variable]))
        optimizer.get_unscaled_gradients([tf.constant([8.0, 8.0])])
        optimizer.apply_gradients(zip(first, [variable]))

    compiled(step, mode)(tf.constant([np.inf, 0.0]))
    np.testing.assert_array_equal(value(variable), [1.0, 2.0])
    assert optimizer.loss_scale.skipped_steps.numpy() == 2


@pytest.mark.parametrize("mode", MODES)
def test_unscaling_twice_is_an_error(family, mode):
    optimizer, variable = sgd(family)

    def step():
        once = gradients(optimizer, variable, tf.constant([1.0, 1.0]), "keras2")
        optimizer.get_unscaled_gradients(once)

    says = "`grads` must be gradients of the scaled loss.*Unscale each gradient once"
    with pytest.raises(ValueError, match=says):
        compiled(step, mode)()


class TestNeverScaled:
    """Row 8: no learning, no word. Ours learns, and says the missing line."""

    @pytest.mark.peer_defect(8)
    @pytest.mark.parametrize("mode", MODES)
    def test_it_warns_once_and_learns(self, family, mode):
        optimizer, variable = sgd(family, DynamicLossScale())

        def step():
            optimizer.apply_gradients([(tf.constant([0.5, 0.5]), variable)])

        step = compiled(step, mode)
        with heard() as told:
            for _ in range(2):
                step()
        (message,) = told
        assert "optimizer.scale_loss" in message
        assert "# <- add" in message
        np.testing.assert_array_equal(value(variable), [0.0, 1.0])

    @pytest.mark.peer_defect(8)
    def test_unscaling_alone_is_not_scaling(self, family):
        optimizer, variable = sgd(family)
        grads = optimizer.get_unscaled_gradients([tf.constant([8.0, 8.0])])
        with pytest.warns(LossScaleWarning, match="never scaled"):
            optimizer.apply_gradients(zip(grads, [variable]))
        np.testing.assert_array_equal(value(variable), [0.0, 1.0])


class TestSeveralTraces:
    """Functions of TensorFlow that hold a part of a step, or several steps."""

    @pytest.mark.parametrize("loop", LOOPS)
    def test_a_flag_of_one_trace_never_reaches_another(self, family, loop):
        optimizer, variable = sgd(family, DynamicLossScale(8.0, 1))

        def abandoned():  # scaled, never applied
            gradients(optimizer, variable, tf.constant([1.0, 1.0]), loop)

        for mode in AND_XLA:
            step = make_step(optimizer, variable, loop, mode)
            for abandon in (abandoned, tf.function(abandoned)):
                abandon()
                before = value(variable)
                step(tf.constant([0.25, 0.5]))
                np.testing.assert_array_equal(value(variable), before - [0.25, 0.5])

    @pytest.mark.parametrize("loop", LOOPS)
    def test_whole_steps_in_a_loop_of_tensorflow(self, family, loop):
        optimizer, variable = sgd(family)

        @tf.function
        def steps(factors):
            for factor in factors:
                grads = gradients(optimizer, variable, factor, loop)
                optimizer.apply_gradients(zip(grads, [variable]))

        steps(tf.constant([[0.25, 0.5], [np.inf, 0.5], [0.25, 0.5]]))
        np.testing.assert_array_equal(value(variable), [0.5, 1.0])


class TestNoGradients:
    """`[]` and all None follow what that Keras does without a wrapper."""

    @pytest.mark.parametrize("grads", [[], [None]], ids=str)
    @pytest.mark.parametrize("mode", MODES)
    def test_as_without_a_wrapper(self, family, grads, mode):
        answers = []
        for wrap in (False, True):
            optimizer, variable = sgd(family)
            optimizer.scale_loss(tf.constant(1.0))
            which = optimizer if wrap else family.optimizers.SGD(1.0)

            def step(which=which, variable=variable):
                which.apply_gradients(list(zip(grads, [variable])))

            try:
                compiled(step, mode)()
                answers.append("fine")
            except Exception as error:
                answers.append((type(error), str(error).split(":")[0][:40]))
            np.testing.assert_array_equal(value(variable), [1.0, 2.0])
            assert optimizer.loss_scale.skipped_steps.numpy() == 0
        assert answers[0] == answers[1]

    @pytest.mark.filterwarnings("ignore:.*radients do not exist")
    @pytest.mark.parametrize("mode", MODES)
    def test_some_none(self, family, mode):
        optimizer, variable = sgd(family, 8)
        other = variable_of(family, [4.0])

        def step():
            one = optimizer.scale_loss(tf.constant(1.0))
            grads = [tf.constant([1.0, 1.0]) * one, None]
            optimizer.apply_gradients(zip(grads, [variable, other]))

        compiled(step, mode)()
        np.testing.assert_array_equal(value(variable), [0.0, 1.0])
        np.testing.assert_array_equal(value(other), [4.0])


@pytest.mark.peer_defect(18)
def test_apply_gradients_tells_the_true_iterations(family):
    optimizer, variable = sgd(family)
    for factor, expected in ((1.0, 1), (np.inf, 1), (1.0, 2)):
        grads = gradients(optimizer, variable, tf.constant([factor, 0.0]), "keras3")
        returned = optimizer.apply_gradients(zip(grads, [variable]))
        assert int(returned.numpy()) == expected == int(optimizer.iterations.numpy())


@pytest.mark.peer_defect(17)
@pytest.mark.parametrize("loop", LOOPS)
def test_float16_variables_at_a_scale_beyond_float16(family, loop):
    optimizer, _ = sgd(family, DynamicLossScale(2.0**26))
    variable = variable_of(family, [1.0], "float16")
    scaled = optimizer.scale_loss(tf.constant(2.0, tf.float16))
    assert float(scaled) == 2.0**27
    grads = [tf.reshape(tf.cast(scaled * 2.0**-12, tf.float16), [1])]
    if loop == "keras2":
        grads = optimizer.get_unscaled_gradients(grads)
    optimizer.apply_gradients(zip(grads, [variable]))
    assert float(value(variable)[0]) == float(np.float16(1 - 2.0**-11))


def test_a_function_as_loss_is_scaled_when_it_is_called(family):
    optimizer, _ = sgd(family)
    scaled = optimizer.get_scaled_loss(lambda: tf.constant(2.0))
    assert float(scaled()) == 16.0


@pytest.mark.parametrize("mode", MODES)
def test_minimize(family, mode):
    skip_without("minimize", family)
    optimizer, variable = sgd(family, rate=0.25)

    def loss():
        return tf.reduce_sum(variable**2)

    def step():
        optimizer.minimize(loss, [variable])

    compiled(step, mode)()
    np.testing.assert_array_equal(value(variable), [0.5, 1.0])


@pytest.mark.parametrize("mode", MODES)
def test_a_fixed_scale_builds_no_branch_and_no_check(family, mode):
    optimizer, variable = sgd(family, 8.5)
    step = make_step(optimizer, variable, "keras3", mode)
    step(tf.constant([0.25, 0.5]))
    np.testing.assert_allclose(value(variable), [0.75, 1.5])
    if mode == "graph":
        graph = step.get_concrete_function(tf.constant([0.25, 0.5])).graph
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


class ByTwo(LossScaleManager):
    """A user's own manager."""

    def __init__(self):
        super().__init__()
        self.scale = tf.Variable(8.0, trainable=False)

    def get_loss_scale(self):
        return tf.convert_to_tensor(self.scale)

    def update_loss_scale(self, finite_grads):
        new = tf.where(finite_grads, self.scale * 2, self.scale / 2)
        return self.scale.assign(new, read_value=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("divides", ["apply", "unscaled", "by hand"])
def test_a_loss_scale_that_returns_its_variable(family, divides, mode):
    optimizer, variable = sgd(family, Bare())

    def step():
        scale = optimizer.loss_scale
        grads = gradients_of(lambda loss: loss * scale, [0.25, 0.5], [variable])
        if divides == "unscaled":
            grads = optimizer.get_unscaled_gradients(grads)
        if divides == "by hand":
            grads = [grad / scale for grad in grads]
        optimizer.apply_gradients(zip(grads, [variable]))

    step = compiled(step, mode)
    before = value(variable)
    for _ in range(2):
        step()
    np.testing.assert_array_equal(before - value(variable), [0.5, 1.0])
    assert float(optimizer.loss_scale) == 32.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("make", "clip"), [(each, clip) for each in (Doubling, ByTwo) for clip in (0, 0.25)]
)
def test_a_users_own_loss_scale_drives_the_optimizer(family, make, mode, clip):
    optimizer, variable = sgd(family, make())
    loop = "keras2" if clip else "keras3"
    step = make_step(optimizer, variable, loop, mode, clip)
    seen = []
    for factor in (0.25, np.inf, 0.25):
        step(tf.constant([factor, 0.0]))
        seen.append(float(optimizer.loss_scale))
    assert seen == [16.0, 8.0, 16.0]
    np.testing.assert_array_equal(value(variable), [0.5, 2.0])


@pytest.mark.parametrize("mode", MODES)
def test_an_update_that_says_true_applies_every_step(family, mode):
    optimizer, variable = sgd(family, Shrugging())
    make_step(optimizer, variable, "keras3", mode)(tf.constant([np.inf, 0.0]))
    assert not np.isfinite(value(variable)).all()


@pytest.mark.peer_defect(19)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradients(family, loop, mode):
    optimizer, _ = sgd(family)
    table = variable_of(family, np.ones([5, 2], np.float32))

    def step(values):
        scaled = optimizer.scale_loss(values)
        grads = [tf.IndexedSlices(scaled, tf.constant([1, 3]), tf.constant([5, 2]))]
        if loop == "keras2":
            grads = optimizer.get_unscaled_gradients(grads)
            assert isinstance(grads[0], tf.IndexedSlices)
        optimizer.apply_gradients(zip(grads, [table]))

    step = compiled(step, mode)
    if mode == "graph" and family.name == "keras3":
        optimizer.build([table])
        graph = step.get_concrete_function(tf.ones([2, 2])).graph
        made = [output.shape for op in graph.get_operations() for output in op.outputs]
        assert [5, 2] not in made  # nothing is made dense
    step(tf.constant([[0.5, 0.5], [0.25, 0.25]]))
    expected = np.array([[1, 1], [0.5, 0.5], [1, 1], [0.75, 0.75], [1, 1]])
    np.testing.assert_array_equal(value(table), expected)
    step(tf.constant([[0.5, 0.5], [0.25, np.nan]]))
    np.testing.assert_array_equal(value(table), expected)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("mode", AND_XLA)
def test_equal_rows_of_float16_that_add_up_to_infinity(family, loop, mode):
    optimizer = LossScaleOptimizer(family.optimizers.SGD(2.0**-10), DynamicLossScale(1))
    table = variable_of(family, np.ones([5, 2], np.float16), "float16")
    optimizer.build([table])

    def step(values, indices):
        optimizer.scale_loss(tf.constant(1.0))
        grads = [tf.IndexedSlices(values, indices, tf.constant([5, 2]))]
        if loop == "keras2":
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(zip(grads, [table]))

    step = compiled(step, mode)
    values = tf.constant([[4e4, 0], [4e4, 1]], tf.float16)
    step(values, tf.constant([3, 3]))
    np.testing.assert_array_equal(value(table), np.ones([5, 2]))
    assert optimizer.loss_scale.skipped_steps.numpy() == 1
    (found,) = optimizer.nonfinite_gradients()
    assert (found.kind, found.variable) == ("inf", table)
    step(values, tf.constant([3, 1]))
    assert optimizer.loss_scale.skipped_steps.numpy() == 1
    np.testing.assert_array_equal(value(table)[3], [1 - 40000 / 1024, 1])


@pytest.mark.peer_defect(15)
@pytest.mark.parametrize(
    "name",
    ["clipnorm", "global_clipnorm", "clipvalue", "weight_decay", "learning_rate"],
)
def test_settings_of_the_wrapper_are_the_inner_optimizers(family, name):
    if name == "weight_decay":
        skip_without(name, family)
    optimizer, variable = sgd(family)
    setattr(optimizer, name, 0.125)
    assert float(np.array(getattr(optimizer.inner_optimizer, name))) == 0.125
    assert float(np.array(getattr(optimizer, name))) == 0.125
    if "clip" in name:
        make_step(optimizer, variable, "keras3", "eager")(tf.constant([4.0, 0.0]))
        np.testing.assert_array_equal(value(variable), [0.875, 2.0])


def test_a_loss_scale_factor_on_the_wrapper_is_refused(family):
    skip_without("loss_scale_factor", family)
    optimizer, _ = sgd(family)
    with pytest.raises(AttributeError, match=r"got 2.0 for .*, or, to set the value"):
        optimizer.loss_scale_factor = 2.0


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("mode", AND_XLA)
def test_a_variable_that_accumulates_may_be_reset_before_the_apply(family, clips, mode):
    optimizer, variable = sgd(family)
    total = tf.Variable([0.0, 0.0])

    def step(factor):
        optimizer.scale_loss(tf.constant(1.0))
        total.assign_add(factor * 8.0)
        grads = optimizer.get_unscaled_gradients([total])
        total.assign([0.0, 0.0])
        if clips:
            grads = [tf.clip_by_value(grad, -1.0, 1.0) for grad in grads]
        optimizer.apply_gradients([(grads[0], variable)])

    step, before = compiled(step, mode), value(variable)
    for factor in ([1.0, 1.0], [np.inf, 1.0], [1.0, 1.0]):
        step(tf.constant(factor))
        optimizer.loss_scale.current_loss_scale.assign(8.0)
    np.testing.assert_array_equal(value(variable), before - 2.0)
    assert int(optimizer.loss_scale.skipped_steps.numpy()) == 1
    assert [each.kind for each in optimizer.nonfinite_gradients()] == ["inf"]


class TestSession:
    """tf.compat.v1 graphs: Keras 2's legacy optimizers only, newer ones cannot."""

    @pytest.mark.parametrize("clips", [False, True])
    def test_what_is_finite_is_applied_though_its_sum_is_not(self, family, clips):
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

    def test_minimize_in_a_graph(self, family):
        skip_without("a tf.compat.v1 graph", family)
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variable = tf.Variable([1.0, 2.0])
            optimizer = LossScaleOptimizer(
                family.optimizers.SGD(0.25), DynamicLossScale(8.0, 2)
            )
            factor = tf.compat.v1.placeholder(tf.float32, [2])
            train = optimizer.minimize(
                lambda: tf.reduce_sum(factor * variable), [variable]
            )
            scale = optimizer.loss_scale()
            session.run(tf.compat.v1.global_variables_initializer())
            seen = []
            for value in (1.0, np.inf, 1.0, 1.0):
                session.run(train, {factor: [value, 0.0]})
                seen.append((session.run(variable)[0], session.run(scale)))
            assert seen == [(0.75, 8.0), (0.75, 4.0), (0.5, 4.0), (0.25, 8.0)]
            assert session.run(optimizer.iterations) == 3

    def test_fit_of_keras_in_a_graph(self, family):
        skip_without("a tf.compat.v1 graph", family)
        keras = family.keras
        with tf.Graph().as_default(), tf.compat.v1.Session().as_default():
            model = keras.Sequential([keras.layers.Dense(1, input_shape=(2,))])
            optimizer = LossScaleOptimizer(family.optimizers.SGD(0.01))
            model.compile(optimizer, loss="mse")
            x, y = np.ones([8, 2], np.float32), np.ones([8, 1], np.float32)
            first = model.train_on_batch(x, y)
            weights = model.get_weights()
            model.train_on_batch(x * np.inf, y)
            for before, after in zip(weights, model.get_weights()):
                np.testing.assert_array_equal(before, after)
            assert model.train_on_batch(x, y) < first
