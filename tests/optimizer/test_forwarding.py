"""Whose each public attribute of Keras's wrappers and of optimizers is, and what shows.

The attributes are listed by themselves: one that a new Keras adds fails these tests
until it is known whether the wrapper, the inner optimizer or the loss scale answers.
"""

import inspect
import itertools

import numpy as np
import pytest
import tensorflow as tf
from exact import Trained, gradients
from limits import LIMITS, TENSORFLOW
from models import built, inner_variables, variable_of

from lossscale import (
    DynamicLossScale,
    FixedLossScaleManager,
    LossScaleMonitor,
    LossScaleOptimizer,
)
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


def made(family):
    """Returns a wrapper that is not built."""
    return LossScaleOptimizer(family.optimizers.SGD(0.25), DynamicLossScale(64, 7))


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
    (optimizer, _), seen = built(family, DynamicLossScale(64, 7)), set()
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


def test_the_loss_scale_answers_for_itself_and_is_not_set_on_the_wrapper(family):
    scale = DynamicLossScale(64, 7)
    (optimizer, _), (fixed, _) = built(family, scale), built(family, 8)
    told = r"got 3 for .* DynamicLossScale\(\.\.\.\)\), or, to set the value"
    for name, (answer, of_fixed) in OF_THE_SCALE.items():
        found = getattr(optimizer, name)
        if isinstance(answer, str):
            assert found is getattr(scale, answer), name
        else:
            assert found == answer, name
        assert getattr(fixed, name) == of_fixed, name
    factor = ["loss_scale_factor"] if family.name == "keras3" else []
    for name in [*OF_THE_SCALE, *factor]:
        with pytest.raises(AttributeError, match=told):
            setattr(optimizer, name, 3)
    assert made(family).initial_scale == 64.0  # before it is built, too


@pytest.mark.peer_defect(15)
def test_what_is_set_on_the_wrapper_is_set_on_the_inner_optimizer(family):
    clips = ["clipnorm", "global_clipnorm", "clipvalue"]
    has_decay = not LIMITS["weight_decay"][0](family)
    for name in [*clips, "learning_rate", *(["weight_decay"] if has_decay else [])]:
        trained = Trained(family, sizes=(1,))
        setattr(trained.optimizer, name, 0.125)
        for optimizer in (trained.optimizer, trained.optimizer.inner_optimizer):
            assert float(np.array(getattr(optimizer, name))) == 0.125
        if name in clips:
            trained.apply(trained.scaled(4.0))
            assert trained.subtracted() == 0.125


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
    "iterations": lambda o, _v: setattr(o, "iterations", 7) or o.iterations,
    "load_own_variables": reloaded,
    "minimize": lambda o, v: o.minimize(lambda: loss_of(v[0]), v),
    "save_own_variables": lambda o, _v: [*stored(o).values()],
    "set_weights": lambda o, _v: o.set_weights([w + w for w in weights_of(o)]),
    "stateless_apply": lambda o, v: o.stateless_apply(o.variables, [v[0]], [v[0]]),
    "variables": lambda o, _v: weights_of(o),
}
#: Attributes of that class.
ATTRIBUTES = ["clipnorm", "clipvalue", "global_clipnorm"]
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


@pytest.mark.each_keras
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


@pytest.mark.each_keras
def test_the_second_argument_is_a_name_or_what_the_inner_optimizer_has_there(family):
    seen = []

    class Clips(family.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, clip_norm=None, **kwargs):
            seen.append(clip_norm)
            kwargs.pop("name", None)
            return super().apply_gradients(grads_and_vars, **kwargs)

    kinds = (Clips, family.optimizers.SGD)
    for kind, second in itertools.product(kinds, (1.0, "name")):
        variable = variable_of(family, 2.0)
        optimizer = LossScaleOptimizer(kind(1.0), 8.0)
        optimizer.build([variable])
        optimizer.apply_gradients(pairs_for(optimizer, [variable]), second)
        assert float(np.array(variable)) == 0.0
    assert seen == [1.0 if family.name != "keras3" else None, None]


def test_the_signature_of_a_subclass_is_its_own(family):
    class Mine(type(LossScaleOptimizer(family.optimizers.SGD()))):
        def __init__(self, inner_optimizer, clip):
            super().__init__(inner_optimizer, 8.0)
            self._clip = clip

    assert list(inspect.signature(Mine).parameters) == ["inner_optimizer", "clip"]
    assert Mine(family.optimizers.SGD(), 2.0).loss_scale == 8.0


def test_wrappers_managers_and_monitors_show_what_they_are(family):
    optimizer = LossScaleOptimizer(family.optimizers.Adam(), DynamicLossScale(64))
    assert repr(optimizer).startswith("LossScaleOptimizer(Adam, DynamicLossScale(")
    assert "current_loss_scale=64.0" in repr(optimizer)
    with pytest.raises(TypeError, match="got a LossScaleOptimizer around a A") as told:
        LossScaleOptimizer(optimizer)
    assert "DynamicLossScale(" not in str(told.value)
    manager = FixedLossScaleManager(8)
    assert repr(manager).startswith("FixedLossScaleManager(FixedLossScale(")
    monitor = LossScaleMonitor(3, every=2)
    assert repr(monitor).startswith("LossScaleMonitor(patience=3, on_stall='warn', ev")


def test_private_names_that_programs_read(family):
    scale = DynamicLossScale(64)
    optimizer = LossScaleOptimizer(family.optimizers.SGD(), scale)
    assert float(optimizer._loss_scale().numpy()) == 64
    assert optimizer._loss_scale._current_loss_scale is scale.current_loss_scale
    assert optimizer._loss_scale._num_good_steps is scale.good_steps
    with pytest.raises(AttributeError):
        scale._num_good_steps = 3
    if family.name == "keras2-legacy":
        rate = optimizer._decayed_lr("float32")
        assert rate.numpy() == np.float32(0.01)


def test_an_optimizer_that_clips_what_it_computes_is_refused(family):
    # TensorFlow Privacy's clip gradients of each example as they compute them.
    kind = type("Dp", (family.optimizers.SGD,), {"__module__": "tensorflow_privacy.x"})
    for private in (kind, type("Mine", (kind,), {"__module__": "mine"})):
        with pytest.raises(ValueError, match=r"`inner_optimizer` must not clip"):
            LossScaleOptimizer(private(0.1))
    # One that clips when it applies, as all of Keras's can, sees the true gradients.
    LossScaleOptimizer(family.optimizers.SGD(0.1, clipnorm=1.0))
