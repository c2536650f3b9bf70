"""What users write and what files name: it is meant to be so, and stays so."""

import inspect
import re

import pytest
import tensorflow as tf
from every_loss_scale import DECLARED
from installed import families

import lossscale
from lossscale.runtime import registry

#: Every public callable and how it is called, methods of our own included, once where
#: a public base has them. A line that changes or goes breaks somebody's code: the
#: changelog says so.
PUBLIC = """
DynamicLossScale(initial_loss_scale=32768.0, increment_period=2000, multiplier=2.0, *,
    backoff_factor=None, hysteresis=1, hysteresis_reset=('growth', 'backoff'),
    min_loss_scale=1.0, max_loss_scale=None, search_period=None, backoff_cooldown=None,
    overflow_tolerance=None)
DynamicLossScale.from_preset(name, **overrides)
ExponentialUpdateLossScaleManager(init_loss_scale, incr_every_n_steps,
    decr_every_n_nan_or_inf=2, incr_ratio=2, decr_ratio=0.8)
FixedLossScale(loss_scale_value, skip_nonfinite=False)
FixedLossScaleManager(loss_scale)
ForwardRanges(names, counts, largest, batches, need_float32=(), inside=(), classes=(),
    is_inside_known=True, need_cast=())
ForwardRanges.plot(ax=None, *, rows=24)
GradientRanges(names, counts, largest, loss_scale, batches)
GradientRanges.at(loss_scale)
GradientRanges.plot(ax=None, *, rows=24)
Guard()
Guard.from_config(config)
Guard.get_config()
Guard.judge(state, largest)
HeadroomLossScale(initial_loss_scale=32768.0, headroom=4, half_life=100, *,
    increment_period=2000, min_loss_scale=1.0, max_loss_scale=None)
HeadroomLossScale.next_state(state, is_finite, largest=None)
LossScale(initial_loss_scale=None)
LossScale.__call__()
LossScale.adjust(is_finite, largest=None)
LossScale.from_config(config)
LossScale.get_config()
LossScale.keep_largest()
LossScale.next_state(state, is_finite)
LossScale.numpy()
LossScale.scale(loss)
LossScale.scale_by(loss, loss_scale)
LossScale.unscale(grads)
LossScale.unscale_by(grads, loss_scale)
LossScale.update(grads)
LossScaleEngine(loss_scale='dynamic', *, guard=None, communication_dtype=None,
    nonfinite_loss='backoff', gather=None)
LossScaleEngine.apply(grads, variables, apply_fn)
LossScaleEngine.build(variables)
LossScaleEngine.last_spike()
LossScaleEngine.nonfinite_gradients()
LossScaleEngine.nonfinite_loss()
LossScaleEngine.scale_loss(loss)
LossScaleEngine.unscale(grads)
LossScaleManager(name=None)
LossScaleManager.as_loss_scale()
LossScaleManager.get_loss_scale()
LossScaleManager.update_loss_scale(finite_grads)
LossScaleMonitor(patience=10, *, on_stall='warn', every=None, verbose=1,
    check_underflow=False, restore_statistics=False, optimizers=None, **others)
LossScaleMonitor.on_epoch_begin(epoch, logs=None)
LossScaleMonitor.on_epoch_end(epoch, logs=None)
LossScaleMonitor.on_test_begin(logs=None)
LossScaleMonitor.on_train_batch_begin(batch, logs=None)
LossScaleMonitor.on_train_begin(logs=None)
LossScaleMonitor.on_train_end(logs=None)
LossScaleMonitor.set_model(model)
LossScaleOptimizer(inner_optimizer, loss_scale='dynamic', name=None,
    dynamic_growth_steps=None, *, dynamic=None, initial_scale=None, guard=None,
    communication_dtype=None, nonfinite_loss='backoff', gather=None, **kwargs)
LossScaleOptimizer.from_config(config, custom_objects=None)
LossScaleOptimizer.from_keras(optimizer, *, guard=None, communication_dtype=None,
    nonfinite_loss='backoff')
LossScaleOptimizer.get_config()
LossScaleOptimizer.get_scaled_loss(loss)
LossScaleOptimizer.get_unscaled_gradients(grads)
LossScaleOptimizer.last_spike()
LossScaleOptimizer.nonfinite_gradients()
LossScaleOptimizer.nonfinite_loss()
LossScaleOptimizer.scale_loss(loss)
LossScaleOptimizer.with_loss_scale(loss_scale, *, guard='kept')
NonfiniteReport(where=None, layer=None, layer_class=None, kind=None, operation=None,
    dtype=None, largest=0.0, loss_scale=1.0, variables=(), is_hidden=False, seen='',
    to_write='', float16_variables='')
Simulation(loss_scale, is_finite, applied, final_loss_scale, limit=None)
Simulation.plot(ax=None)
SpikeGuard(loss_scale=None, *, threshold=6.0, window=128, max_in_a_row=3, min_ratio=2.0)
all_finite(grads)
deserialize(config, custom_objects=None)
find_nonfinite(model, x, y=None, sample_weight=None, *, loss=None, batch_size=None)
forward_ranges(model, x, y=None, sample_weight=None, *, batches=10, batch_size=None,
    verbose=1)
get(identifier)
gradient_ranges(model, x, y=None, sample_weight=None, *, loss=None, loss_scale=None,
    batches=10, batch_size=None, activations=False, verbose=1)
serialize(loss_scale)
simulate(loss_scale, *, guard=None, is_finite=None, limit=None, largest=None,
    bad_losses=None, nonfinite_loss='backoff')
"""
#: What is public besides: modules, and a class of warnings.
NOT_CALLED = {"compat", "presets", "LossScaleWarning"}
#: As `PUBLIC`, of `lossscale.compat.v1`: the signatures are TensorFlow's.
PUBLIC_OF_1 = """
LossScaleOptimizer(opt, loss_scale_manager, *, guard=None)
LossScaleOptimizer.apply_gradients(grads_and_vars, global_step=None, name=None)
LossScaleOptimizer.compute_gradients(loss, var_list=None, gate_gradients=1,
    aggregation_method=None, colocate_gradients_with_ops=False, grad_loss=None)
LossScaleOptimizer.get_slot(var, name)
LossScaleOptimizer.get_slot_names()
LossScaleOptimizer.variables()
MixedPrecisionLossScaleOptimizer(opt, loss_scale, *, guard=None)
enable_mixed_precision_graph_rewrite(opt, loss_scale='dynamic')
"""


