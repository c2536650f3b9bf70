"""Each public attribute of Keras's own wrappers and of optimizers: whose it is here.

They are listed by themselves: one that a new Keras adds fails these tests until it is
known whether the wrapper, the inner optimizer or the loss scale must answer.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from exact import gradients
from limits import TENSORFLOW
from models import inner_variables, variable_of

from lossscale import DynamicLossScale, FixedLossScale, LossScaleOptimizer
from lossscale.runtime import keras_versions

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


def made(family, loss_scale=None):
    """Returns a wrapper."""
    loss_scale = DynamicLossScale(64, 7) if loss_scale is None else loss_scale
    return LossScaleOptimizer(family.optimizers.SGD(0.25), loss_scale)


def built(family, loss_scale=None):
    optimizer = made(family, loss_scale)
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


def test_each_setting_is_the_inner_optimizers(family):
    optimizer, seen = built(family), set()
    inner = optimizer.inner_optimizer
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


def test_the_loss_scale_answers_for_itself(family):
    scale = DynamicLossScale(64, 7)
    optimizer, fixed = built(family, scale), built(family, FixedLossScale(8))
    for name, (answer, of_fixed) in OF_THE_SCALE.items():
        found = getattr(optimizer, name)
        if isinstance(answer, str):
            assert found is getattr(scale, answer), name
        else:
            assert found == answer, name
        assert getattr(fixed, name) == of_fixed, name
    assert made(family).initial_scale == 64.0  # before it is built, too


@pytest.mark.parametrize("name", OF_THE_SCALE)
def test_what_the_loss_scale_does_cannot_be_set_on_the_wrapper(family, name):
    optimizer = built(family)
    with pytest.raises(AttributeError, match=r"got 3 for .* DynamicLossScale\(\.\.\."):
        setattr(optimizer, name, 3)


def loss_of(variable):
    return tf.reduce_sum(tf.square(tf.convert_to_tensor(variable)))


def pairs_for(optimizer, variables):
    """Returns scaled gradients, if the optimizer is wrapped, with their variables."""
    is_wrapped = isinstance(optimizer, LossScaleOptimizer)
    scale = optimizer.scale_loss if is_wrapped else tf.identity
    return list(zip(gradients(scale, 2.0, variables), variables))


def stored(optimizer):
    """Returns what Keras saves of an optimizer, by name: Keras 3 saves two of ours."""
    inner, store = getattr(optimizer, "inner_optimizer", optimizer), {}
    is_keras2 = hasattr(type(optimizer), "lr")
    (optimizer if is_keras2 else inner).save_own_variables(store)
    return {name: np.array(value) for name, value in store.items()}


def reloaded(optimizer, variables):
    before = stored(optimizer)
    optimizer.apply_gradients(pairs_for(optimizer, variables))
    optimizer.load_own_variables(before)


def weights_of(optimizer):
    found = optimizer.variables
    found = found() if callable(found) else found
    return [np.array(v.numpy()) for v in found]


def config_of(optimizer):
    config = optimizer.get_config()
    return config.get("inner_optimizer", {"config": config})["config"]


#: Public method of a Keras's base class -> a call of it.
METHODS = {
    "add_optimizer_variables": lambda o, v: o.add_optimizer_variables(v, "mine"),
    "add_slot": lambda o, v: o.add_slot(v[0], "mine"),
    "add_variable": lambda o, _v: o.add_variable(shape=(), name="mine"),
    "add_variable_from_reference": lambda o, v: o.add_variable_from_reference(
        v[0], "mine"
    ),
    "add_weight": lambda o, _v: o.add_weight("mine", (2,)),
    "aggregate_gradients": lambda o, v: o.aggregate_gradients([(v[0] + 1.0, v[0])]),
    "apply": lambda o, v: o.apply([grad for grad, _ in pairs_for(o, v)]),
    "apply_gradients": lambda o, v: o.apply_gradients(pairs_for(o, v)),
    "assign": lambda o, v: o.assign(v[0], [5.0, 6.0]),
    "assign_add": lambda o, v: o.assign_add(v[0], [5.0, 6.0]),
    "assign_sub": lambda o, v: o.assign_sub(v[0], [5.0, 6.0]),
    "build": lambda o, v: o.build(v),
    "compute_gradients": lambda o, v: o.compute_gradients(lambda: loss_of(v[0]), v),
    "exclude_from_weight_decay": lambda o, v: o.exclude_from_weight_decay(var_list=v),
    "finalize_variable_values": lambda o, v: o.finalize_variable_values(v),
    "from_config": lambda o, _v: config_of(type(o).from_config(o.get_config())),
    "get_config": lambda o, _v: config_of(o),
    "get_gradients": lambda o, v: o.get_gradients(loss_of(v[0]), v),
    "get_slot": lambda o, v: [o.get_slot(v[0], n) for n in sorted(o.get_slot_names())],
    "get_slot_names": lambda o, _v: sorted(o.get_slot_names()),
    "get_updates": lambda o, v: o.get_updates(loss_of(v[0]), v),
    "get_weights": lambda o, _v: o.get_weights(),
    "load_own_variables": reloaded,
    "minimize": lambda o, v: o.minimize(lambda: loss_of(v[0]), v),
    "save_own_variables": lambda o, _v: [*stored(o).values()],
    "set_weights": lambda o, _v: o.set_weights([w + w for w in weights_of(o)]),
    "stateless_apply": lambda o, v: o.stateless_apply(o.variables, [v[0]], [v[0]]),
    "variables": lambda o, _v: weights_of(o),
}
#: Attributes of that class.
ATTRIBUTES = ["clipnorm", "clipvalue", "global_clipnorm", "iterations"]
ATTRIBUTES += ["learning_rate", "lr", "weights"]
METHODS.update({n: lambda o, _v, name=n: getattr(o, name) for n in ATTRIBUTES})
#: Methods that list all variables, those of the loss scale, too.
LISTS = {"get_weights", "save_own_variables", "variables", "weights"}
#: What a wrapper does otherwise, and why.
OTHERWISE = {
    "check_finite": "Keras 3's own looks at the gradients that it is given",
    "get_scaled_loss": "it multiplies by the loss scale",
    "get_unscaled_gradients": "it divides by the loss scale",
    "scale_loss": "it multiplies by the loss scale",
    "update_step": "it raises: gradients of one variable alone are never checked",
}


def plain(value):
    """Returns an answer with arrays in the place of variables and tensors."""
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if hasattr(value, "numpy"):
        return np.array(value.numpy()).tolist()
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def outcome(family, method, is_wrapped, is_built):
    """Returns the answer of a method or its error, and what it has left."""
    variables = [variable_of(family, [1.0, 2.0])]
    optimizer = family.optimizers.Adam(0.25, name="mine")
    if is_wrapped:
        optimizer = LossScaleOptimizer(optimizer, 64.0, name="mine")
        # Such values are no optimizer's, and only the loss scale has a bool.
        optimizer.loss_scale.skipped_steps.assign(-1)
        optimizer.loss_scale.consecutive_skipped_steps.assign(-2)
    if is_built:
        optimizer.apply_gradients(pairs_for(optimizer, variables))
    try:
        answer = plain(METHODS[method](optimizer, variables))
    except Exception as error:
        answer = type(error), str(error)
    left = [plain(variables), plain(inner_variables(optimizer))]
    if method in LISTS and not isinstance(answer, tuple):
        answer = [v for v in answer if v not in (-1, -2) and not isinstance(v, bool)]
    return answer, left


def public_of_bases(family):
    """Returns the public attributes of the base class of a family's optimizers."""
    if family.name == "keras3":
        return public(family.keras.optimizers.Optimizer)
    is_legacy = family.name == "keras2-legacy"
    generations = keras_versions.generations(family.keras)
    (base,) = [each for legacy, _, each in generations if legacy == is_legacy]
    return public(base)


