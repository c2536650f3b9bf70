"""Imports point one way, and the public API is what it is meant to be."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from installed import families

import lossscale

ROOT = Path(lossscale.__file__).parent

#: The rooms. A module may import from those on the left of its own, and from its own
#: room what is listed before it on the door sign, the docstring of the `__init__`.
ARROWS = """
arguments presets plotting <- runtime <- gradients <- scales <-
optimizer | simulation | ranges <- monitor <- __init__ __main__
"""
#: Of each room or module, what it may import: all on the left of it.
LEFT = {}
for _group in ARROWS.replace("\n", " ").split("<-"):
    _left = set(LEFT)
    for _name in _group.replace("|", " ").split():
        LEFT[_name] = _left
LEFT["presets"] = {"arguments"}
ROOMS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def listed(room):
    """Returns the modules of a room in the order of its door sign."""
    sign = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
    lines = re.findall(r"(?m)^\* (.*?): ", sign)
    return [name for line in lines for name in re.findall(r"`(\w+)`", line)]


def imports(file):
    """Yields what a file imports of ours, wherever in it, as the parts of a name."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        names = [alias.name for alias in getattr(node, "names", [])]
        if isinstance(node, ast.Import):
            assert not any(name.startswith("lossscale.") for name in names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            package, *rest = node.module.split(".")
            if package == "lossscale":
                yield from [rest] if rest[1:] else ([*rest, name] for name in names)


def test_every_module_has_its_place():
    at_the_top = {path.stem for path in ROOT.glob("*.py")}
    assert at_the_top | set(ROOMS) == set(LEFT)
    for room in ROOMS:
        found = {path.stem for path in (ROOT / room).glob("*.py")} - {"__init__"}
        assert sorted(listed(room)) == sorted(found), room


@pytest.mark.parametrize("file", FILES)
def test_imports_point_one_way(file):
    room, _, module = file[: -len(".py")].rpartition("/")
    for target, *rest in imports(file):
        if target != room:
            assert target in LEFT[room or module]
        elif module != "__init__":
            order = listed(room)
            assert rest[0] in order[: order.index(module)]


def test_one_file_reduces_across_replicas():
    words = ("all_reduce", "reduce_to", "merge_call", "call_for_each_replica")
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        assert path.name == "replicas.py" or not used & set(words), path


def test_one_file_asks_for_versions():
    for path in ROOT.rglob("*.py"):
        source = path.read_text()
        assert path.name in ("kerases.py", "__init__.py") or "__version__" not in source


def test_files_are_short():
    for path in ROOT.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 300, path


#: Every public callable and how it is called, methods of our own included. A line that
#: changes or goes breaks somebody's code: the changelog says so.
PUBLIC = """
DynamicLossScale(initial_loss_scale=32768.0, increment_period=2000, multiplier=2.0, *,
    backoff_factor=None, hysteresis=1, hysteresis_reset=('growth', 'backoff'),
    min_loss_scale=1.0, max_loss_scale=None)
DynamicLossScale.__call__()
DynamicLossScale.adjust(is_finite)
DynamicLossScale.from_config(config)
DynamicLossScale.from_preset(name, **overrides)
DynamicLossScale.get_config()
DynamicLossScale.numpy()
DynamicLossScale.scale(loss)
DynamicLossScale.scale_by(loss, loss_scale)
DynamicLossScale.unscale(grads)
DynamicLossScale.unscale_by(grads, loss_scale)
DynamicLossScale.update(grads)
ExponentialUpdateLossScaleManager(init_loss_scale, incr_every_n_steps,
    decr_every_n_nan_or_inf=2, incr_ratio=2, decr_ratio=0.8)
ExponentialUpdateLossScaleManager.as_loss_scale()
ExponentialUpdateLossScaleManager.get_loss_scale()
ExponentialUpdateLossScaleManager.update_loss_scale(finite_grads)
FixedLossScale(loss_scale_value, skip_nonfinite=False)
FixedLossScale.__call__()
FixedLossScale.adjust(is_finite)
FixedLossScale.from_config(config)
FixedLossScale.get_config()
FixedLossScale.numpy()
FixedLossScale.scale(loss)
FixedLossScale.scale_by(loss, loss_scale)
FixedLossScale.unscale(grads)
FixedLossScale.unscale_by(grads, loss_scale)
FixedLossScale.update(grads)
FixedLossScaleManager(loss_scale)
FixedLossScaleManager.as_loss_scale()
FixedLossScaleManager.get_loss_scale()
FixedLossScaleManager.update_loss_scale(finite_grads)
GradientRanges(names, counts, largest, loss_scale, batches)
GradientRanges.at(loss_scale)
GradientRanges.plot(ax=None, *, rows=24)
LossScale()
LossScale.__call__()
LossScale.adjust(is_finite)
LossScale.from_config(config)
LossScale.get_config()
LossScale.numpy()
LossScale.scale(loss)
LossScale.scale_by(loss, loss_scale)
LossScale.unscale(grads)
LossScale.unscale_by(grads, loss_scale)
LossScale.update(grads)
LossScaleManager(name=None)
LossScaleManager.as_loss_scale()
LossScaleManager.get_loss_scale()
LossScaleManager.update_loss_scale(finite_grads)
LossScaleMonitor(patience=10, *, on_stall='warn', every=None, record=None, verbose=1)
LossScaleMonitor.on_epoch_begin(epoch, logs=None)
LossScaleMonitor.on_epoch_end(epoch, logs=None)
LossScaleMonitor.on_train_begin(logs=None)
LossScaleMonitor.on_train_end(logs=None)
LossScaleMonitor.set_model(model)
LossScaleOptimizer(inner_optimizer, loss_scale='dynamic', name=None)
LossScaleOptimizer.current_step()
LossScaleOptimizer.from_config(config, custom_objects=None)
LossScaleOptimizer.get_config()
LossScaleOptimizer.get_scaled_loss(loss)
LossScaleOptimizer.get_unscaled_gradients(grads)
LossScaleOptimizer.nonfinite_gradients()
LossScaleOptimizer.nonfinite_loss()
LossScaleOptimizer.scale_loss(loss)
Run(is_finite, loss_scale=None)
Simulation(loss_scale, is_finite, applied, final_loss_scale, limit=None)
Simulation.plot(ax=None)
all_finite(grads)
deserialize(config, custom_objects=None)
export_state(system, loss_scale)
get(identifier)
gradient_ranges(model, x, y=None, sample_weight=None, *, loss=None, loss_scale=None,
    batches=10, batch_size=None, activations=False, verbose=1)
import_state(system, state, **overrides)
load_run(path)
save_run(path, is_finite, loss_scale=None)
serialize(loss_scale)
simulate(loss_scale, *, is_finite=None, limit=None)
"""


def written(function):
    """Returns a signature without types: what a caller has to know."""
    signature = inspect.signature(function)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    empty = inspect.Signature.empty
    return str(signature.replace(parameters=bare, return_annotation=empty))


def public_callables():
    """Yields every line of `PUBLIC`, as it is now."""
    for name in sorted(set(lossscale.__all__) - {"presets", "LossScaleWarning"}):
        thing = getattr(lossscale, name)
        if name == "LossScaleOptimizer":  # it has the wrapper's arguments
            thing = type(thing(families()[0].optimizers.SGD()))
            yield f"{name}{written(thing.__init__)}"
            thing = lossscale.LossScaleOptimizer
        else:
            yield f"{name}{written(thing)}"
        for method, function in inspect.getmembers(thing, callable):
            module = getattr(function, "__module__", None) or ""
            is_ours = module.startswith("lossscale")
            if is_ours and (method == "__call__" or not method.startswith("_")):
                yield f"{name}.{method}{written(function)}"


def test_how_public_callables_are_called():
    # A line each, and longer ones folded.
    expected = re.sub(r"\n {4}", " ", PUBLIC).strip().splitlines()
    assert list(public_callables()) == expected


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_every_kerass_wrapper_is_called_alike(family):
    optimizer = lossscale.LossScaleOptimizer(family.optimizers.SGD())
    expected = next(
        line for line in public_callables() if line.startswith("LossScaleOptimizer(")
    )
    assert f"LossScaleOptimizer{written(optimizer.__init__)}" == expected
    for name in ("apply_gradients", "scale_loss", "get_unscaled_gradients"):
        first = next(iter(inspect.signature(getattr(optimizer, name)).parameters))
        assert first in ("grads_and_vars", "loss", "grads")


def test_the_public_api():
    assert sorted(lossscale.__all__) == [
        "DynamicLossScale",
        "ExponentialUpdateLossScaleManager",
        "FixedLossScale",
        "FixedLossScaleManager",
        "GradientRanges",
        "LossScale",
        "LossScaleManager",
        "LossScaleMonitor",
        "LossScaleOptimizer",
        "LossScaleWarning",
        "Run",
        "Simulation",
        "all_finite",
        "deserialize",
        "export_state",
        "get",
        "gradient_ranges",
        "import_state",
        "load_run",
        "presets",
        "save_run",
        "serialize",
        "simulate",
    ]
    for name in lossscale.__all__:
        assert getattr(lossscale, name).__doc__, name