def written(function):
    """Returns a signature without types: what a caller has to know."""
    signature = inspect.signature(function)
    given = [p for name, p in signature.parameters.items() if name != "self"]
    bare = [parameter.replace(annotation=parameter.empty) for parameter in given]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def public_callables(module=lossscale):
    """Yields every line of `PUBLIC`, as it is now, or the same of another module."""
    public = [getattr(module, name) for name in module.__all__]
    for name in sorted(set(module.__all__) - NOT_CALLED):
        called = thing = getattr(module, name)
        if thing is lossscale.LossScaleOptimizer:
            # It picks a class, and has its arguments.
            called = type(thing(families()[0].optimizers.SGD())).__init__
        yield f"{name}{written(called)}"
        for method, function in inspect.getmembers(thing, callable):
            home = getattr(function, "__module__", None) or ""
            is_ours = home.startswith("lossscale")
            if not is_ours or (method != "__call__" and method.startswith("_")):
                continue
            bases = getattr(thing, "__mro__", [None])[1:]
            above = [getattr(base, method, None) for base in bases if base in public]
            if written(function) not in [written(each) for each in above if each]:
                yield f"{name}.{method}{written(function)}"


@pytest.mark.parametrize(
    ("module", "listed"),
    [(lossscale, PUBLIC), (lossscale.compat.v1, PUBLIC_OF_1)],
    ids=["lossscale", "compat.v1"],
)
def test_how_public_callables_are_called(module, listed):
    # One line each: longer ones are folded there.
    expected = re.sub(r"\n {4}", " ", listed).strip().splitlines()
    assert list(public_callables(module)) == expected
    assert {*lossscale.__all__} > NOT_CALLED


def test_every_loss_scale_is_declared():
    public = [getattr(lossscale, name) for name in lossscale.__all__]
    classes = [each for each in public if inspect.isclass(each)]
    found = [each for each in classes if issubclass(each, lossscale.LossScale)]
    named = sorted(each.__name__ for each in found if each is not lossscale.LossScale)
    assert sorted(DECLARED) == named


def test_every_kerass_wrapper_is_called_alike(family):
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD())
    expected = next(
        line for line in public_callables() if line.startswith("LossScaleOptimizer(")
    )
    assert f"LossScaleOptimizer{written(optimizer.__init__)}" == expected
    assert f"LossScaleOptimizer{written(type(optimizer))}" == expected


#: The variables of every loss scale, as checkpoints name them.
OF_ALL = "consecutive_skipped_steps last_step_finite skipped_steps"


@pytest.mark.smoke
@pytest.mark.parametrize("name", DECLARED)
def test_names_of_variables_and_of_config_keys(name, tmp_path):
    loss_scale, declared = getattr(lossscale, name)(64.0), DECLARED[name]
    variables = sorted(f"{declared.variables} {OF_ALL}".split())
    assert sorted(v.name.split(":")[0] for v in loss_scale.variables) == variables
    assert keys_of(loss_scale, tmp_path) == variables
    assert sorted(loss_scale.get_config()) == declared.keys.split()


def test_names_of_a_guards_variables_and_config_keys(tmp_path):
    guard = lossscale.SpikeGuard()
    variables = ["above_in_a_row", "limit", "recent", "spikes"]
    names = sorted(each.name.split(":")[0] for each in guard.variables)
    assert names == [f"guard_{name}" for name in variables]
    assert keys_of(guard, tmp_path) == variables
    keys = ["max_in_a_row", "min_ratio", "threshold", "window"]
    assert sorted(guard.get_config()) == keys


def test_names_of_the_optimizers_classes_and_config_keys(family):
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD())
    kind, _, generation = family.name.partition("-")
    legacy = "Legacy" if generation == "legacy" else ""
    cls = type(optimizer)
    assert cls.__module__ == f"lossscale.optimizer.{kind}"
    assert cls.__name__ == "LossScaleOptimizer"  # TensorFlow and others ask for that
    assert cls.__qualname__ == f"{kind.capitalize()}{legacy}LossScaleOptimizer"
    registered = f"lossscale>{legacy}LossScaleOptimizer"
    assert registry.registered_name(cls) == registered
    config = optimizer.get_config()
    assert sorted(config) == ["inner_optimizer", "loss_scale", "name"]
    assert sorted(config["loss_scale"]) == ["class_name", "config"]


def keys_of(thing, folder):
    """Returns the names under which a checkpoint keeps the variables of something."""
    path = tf.train.Checkpoint(thing=thing).write(str(folder / "checkpoint"))
    keys = [key for key, _ in tf.train.list_variables(path) if key.startswith("thing/")]
    return sorted(key[len("thing/") :].partition("/.ATTRIBUTES")[0] for key in keys)
