"""Each public attribute of Keras's own wrappers and of optimizers: whose it is here.

They are listed by themselves: one that a new Keras adds fails these tests until it is
known whether the wrapper, the inner optimizer or the loss scale must answer.
"""

from __future__ import annotations

import pytest
import tensorflow as tf
from models import inner_variables, variable_of

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer, SpikeGuard

#: What the loss scale answers, DynamicLossScale(64, 7) here, and one that is fixed. A
#: string is the name of its variable.
OF_THE_SCALE = {
    "dynamic": (True, False),
    "dynamic_counter": ("good_steps", None),
    "dynamic_growth_steps": (7, None),
    "dynamic_scale": ("current_loss_scale", None),
    "initial_scale": (64.0, 8.0),
    "step_counter": ("good_steps", None),
}
#: What the wrapper answers for itself.
OWN = {"built", "inner_optimizer", "loss_scale", "loss_scale_factor", "name"}
OWN |= {"variables", "weights"}
#: Keras's methods that do the same on a wrapper.
INHERITED = {
    # Keras's wrapper calls the inner optimizer's.
    *("add_slot", "finalize_variable_values", "get_slot", "get_slot_names"),
    # They change the variable, or look at the gradients, that they are given.
    *("assign", "assign_add", "assign_sub", "check_finite"),
    # They call our scaling and the inner optimizer's, or our `apply_gradients`.
    *("compute_gradients", "get_gradients", "get_updates", "minimize"),
    "add_weight",  # makes a variable that no optimizer keeps
    "save_own_variables",  # saves `variables`
    "update_step",  # raises: a wrapper has none
}


def made_unbuilt(family):
    return LossScaleOptimizer(family.optimizers.SGD(0.25), DynamicLossScale(64, 7))


def made(family, loss_scale=None):
    """Returns a built wrapper."""
    loss_scale = DynamicLossScale(64, 7) if loss_scale is None else loss_scale
    optimizer = LossScaleOptimizer(family.optimizers.SGD(0.25), loss_scale)
    optimizer.build([variable_of(family, [1.0, 2.0])])
    return optimizer


def public(thing):
    return {name for name in dir(thing) if not name.startswith("_")}


def listed(family):
    """Returns the public attributes of Keras's own wrapper and of every optimizer."""
    keras, optimizers = family.keras, family.optimizers
    own = keras.mixed_precision.LossScaleOptimizer(optimizers.SGD(0.25))
    every = public(optimizers.SGD(0.25)) & public(optimizers.Adam(0.25))
    # In Keras 3 its state is created with the slots.
    return sorted(public(own) | every | {"dynamic_scale", "step_counter"})


def test_each_method_is_ours_or_known_to_do_the_same(family):
    optimizer = made(family)
    unknown = {}
    for name in listed(family):
        owner = next((c for c in type(optimizer).__mro__ if name in vars(c)), None)
        is_ours = owner is not None and owner.__module__.startswith("lossscale")
        is_method = owner is not None and callable(getattr(owner, name))
        if is_method and not is_ours and name not in INHERITED:
            unknown[name] = owner
    assert unknown == {}


def test_each_setting_is_the_inner_optimizers(family):
    optimizer = made(family)
    inner = optimizer.inner_optimizer
    seen = set()
    for name in set(listed(family)) - OWN - set(OF_THE_SCALE):
        if callable(getattr(type(optimizer), name, None)):
            continue
        if name in vars(inner):  # what nobody can answer by chance
            before, marker = vars(inner)[name], object()
            object.__setattr__(inner, name, marker)
            assert getattr(optimizer, name) is marker, name
            object.__setattr__(inner, name, before)
        else:
            assert getattr(optimizer, name) is getattr(inner, name), name
        seen.add(name)
    assert {"clipnorm", "clipvalue", "iterations", "learning_rate"} <= seen


@pytest.mark.parametrize("is_guarded", [False, True])
def test_the_loss_scale_answers_for_itself(family, is_guarded):
    scale, fixed = DynamicLossScale(64, 7), FixedLossScale(8)
    optimizer = made(family, SpikeGuard(scale) if is_guarded else scale)
    fixed = made(family, SpikeGuard(fixed) if is_guarded else fixed)
    for name, (answer, of_fixed) in OF_THE_SCALE.items():
        found = getattr(optimizer, name)
        if isinstance(answer, str):
            assert found is getattr(scale, answer), name
        else:
            assert found == answer, name
        assert getattr(fixed, name) == of_fixed, name
    wrapper = LossScaleOptimizer(family.optimizers.SGD(0.25), DynamicLossScale(2))
    assert wrapper.initial_scale == 2.0  # before it is built, too


@pytest.mark.parametrize("name", OF_THE_SCALE)
def test_what_the_loss_scale_does_cannot_be_set_on_the_wrapper(family, name):
    optimizer = made(family)
    with pytest.raises(AttributeError, match=r"got 3 for .* DynamicLossScale\(\.\.\."):
        setattr(optimizer, name, 3)


def test_a_variable_that_is_added_is_the_inner_optimizers(family):
    if family.name == "keras2-legacy":
        pytest.skip("legacy optimizers have add_weight, whose variables none keeps")
    optimizer = made(family)
    added = optimizer.add_variable(shape=(), name="mine")
    for variables in (inner_variables(optimizer), optimizer.variables):
        assert sum(added is variable for variable in variables) == 1


def test_iterations_are_set_as_on_a_bare_optimizer(family):
    def outcome(optimizer):
        """Returns what `iterations` are once they were set, or the error."""
        try:
            optimizer.iterations = 7
        except Exception as error:
            return type(error), str(error)
        return optimizer.iterations

    bare = family.optimizers.SGD(0.25)
    assert outcome(made_unbuilt(family)) == outcome(bare)
    if family.name == "keras2-legacy":
        assert outcome(made_unbuilt(family)) == 7


def test_iterations_may_be_a_variable_of_the_users(family):
    if family.name == "keras3":
        pytest.skip("Keras 3's optimizers have no iterations to set")
    optimizer = made_unbuilt(family)
    steps = tf.Variable(7, dtype=tf.int64)
    optimizer.iterations = steps
    optimizer.build([variable_of(family, [1.0, 2.0])])
    assert optimizer.iterations is optimizer.inner_optimizer.iterations is steps
