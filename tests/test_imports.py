"""Imports point one way, and the public API is what it is meant to be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lossscale

ROOT = Path(lossscale.__file__).parent

#: A module may import from the levels above its own, and from its own level only if it
#: is named in `WITHIN`.
LEVELS = [
    {
        "_autograph",
        "_keras",
        "arguments",
        "check",
        "batches",
        "borrowing",
        "compiled",
        "exponents",
        "finite",
        "packing",
        "presets",  # a table: it makes no loss scale, and knows no class
        "record",
        "replicas",
        "scaling",
        "systems",  # another table
        "base",
    },
    {"fixed", "dynamic"},
    {"interchange", "managers", "serialization"},
    {"optimizer"},
    {
        "diagnosis",
        "range_report",
        "range_views",
        "ranges",
        "simulate",
        "simulation",
        "stalls",
    },
    {"callbacks"},
    {"__main__"},
    {"__init__"},
]
#: What a level's modules may import from their own level.
WITHIN = {
    "packing": {"compiled"},
    "check": {"finite"},
    "finite": {"_autograph", "compiled", "packing"},
    "scaling": {"_keras", "compiled"},
    "replicas": {"_keras"},
    "base": {"_autograph", "finite", "replicas", "scaling"},
    "presets": {"arguments"},
    "systems": {"arguments"},
    "range_report": {"range_views"},
    "ranges": {"range_report"},
    "simulate": {"simulation"},
    "serialization": {"managers"},
}
#: The same within `optimizer/`.
OPTIMIZER = {
    "faults": set(),
    "stage": set(),
    "sharing": set(),
    "wrappers": set(),
    "config": {"wrappers"},
    "forwarding": set(),
    "unscaling": set(),
    "verdict": {"unscaling"},
    "step": {"faults", "sharing", "unscaling", "verdict"},
    "base": {
        "config",
        "faults",
        "forwarding",
        "sharing",
        "stage",
        "step",
        "unscaling",
        "wrappers",
    },
    "keras2": {"base", "forwarding", "wrappers"},
    "keras3": {"base", "forwarding", "wrappers"},
    "__init__": {"base", "keras2", "keras3"},
}


def imported(path):
    """Returns the modules of ours that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts[0] == "lossscale":
                found |= (
                    {".".join(parts[1:])}
                    if parts[1:] and parts != ["lossscale", "optimizer"]
                    else {".".join([*parts[1:], alias.name]) for alias in node.names}
                )
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("lossscale.") for alias in node.names)
    return found


def test_every_module_has_its_place():
    modules = {path.stem for path in ROOT.glob("*.py")} | {"optimizer"}
    assert modules == set().union(*LEVELS)
    assert {path.stem for path in (ROOT / "optimizer").glob("*.py")} == set(OPTIMIZER)


@pytest.mark.parametrize("module", sorted(set().union(*LEVELS) - {"optimizer"}))
def test_modules_import_upwards_only(module):
    level = next(i for i, names in enumerate(LEVELS) if module in names)
    allowed = set().union(*LEVELS[:level]) | WITHIN.get(module, set())
    for name in imported(ROOT / f"{module}.py"):
        assert name.split(".")[0] in allowed, f"{module} imports {name}"


@pytest.mark.parametrize("module", sorted(OPTIMIZER))
def test_the_optimizers_modules_import_one_way(module):
    above = set().union(*LEVELS[:3])
    for name in imported(ROOT / "optimizer" / f"{module}.py"):
        if name.startswith("optimizer"):
            inner = name.split(".")[1]
            allowed = inner in OPTIMIZER[module] or inner[0].isupper()
            assert allowed, f"optimizer/{module} imports {name}"
        else:
            assert name.split(".")[0] in above, f"optimizer/{module} imports {name}"


def test_one_file_reduces_across_replicas():
    words = ("all_reduce", "reduce_to", "merge_call", "call_for_each_replica")
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        assert path.name == "replicas.py" or not used & set(words), path


def test_one_file_asks_for_versions():
    for path in ROOT.rglob("*.py"):
        source = path.read_text()
        assert path.name in ("_keras.py", "__init__.py") or "__version__" not in source


def test_files_are_short():
    for path in ROOT.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 300, path


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
