"""Keras's own calls, and optimizers of the user's that Keras calls as they are."""

import re
import warnings

import h5py
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same, data, regression, scale_state, variable_of, whole_state

from lossscale import DynamicLossScale, LossScaleOptimizer, LossScaleWarning


def only_keras3(family):
    if family.name != "keras3":
        pytest.skip("Keras 2 has no such call")


def built(family, loss_scale=None):
    """Returns a model whose optimizer has its slots."""
    loss_scale = DynamicLossScale(64.0, 7) if loss_scale is None else loss_scale
    optimizer = LossScaleOptimizer(family.optimizers.Adam(0.25), loss_scale)
    model = regression(family, optimizer)
    optimizer.build(model.trainable_variables)
    return model


def test_the_state_of_a_model_is_got_and_set_as_a_tree(family, rng):
    only_keras3(family)
    if not hasattr(family.keras.Model, "get_state_tree"):
        pytest.skip("this Keras has no state tree")
    model = built(family)
    model.optimizer.loss_scale.adjust(True)
    tree, before = model.get_state_tree("numpy_array"), whole_state(model)
    mine = tree["optimizer_variables"]["loss_scale_optimizer"]
    assert (mine["current_loss_scale"], mine["good_steps"]) == (64.0, 1)
    # Orbax saves no scalar of NumPy's that is a bool.
    assert not any(isinstance(value, np.generic) for value in mine.values())
    model.run_eagerly = True
    model.train_on_batch(*data(rng, 16))
    model.optimizer.loss_scale.adjust(False)
    model.set_state_tree(tree)
    assert_same(whole_state(model), before)


def test_variables_are_keras_variables_of_the_loss_scale(family):
    only_keras3(family)
    optimizer = built(family).optimizer
    own = optimizer.loss_scale.variables
    for listed, variable in zip(optimizer.variables, own):
        assert isinstance(listed, family.keras.Variable)
        assert (listed.name, listed.path) == (variable.name, variable.path)
        assert listed.value is variable
    names = [variable.name for variable in optimizer.variables]
    optimizer.variables[names.index(optimizer.dynamic_scale.name)].assign(8)
    assert float(optimizer.loss_scale) == 8.0


def test_an_optimizer_that_is_built_before_it_is_wrapped_needs_no_variables(family):
    only_keras3(family)
    variable, inner = family.keras.Variable([1.0]), family.optimizers.SGD(1.0)
    inner.build([variable])
    optimizer = LossScaleOptimizer(inner, DynamicLossScale(64.0))
    for grad in (0.5, np.inf):
        optimizer.apply([optimizer.scale_loss(tf.constant([grad]))])
        assert variable.numpy().tolist() == [0.5]
    (fault,) = optimizer.nonfinite_gradients()
    assert fault.variable is variable


def test_values_of_another_shape_in_a_file_change_nothing(family):
    only_keras3(family)
    optimizer, store = built(family).optimizer, {}
    optimizer.save_own_variables(store)
    store.update(good_steps=np.int64(3), current_loss_scale=np.ones([2], np.float32))
    before = scale_state(optimizer)
    with pytest.raises(ValueError, match="`weights` must be the"):
        optimizer.load_own_variables(store)
    assert scale_state(optimizer) == before