@pytest.mark.every
@pytest.mark.parametrize("is_built", [False, True], ids=["unbuilt", "built"])
def test_each_method_answers_as_the_bare_optimizers(family, is_built):
    names, wrapper = public_of_bases(family), type(made(family))
    names |= {n for n in listed(family) if callable(getattr(wrapper, n, None))}
    assert names - {*METHODS} - {*OTHERWISE} == set()
    if family.name == "keras2-new" and TENSORFLOW < (2, 11):
        # The experimental optimizers of 2.10 return and list no `iterations`.
        names -= {"apply_gradients", "variables"}
    differ = {}
    for name in sorted(names & {*METHODS}):
        bare, wrapped = (outcome(family, name, each, is_built) for each in (0, 1))
        if bare != wrapped:
            differ[name] = (bare, wrapped)
    assert differ == {}


def test_iterations_are_set_as_on_a_bare_optimizer(family):
    def outcome(optimizer):
        """Returns what `iterations` are once they were set, or the error."""
        try:
            optimizer.iterations = 7
        except Exception as error:
            return type(error), str(error)
        return optimizer.iterations

    bare = family.optimizers.SGD(0.25)
    assert outcome(made(family)) == outcome(bare)
    if family.name == "keras2-legacy":
        assert outcome(made(family)) == 7
