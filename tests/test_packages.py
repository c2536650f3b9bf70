"""Packages: imports point one way, and each `__init__.py` lists every module."""

import ast
import re
from pathlib import Path

import pytest

import lossscale

pytestmark = pytest.mark.smoke
ROOT = Path(lossscale.__file__).parent
TESTS = Path(__file__).parent

#: A module may import from what is on the left of its own package, and from its own
#: package what the docstring of the `__init__` lists before it.
ARROWS = """
arguments presets plotting <- runtime <- gradients <- scales <-
provenance <- optimizer <- simulation | ranges | compat <- monitor <- __init__ __main__
"""
#: Of each package or module, what it may import: all on the left of it.
LEFT = {}
for _group in ARROWS.replace("\n", " ").split("<-"):
    _left = set(LEFT)
    for _name in _group.replace("|", " ").split():
        LEFT[_name] = _left
LEFT["presets"] = {"arguments"}
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def listed(package):
    """Returns the modules of a package in the order of its `__init__`."""
    text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))
    lines = re.findall(r"(?m)^\* (.*?): ", text)
    return [name for line in lines for name in re.findall(r"`(\w+)`", line)]


def rules():
    """Returns the modules of loss scales that need no line there.

    Each holds one public class, a subclass of `LossScale` itself.
    """
    public = [getattr(lossscale, name) for name in lossscale.__all__]
    bases = (lossscale.LossScale,)
    rules = [each for each in public if getattr(each, "__bases__", ()) == bases]
    homes = [cls.__module__.split(".")[-2:] for cls in rules]
    assert {package for package, _ in homes} == {"scales"}
    modules = {module for _, module in homes}
    assert len(modules) == len(rules), "one loss scale for each file"
    return modules - {*listed("scales")}


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


def test_each_package_lists_its_modules():
    assert {path.stem for path in ROOT.glob("*.py")} | {*PACKAGES} == set(LEFT)
    for package in PACKAGES:
        found = {path.stem for path in (ROOT / package).rglob("*.py")}
        named = [*listed(package), "__init__"]
        named += rules() if package == "scales" else []
        assert sorted(named) == sorted(found), package


def test_the_map_lists_each_package_below_those_that_it_imports():
    page = (TESTS.parent / "docs" / "inside.md").read_text()
    (lines,) = re.findall(r"(?ms)^```\nlossscale/\n(.*?)^```", page)
    found = re.findall(r"(?m)^  (\w+)(/|\.py) +\S", lines)
    packages = [name for name, ending in found if ending == "/"]
    modules = {name for name, ending in found if ending == ".py"}
    assert sorted(packages) == PACKAGES
    assert modules | {"__init__"} == {path.stem for path in ROOT.glob("*.py")}
    for number, package in enumerate(packages):
        assert {*PACKAGES} & LEFT[package] <= {*packages[:number]}, package


def test_imports_point_one_way():
    for file in FILES:
        package, _, module = file[: -len(".py")].rpartition("/")
        for there, *inside in imports(file):
            if there != package:
                assert there in LEFT[package or module], file
            elif module != "__init__":
                order = listed(package)
                # A file that is not listed is a loss scale, above `base` alone.
                before = order[: order.index(module)] if module in order else ["base"]
                assert inside[0] in before, file


def test_only_the_optimizer_asks_where_gradients_come_from():
    for file in FILES:
        package = file.partition("/")[0]
        if any(there == "provenance" for there, *_ in imports(file)):
            assert package in {"provenance", "optimizer"}, file


def test_one_file_reads_the_number_of_a_pending_division_and_one_reduces():
    words = {"all_reduce", "reduce_to", "merge_call", "call_for_each_replica"}
    for path in ROOT.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        found = [node for node in nodes if isinstance(node, ast.Attribute)]
        names = {node.attr for node in found}
        assert path.name == "pending.py" or "pending" not in names, path
        # That file's own functions have TensorFlow's names.
        used = {n.attr for n in found if getattr(n.value, "id", None) != "replicas"}
        assert path.name == "replicas.py" or not used & words, path


def test_only_the_runtime_asks_for_versions():
    asking = {file for file in FILES if "__version__" in (ROOT / file).read_text()}
    # One says its own version, one prints all of them: neither acts on any.
    telling = {"__init__.py", "__main__.py"}
    assert asking == telling | {"runtime/keras_versions.py", "runtime/mode.py"}


def test_only_the_runtime_imports_what_tensorflow_does_not_publish():
    for file in FILES:
        text = (ROOT / file).read_text()
        assert file.startswith("runtime/") or "tensorflow.python" not in text, file


def test_a_test_file_is_found_where_its_code_is():
    # What is named as a module tests it. Other names say what is tested.
    homes = {}
    for file in FILES:
        homes.setdefault(Path(file).stem, set()).add(Path(file).parent)
    for path in TESTS.rglob("test_*.py"):
        module = path.stem[len("test_") :]
        folder = path.parent.relative_to(TESTS)
        assert folder in homes.get(module, {folder}), path