class TestAnH5File:
    """Keras 3 builds the optimizer of an .h5 file before it knows the variables.

    That it is restored whole is in test_routes.py.
    """

    @pytest.fixture
    def saved(self, family, rng, tmp_path):
        only_keras3(family)
        model = built(family)
        model.run_eagerly = True
        model.train_on_batch(*data(rng, 16))
        model.optimizer.loss_scale.adjust(False)
        path = str(tmp_path / "model.h5")
        model.save(path)
        return model, path

    def test_what_was_set_since_stays_and_slots_of_other_variables_are_told(
        self, family, saved
    ):
        model, path = saved
        other = family.keras.models.load_model(path)
        other.optimizer.learning_rate = 0.5
        other.optimizer.iterations.assign(9)
        # The new wrapper has the same inner optimizer.
        optimizer = other.optimizer.with_loss_scale(DynamicLossScale(2.0))
        optimizer.build(other.trainable_variables)
        variables = optimizer.inner_optimizer.variables
        assert [float(v.numpy()) for v in variables[:2]] == [9.0, 0.5]
        assert float(optimizer.loss_scale) == 2.0
        expected = model.optimizer.inner_optimizer.variables[2:]
        assert_same([v.numpy() for v in variables[2:]], [v.numpy() for v in expected])
        optimizer = family.keras.models.load_model(path).optimizer
        with pytest.warns(LossScaleWarning, match="do not fit the variables"):
            optimizer.build([variable_of(family, np.ones([3], np.float32))])
        assert optimizer.built
        slots = optimizer.inner_optimizer.variables[2:]
        assert not any(np.any(slot.numpy()) for slot in slots)

    def test_a_file_written_before_it_is_built_is_told(self, family, saved, tmp_path):
        model, path = saved
        other = family.keras.models.load_model(path)
        with pytest.warns(LossScaleWarning, match="saved without its slots"):
            other.save(str(tmp_path / "first.keras"))
        other.optimizer.build(other.trainable_variables)
        with warnings.catch_warnings():
            warnings.simplefilter("error", LossScaleWarning)
            other.save(str(tmp_path / "second.keras"))
        assert_same(whole_state(other), whole_state(model))

    def test_no_other_call_takes_weights_before_the_build(self, family):
        only_keras3(family)
        optimizer = LossScaleOptimizer(family.optimizers.Adam(), 64.0)
        values = [np.array(v.numpy()) for v in optimizer.variables]
        with pytest.raises(ValueError, match="not yet been built"):
            optimizer.set_weights(values)
        optimizer.build([])  # as Keras's loader, which reads values with names
        with pytest.raises(ValueError, match="not yet been built"):
            optimizer.set_weights([*values, np.float32(0)])

    @pytest.mark.parametrize("wrong", ["more", "less"])
    def test_one_of_other_variables_changes_nothing(self, family, saved, wrong):
        """An optimizer with one variable more had learning rate 0 in silence."""
        _, path = saved
        with h5py.File(path, "a") as file:
            weights = file["optimizer_weights"]
            names = [*weights.attrs["weight_names"]]
            weights["loss_scale_optimizer/a_more"] = np.int64(0)
            more = [*names[:6], "loss_scale_optimizer/a_more", *names[6:]]
            weights.attrs["weight_names"] = more if wrong == "more" else names[1:]
        new = LossScaleOptimizer(family.optimizers.Adam(0.25), DynamicLossScale(64, 7))
        with pytest.warns(LossScaleWarning, match="`weights` must be the 8 values"):
            optimizer = family.keras.models.load_model(path).optimizer
        assert scale_state(optimizer) == scale_state(new)
        inner = optimizer.inner_optimizer.variables
        assert [float(v.numpy()) for v in inner] == [0.0, 0.25]


#: Of a gradient, and of its variable. Rows of a table are in test_engine.py.
SHAPES = [([3], [1]), ([1], [3]), ([], [3]), ([3], [2, 3]), ([2, 1], [2, 3])]


@pytest.mark.parametrize(("of_grad", "of_variable"), SHAPES)
def test_a_gradient_of_a_wrong_shape_is_taken_or_refused_as_by_a_bare_optimizer(
    family, of_grad, of_variable
):
    def after_a_step(optimizer):
        """Returns the values after a step, and the error if there is one."""
        ones, error = np.ones(of_variable, np.float32), None
        found = [variable_of(family, [1.0, 2.0]), variable_of(family, ones, name="w")]
        if hasattr(optimizer, "build"):
            optimizer.build(found)

        def step():
            scale = getattr(optimizer, "scale_loss", tf.identity)(1.0)
            grads = [tf.ones([2]) * scale, tf.ones(of_grad) * scale]
            optimizer.apply_gradients(zip(grads, found))

        try:
            tf.function(step)()
        except (ValueError, tf.errors.InvalidArgumentError) as caught:
            error = caught
        return [variable.numpy() for variable in found], error

    bare, refused = after_a_step(family.optimizers.SGD(0.25))
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.25), DynamicLossScale(8.0))
    before = scale_state(optimizer)
    values, error = after_a_step(optimizer)
    if refused is None or of_variable != [1]:
        assert type(error) is type(refused)
        if error is None:
            assert_same(values, bare)
    else:  # the inner optimizer might have broadcast it
        assert re.search(r"`grads` must .* got \(.*\) for 'w'", str(error))
        assert scale_state(optimizer) == before
        assert values[0].tolist() == [1.0, 2.0]
        assert optimizer.iterations.numpy() == 0
